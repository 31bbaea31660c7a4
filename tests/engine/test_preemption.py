"""Paged KV under pressure: whoever gives way, pauses or shares says the same as alone (float64)."""

import random

import pytest

from minillm.core.config import LAST_BUILT
from minillm.core.sampling_params import SamplingParams
from tests.support import all_free, assert_same, drain, failing, greedy, random_prompt, serve

PAGED = range(2, LAST_BUILT + 1)
MODES = ["recompute", "swap"]


def requests(seed: int = 0, count: int = 6) -> dict:
    rng = random.Random(seed)
    made = {}
    for i in range(count):
        params = dict(max_tokens=rng.randint(20, 30), ignore_eos=True, logprobs=2)
        params |= dict(prompt_logprobs=1) if i % 3 == 0 else {}
        params |= dict(temperature=0.0) if i % 2 else dict(seed=i, temperature=1.2, repetition_penalty=1.2)
        made[f"r{i}"] = random_prompt(rng, rng.randint(3, 20)), SamplingParams(**params)
    return made


@pytest.fixture(scope="module")
def alone():
    """Outputs of ``requests()`` served one by one, computed once."""
    return {}


def outputs_alone(alone: dict, engine_factory) -> dict:
    if not alone:
        for name, request in requests().items():
            alone |= serve(engine_factory(chapter=0), {name: request})
    return alone


def barely(block_size: int, requests: dict) -> int:
    """Blocks, the null block among them, for the longest of these requests, and one that each other may begin with."""
    longest = max(len(prompt["prompt_token_ids"]) + params.max_tokens for prompt, params in requests.values())
    return -(-longest // block_size) + len(requests)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_all_but_the_oldest_give_way_and_say_the_same(engine_factory, alone, block_size, mode):
    asked = requests()
    engine = engine_factory(
        block_size=block_size, num_gpu_blocks_override=barely(block_size, asked), max_num_seqs=8, preemption_mode=mode
    )
    for name, request in asked.items():
        engine.add_request(name, *request)
    # Everybody runs at least once before anybody is done, and gives way at least once: the oldest excepted.
    seen, done = {}, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            done[output.request_id] = output
        assert engine.check_integrity()
        for request in engine.scheduler.requests.values():
            seen[request.request_id] = request.num_preemptions
        for request in list(engine.scheduler.running)[1:]:
            if request.num_preemptions == 0 and request.num_tokens > len(request.prompt_token_ids) + 2:
                engine.scheduler.preempt(request.request_id)
    assert seen.pop("r0") == 0 and all(seen.values()), seen
    want = outputs_alone(alone, engine_factory)
    for name in asked:
        assert_same(done[name], want[name])
    assert all_free(engine) and engine.kv.host_pool.num_free == engine.kv.host_pool.num_usable
    assert engine.metrics.preemptions >= len(asked) - 1
    assert (engine.metrics.blocks_swapped > 0) == (mode == "swap")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chapter", PAGED)
def test_pressure_alone_makes_requests_give_way(engine_factory, alone, chapter, mode):
    """No hand laid on the scheduler: a pool in which the six cannot stay together."""
    asked = requests()
    engine = engine_factory(chapter=chapter, block_size=4, num_gpu_blocks_override=26, preemption_mode=mode)
    done = serve(engine, asked)
    assert engine.metrics.preemptions > 0
    want = outputs_alone(alone, engine_factory)
    for name in asked:
        assert_same(done[name], want[name])


def test_swapping_falls_back_to_recomputing_where_host_memory_is_full(engine_factory, alone):
    asked = requests()
    one_block = 4 * 2 * 2 * 16 * 8 * 2 / 2**30  # rows · K and V · heads · head dim · float64 · layers
    engine = engine_factory(
        block_size=4, num_gpu_blocks_override=26, preemption_mode="swap", swap_space=4.5 * one_block
    )
    assert engine.kv.host_pool.num_usable == 4
    done = serve(engine, asked)
    want = outputs_alone(alone, engine_factory)
    for name in asked:
        assert_same(done[name], want[name])


def test_streamed_text_of_a_preempted_request_is_not_spliced(engine_factory):
    asked = requests()
    engine = engine_factory(block_size=4, num_gpu_blocks_override=26)
    for name, request in asked.items():
        engine.add_request(name, *request)
    streamed: dict[str, list[int]] = {name: [] for name in asked}
    while engine.has_unfinished_requests():
        for output in engine.step():
            (sample,) = output.outputs
            told = streamed[output.request_id]
            assert sample.token_ids[: len(told)] == told, "what was streamed stays"
            assert len(sample.token_ids) == len(told) + 1, "one token a pass, none twice"
            streamed[output.request_id] = sample.token_ids
    assert engine.metrics.preemptions > 0
    assert {name: len(told) for name, told in streamed.items()} == {n: p.max_tokens for n, (_, p) in asked.items()}


# -- sharing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chapter", PAGED)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 17])
def test_samples_share_the_prompts_blocks(engine_factory, chapter, length):
    prompt = random_prompt(random.Random(length), length)
    params = SamplingParams(n=4, seed=1, max_tokens=6, ignore_eos=True, logprobs=1)
    (want,) = serve(engine_factory(chapter=0), {"a": (prompt, params)}).values()
    engine = engine_factory(chapter=chapter, block_size=4)
    (got,) = serve(engine, {"a": (prompt, params)}).values()
    assert_same(got, want)
    # The prompt once; the others compute its last token again, to draw their own first one, a pass behind the first.
    assert engine.metrics.tokens_computed == length + 3 + 4 * 5
    common = (length - 1) // 4  # blocks that nobody writes any more

    def own(rows):
        return -(-rows // 4) - common

    # A prefix cache keeps the prompt's last block, of which each sample has a copy, if it is full.
    kept = 1 if engine.kv.cache and length % 4 == 0 else 0
    fullest = common + max(own(length + 5) + 3 * own(length + 4), kept + 3 * own(length + 5))
    assert engine.metrics.kv_slots_reserved == 4 * fullest
    # The block in which the prompt's last token stands, unless it is the first one there.
    assert engine.metrics.blocks_copied == (3 if (length - 1) % 4 else 0)


def test_many_samples_under_pressure(engine_factory):
    rng = random.Random(0)
    asked = {
        name: (random_prompt(rng, 9), SamplingParams(n=3, seed=5, max_tokens=14, ignore_eos=True, logprobs=1))
        for name in "abc"
    }
    want = serve(engine_factory(chapter=0), asked)
    for mode in MODES:
        engine = engine_factory(block_size=4, num_gpu_blocks_override=17, preemption_mode=mode)
        done = serve(engine, asked)
        assert engine.metrics.preemptions > 0
        for name in asked:
            assert_same(done[name], want[name])


# -- blocked ----------------------------------------------------------------------------------------------------------


def test_a_blocked_request_pauses_and_resumes_where_it_was(engine_factory, alone):
    asked = requests()
    engine = engine_factory(block_size=4)
    done = {}
    for name, request in asked.items():
        engine.add_request(name, *request)
    for _ in range(5):
        engine.step()
    before = engine.metrics.tokens_computed
    engine.block("r1", "a calculator")
    assert engine.scheduler.requests["r1"].blocked_on == "a calculator"
    length = engine.scheduler.requests["r1"].num_tokens
    for _ in range(4):
        for output in engine.step():
            assert output.request_id != "r1"
    assert engine.metrics.tokens_computed == before + 4 * 5
    assert engine.scheduler.requests["r1"].num_tokens == length
    engine.unblock("r1")
    drain(engine, done)
    want = outputs_alone(alone, engine_factory)
    assert_same(done["r1"], want["r1"])
    assert engine.metrics.preemptions == 0, "its KV was kept"


def test_a_blocked_requests_room_goes_to_whoever_needs_it(engine_factory, alone):
    asked = {name: request for name, request in requests().items() if name in ("r0", "r2")}
    engine = engine_factory(block_size=4, num_gpu_blocks_override=barely(4, asked))
    engine.add_request("r0", *asked["r0"])
    for _ in range(8):
        engine.step()
    engine.block("r0", "a slow tool")
    engine.add_request("r2", *asked["r2"])
    done = {}
    while "r2" not in done:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert engine.scheduler.requests["r0"].num_preemptions == 1
    assert engine.step() == [], "nothing but the blocked one is left"
    engine.unblock("r0")
    drain(engine, done)
    want = outputs_alone(alone, engine_factory)
    for name in asked:
        assert_same(done[name], want[name])


def test_blocking_is_checked(engine_factory):
    engine = engine_factory()
    engine.add_request("a", random_prompt(random.Random(0), 3), greedy(3))
    with pytest.raises(ValueError, match="request 'b' is not known"):
        engine.block("b", "x")
    with pytest.raises(ValueError, match="'a' is waiting, not blocked"):
        engine.unblock("a")
    engine.block("a", "x")
    with pytest.raises(ValueError, match="'a' is blocked already, on 'x'"):
        engine.block("a", "y")
    assert engine.step() == [] and engine.has_unfinished_requests()
    engine.abort("a")
    assert not engine.has_unfinished_requests()


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_swap_lost_with_its_pass_is_computed_again(engine_factory, alone):
    asked = requests()
    engine = engine_factory(
        block_size=4, preemption_mode="swap", parts=failing(error=RuntimeError("boom"), at=(6,)), max_num_seqs=6
    )
    done = {}
    for name, request in asked.items():
        engine.add_request(name, *request)
    for _ in range(6):
        engine.step()
    engine.scheduler.preempt("r4")
    assert engine.kv.is_swapped("r4")
    # One seat is r4's no more: it is not in the pass that fails.
    engine.scheduler.block("r4", "keep it out")
    with pytest.raises(RuntimeError, match="boom"):
        engine.step()
    assert not engine.kv.is_swapped("r4"), "nobody knows whether its rows arrived"
    engine.unblock("r4")
    drain(engine, done)
    assert_same(done["r4"], outputs_alone(alone, engine_factory)["r4"])
    assert all_free(engine)


# -- boundaries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("spare", [0, -1])
def test_lengths_at_block_boundaries_and_pools_that_just_fit(engine_factory, block_size, spare):
    """Served, ended with a reason, or refused: never stuck."""
    limit = 48
    for length in sorted({1, block_size - 1, block_size, block_size + 1, 2 * block_size, limit - 2, limit - 1}):
        for new in (1, 2, block_size + 1):
            want = min(length + new, limit)
            blocks = -(-want // block_size) + spare
            if blocks < 1:
                continue
            engine = engine_factory(
                block_size=block_size, num_gpu_blocks_override=1 + blocks, max_model_len=limit, dtype="float32"
            )
            prompt = random_prompt(random.Random(length), length)
            if length + 1 > engine.kv.capacity:
                with pytest.raises(ValueError, match=f"the prompt has {length} tokens"):
                    engine.add_request("a", prompt, greedy(new))
                continue
            (sample,) = serve(engine, {"a": (prompt, greedy(new)), "b": (prompt, greedy(new))})["a"].outputs
            assert len(sample.token_ids) == min(new, engine.kv.capacity - length)
            assert sample.finish_reason == "length"
            assert all_free(engine)
