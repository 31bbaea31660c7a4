"""Prefixes found in a cache and prompts computed in chunks: the same tokens as alone, cold and whole (float64)."""

import random

import pytest

from minillm.core.sampling_params import SamplingParams
from tests.support import all_free, assert_same, drain, failing, greedy, random_prompt, serve

CACHES = ["radix", "block_hash"]
MODES = ["recompute", "swap"]
LONGEST = 40


def ids(prompt: dict) -> list[int]:
    return prompt["prompt_token_ids"]


def requests() -> dict:
    """Prompts that are equal, begin alike, end with a block, and one that shares nothing."""
    rng = random.Random(0)
    stem = ids(random_prompt(rng, 32))

    def prompt(shared: int, own: int) -> dict:
        return {"prompt_token_ids": stem[:shared] + ids(random_prompt(rng, own))}

    drawn = dict(temperature=1.2, repetition_penalty=1.2, max_tokens=7, ignore_eos=True, logprobs=2)
    return {
        "stem": (prompt(32, 0), greedy(6, logprobs=2)),
        "stem again": (prompt(32, 0), SamplingParams(seed=1, **drawn)),
        "longer": (prompt(32, LONGEST - 32), greedy(5, logprobs=2)),
        "parts inside a block": (prompt(30, 5), SamplingParams(seed=2, **drawn)),
        "three samples": (prompt(17, 6), SamplingParams(seed=3, n=3, **drawn)),
        "sees its prompt": (prompt(32, 3), greedy(4, logprobs=2, prompt_logprobs=1)),
        "shares nothing": (prompt(0, 7), greedy(9, logprobs=2)),
        "one token": (prompt(1, 0), greedy(3, logprobs=2)),
    }


@pytest.fixture(scope="module")
def references():
    return {}


@pytest.fixture
def cold(references, engine_factory):
    """Outputs of ``requests()``, each alone on the engine of chapter 00; computed once."""
    if not references:
        for name, request in requests().items():
            references |= serve(engine_factory(chapter=0), {name: request})
    return references


def assert_all_same(done: dict, cold: dict) -> None:
    for name, output in done.items():
        assert_same(output, cold[name])


def found(cache: str, prompt: dict, block_size: int) -> int:
    """Rows of a prompt that a cache has that has seen it before: all but the last."""
    rows = len(ids(prompt)) - 1
    return rows if cache == "radix" else rows // block_size * block_size


# -- cold is cached, whole is chunked -------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("cache", CACHES)
def test_cached_says_the_same_as_cold(engine_factory, cold, cache, block_size):
    engine = engine_factory(prefix_cache=cache, block_size=block_size, enable_chunked_prefill=False)
    asked = requests()
    assert_all_same(serve(engine, asked), cold)
    before = engine.metrics.tokens_cached
    again = serve(engine, asked)
    assert_all_same(again, cold)
    for name, (prompt, params) in asked.items():
        want = 0 if params.prompt_logprobs is not None else found(cache, prompt, block_size)
        assert again[name].num_cached_tokens == want, name
    # Of the three samples the first finds the prompt; the others share it with the first.
    assert engine.metrics.tokens_cached - before == sum(output.num_cached_tokens for output in again.values())
    assert all_free(engine)


@pytest.mark.parametrize("budgets", [range(1, 8), range(8, 24), range(24, LONGEST + 3)], ids=str)
def test_chunked_says_the_same_as_whole_for_every_chunk_size(engine_factory, cold, budgets):
    asked = requests()
    for budget in budgets:
        engine = engine_factory(prefix_cache="none", block_size=4, max_num_batched_tokens=budget)
        assert_all_same(serve(engine, asked), cold)
        widest = max(len(ids(prompt)) for prompt, _ in asked.values())
        assert widest == LONGEST and engine.metrics.tokens_cached == 0


@pytest.mark.parametrize("budget", [1, 3, 5, 16, 33, 200])
@pytest.mark.parametrize("cache", CACHES)
def test_chunked_and_cached(engine_factory, cold, cache, budget):
    engine = engine_factory(prefix_cache=cache, block_size=4, max_num_batched_tokens=budget)
    for _ in range(2):
        assert_all_same(serve(engine, requests()), cold)
    asked = [prompt for prompt, params in requests().values() if params.prompt_logprobs is None]
    assert engine.metrics.tokens_cached >= sum(found(cache, prompt, 4) for prompt in asked), "the second time at least"
    assert all_free(engine)


@pytest.mark.parametrize("policy", ["lpm", "mlfq"])
def test_in_another_order(engine_factory, cold, policy):
    engine = engine_factory(scheduling_policy=policy, block_size=4, max_num_batched_tokens=11, max_num_seqs=2)
    for _ in range(2):
        assert_all_same(serve(engine, requests()), cold)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("block_size, budget", [(1, 9), (4, 200), (16, 9)])
def test_under_pressure(engine_factory, cold, cache, mode, block_size, budget):
    """A pool for the longest request and a little more: some give way, halfway through a prompt or after it."""
    blocks = 1 + -(-(LONGEST + 5) // block_size) + 14 // block_size + 1
    engine = engine_factory(
        prefix_cache=cache,
        block_size=block_size,
        num_gpu_blocks_override=blocks,
        max_num_batched_tokens=budget,
        preemption_mode=mode,
        max_num_seqs=6,
    )
    rng, preempted = random.Random(block_size), 0
    for _ in range(2):
        done: dict = {}
        for name, request in requests().items():
            engine.add_request(name, *request)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = output
            assert engine.check_integrity()
            if rng.random() < 0.15 and len(engine.scheduler.running) > 1:
                engine.scheduler.preempt(rng.choice(engine.scheduler.running[1:]).request_id)
                preempted += 1
        assert_all_same(done, cold)
        assert all_free(engine)
    assert engine.metrics.preemptions >= preempted > 0 and engine.metrics.tokens_cached > 0


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("seed", range(4))
def test_with_aborts_in_between(engine_factory, cold, cache, seed):
    """Whoever is aborted, at whatever moment, leaves nothing wrong behind for those that begin alike."""
    rng = random.Random(seed)
    engine = engine_factory(
        prefix_cache=cache, block_size=4, max_num_batched_tokens=rng.choice([3, 7, 200]), num_gpu_blocks_override=40
    )
    for _ in range(3):
        waiting, done, aborted = list(requests().items()), {}, set()
        rng.shuffle(waiting)
        while waiting or engine.has_unfinished_requests():
            if waiting and rng.random() < 0.5:
                name, request = waiting.pop()
                engine.add_request(name, *request)
            there = sorted(engine.outputs.prompts)
            if there and rng.random() < 0.1:
                aborted.add(name := rng.choice(there))
                engine.abort(name)
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = output
            assert engine.check_integrity()
        assert_all_same({name: output for name, output in done.items() if name not in aborted}, cold)
    assert all_free(engine)


# -- what exactly is shared -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache, hit, copies", [("radix", 15, 1), ("block_hash", 12, 0)])
def test_of_a_prompt_found_whole_the_last_token_is_computed(engine_factory, cache, hit, copies):
    """Sixteen tokens, four blocks: the row of the last is written into a copy, or its whole block is computed."""
    engine = engine_factory(prefix_cache=cache, block_size=4)
    asked = {"a": (random_prompt(random.Random(1), 16), greedy(3, logprobs=2))}
    first = serve(engine, asked)["a"]
    before = engine.metrics.tokens_computed
    second = serve(engine, asked)["a"]
    assert_same(second, first)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, hit)
    assert engine.metrics.tokens_computed - before == 16 - hit + 2
    assert engine.metrics.blocks_copied == copies


@pytest.mark.parametrize("cache", CACHES)
def test_equal_prompts_of_one_pass_share_nothing_that_is_not_written(engine_factory, cache):
    engine = engine_factory(prefix_cache=cache, block_size=4, enable_chunked_prefill=False)
    prompt = random_prompt(random.Random(2), 18)
    for name in "ab":
        engine.add_request(name, prompt, greedy(4, logprobs=2))
    engine.step()
    assert engine.metrics.tokens_computed == 2 * 18
    tables = [set(engine.kv.block_ids(name)[0]) for name in "ab"]
    assert not tables[0] & tables[1]
    engine.add_request("c", prompt, greedy(4, logprobs=2))
    engine.step()
    assert set(engine.kv.block_ids("c")[0][:4]) == set(engine.kv.block_ids("a")[0][:4]), "by now it is written"
    done = drain(engine)
    assert [done[name].num_cached_tokens for name in "abc"] == [0, 0, 16]
    for name in "bc":
        assert_same(done[name], done["a"])


def test_a_prompt_half_computed_is_found_as_far_as_it_is_written(engine_factory):
    engine = engine_factory(block_size=4, max_num_batched_tokens=10)
    prompt = random_prompt(random.Random(3), 30)
    engine.add_request("a", prompt, greedy(4, logprobs=2))
    engine.step()
    engine.abort("a")  # two whole blocks of its ten rows are in the cache, the rest is gone with it
    engine.add_request("b", prompt, greedy(4, logprobs=2))
    (b,) = drain(engine).values()
    assert b.num_cached_tokens == 8
    assert_same(b, serve(engine_factory(chapter=0), {"b": (prompt, greedy(4, logprobs=2))})["b"])


@pytest.mark.parametrize("cache", CACHES)
def test_outputs_are_found_by_the_next_turn(engine_factory, cache):
    """A chat's next prompt begins with the answer before: all of it but its last token has been computed."""
    engine = engine_factory(prefix_cache=cache, block_size=4)
    first = random_prompt(random.Random(4), 13)
    (answer,) = serve(engine, {"a": (first, greedy(8))})["a"].outputs
    turn = {"prompt_token_ids": ids(first) + answer.token_ids + [5, 6, 7]}
    second = serve(engine, {"b": (turn, greedy(5, logprobs=2))})["b"]
    assert second.num_cached_tokens == (13 + 7 if cache == "radix" else 20)
    assert_same(second, serve(engine_factory(chapter=0), {"b": (turn, greedy(5, logprobs=2))})["b"])


@pytest.mark.parametrize("cache", CACHES)
def test_who_wants_to_see_its_prompt_computes_it_and_leaves_it_to_others(engine_factory, cold, cache):
    engine = engine_factory(prefix_cache=cache, block_size=4)
    prompt, params = requests()["sees its prompt"]
    for _ in range(2):
        seen = serve(engine, {"a": (prompt, params)})["a"]
        assert_same(seen, cold["sees its prompt"])
        assert seen.num_cached_tokens == 0 and engine.metrics.tokens_cached == 0
    other = serve(engine, {"b": (prompt, greedy(4))})["b"]
    assert other.num_cached_tokens == found(cache, prompt, 4)
    assert other.outputs[0].token_ids == seen.outputs[0].token_ids


@pytest.mark.parametrize("cache", CACHES)
def test_tenants_of_different_salt_share_nothing(engine_factory, cache):
    engine = engine_factory(prefix_cache=cache, block_size=4)
    prompt = random_prompt(random.Random(5), 17)
    outputs = {}
    for name, salt in [("1", None), ("2", "x"), ("3", "y"), ("4", "x"), ("5", None)]:
        salted = prompt if salt is None else prompt | {"cache_salt": salt}
        outputs[name] = serve(engine, {name: (salted, greedy(3))})[name]
    assert [output.num_cached_tokens for output in outputs.values()] == [0, 0, 0, 16, 16]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs.values()}) == 1
    with pytest.raises(ValueError, match="cache_salt is 7; it must be a string"):
        engine.add_request("6", prompt | {"cache_salt": 7}, greedy(3))


# -- eviction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES)
def test_what_was_found_and_then_evicted_is_computed_again(engine_factory, cold, cache):
    engine = engine_factory(prefix_cache=cache, block_size=4, num_gpu_blocks_override=1 + 12)
    stem, other = requests()["stem"], (random_prompt(random.Random(6), LONGEST), greedy(5))
    for _ in range(2):
        output = serve(engine, {"stem": stem})["stem"]
        assert_same(output, cold["stem"])
        assert output.num_cached_tokens <= 4, "the other took all but a block or so"
        serve(engine, {"other": other})
    assert serve(engine, {"other": other})["other"].num_cached_tokens >= 36


@pytest.mark.parametrize("cache", CACHES)
def test_what_is_in_use_is_not_evicted(engine_factory, cold, cache):
    """While "stem again" runs on cached rows, others come and need more than what is idle: they wait."""
    engine = engine_factory(prefix_cache=cache, block_size=4, num_gpu_blocks_override=1 + 14)
    asked = requests()
    serve(engine, {"stem": asked["stem"]})
    engine.add_request("stem again", *asked["stem again"])
    engine.step()
    shared = engine.kv.block_ids("stem again")[0][:7]
    for i in range(3):
        engine.add_request(f"big {i}", random_prompt(random.Random(i), 36), greedy(4))
    done = {}
    while "stem again" in engine.scheduler.requests:
        assert engine.kv.block_ids("stem again")[0][:7] == shared
        assert all(engine.kv.pool.ref_counts[block] >= 2 for block in shared)
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert_same(done["stem again"], cold["stem again"])
    assert len(drain(engine, done)) == 4 and all_free(engine)


def test_a_request_as_long_as_the_pool_is_served_beside_a_full_cache(engine_factory):
    """To share would take a block more than there is: the one that is alone computes instead."""
    engine = engine_factory(block_size=4, num_gpu_blocks_override=1 + 6, max_model_len=24)
    prompt = random_prompt(random.Random(7), 20)
    parted = {"prompt_token_ids": [*ids(prompt)[:18], 1, 2, 3]}
    for name, asked in [("a", prompt), ("b", parted), ("c", prompt), ("d", prompt)]:
        output = serve(engine, {name: (asked, greedy(3, logprobs=2))})[name]
        assert_same(output, serve(engine_factory(chapter=0), {name: (asked, greedy(3, logprobs=2))})[name])
        assert all_free(engine)


# -- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["before the pass", "after the pass"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("at", range(5))
def test_a_failed_pass_leaves_no_row_in_the_cache_that_was_not_written(engine_factory, cold, cache, at, after):
    """Chunks of 11: passes 0 to 2 compute the prompt of 32, in blocks of 4; others that begin alike wait or run."""
    engine = engine_factory(
        prefix_cache=cache,
        block_size=4,
        max_num_batched_tokens=11,
        parts=failing(error=RuntimeError("boom"), at=(at,), after=after),
    )
    asked = requests()
    for name in ("stem", "longer"):
        engine.add_request(name, *asked[name])
    for _ in range(at):
        engine.step()
    with pytest.raises(RuntimeError, match="boom"):
        engine.step()
    match = engine.kv.match([*ids(asked["stem"][0]), 0], extra=(None, None))
    assert (match.num_tokens if match else 0) == min(at * 11, 32) // 4 * 4, "what earlier passes have written"
    done = drain(engine)
    assert "abort" in {output.outputs[0].finish_reason for output in done.values()}
    for _ in range(2):
        assert_all_same(serve(engine, asked), cold)
    assert all_free(engine)
