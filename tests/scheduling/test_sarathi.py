"""Chunked prefill in stall-free batches (Sarathi-Serve, Algorithm 3), on the runner without a model."""

import random

import pytest

from minillm.scheduling.sarathi import largest_budget
from tests.scheduling import fakes
from tests.scheduling.fakes import Loop, expected, make_scheduler

CHUNKED = dict(batching="iteration", enable_chunked_prefill=True, eos=())
HOSTS = pytest.mark.parametrize("host_blocks", [0, 100], ids=["recompute", "swap"])


class Watched(Loop):
    """Checks Algorithm 3 on every pass: decodes whole, then prompts that have begun, then new ones, within budget."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.plans: list[dict[str, int]] = []  # tokens of each request, pass by pass

    def launch(self) -> bool:
        scheduler = self.scheduler
        lacking = {r.request_id: r.num_tokens - r.num_computed_tokens for r in scheduler.running}
        if not super().launch():
            return False
        budget = scheduler.config.max_num_batched_tokens
        batch, passed = self.flying[-1][0], self.passes[-1]
        given = dict(batch.num_scheduled_tokens)
        self.plans.append(given)
        there = {name: tokens for name, tokens in lacking.items() if name not in passed.preempted}
        decodes = [name for name, tokens in there.items() if tokens == 1]
        begun = [name for name, tokens in there.items() if tokens > 1]
        assert all(given.get(name) == 1 for name in decodes), "a decode was left out"
        assert passed.tokens <= budget
        chunks = sum(given.get(name, 0) for name in begun)
        room = budget - len(decodes)
        assert chunks == min(room, sum(there[name] for name in begun)), "what decodes leave goes to begun prompts"
        joined = [name for name in given if name not in there]
        if joined:
            assert len(decodes) + chunks < budget, "none joins without budget"
            assert all(given[name] == there[name] for name in begun), "and none before those that have begun are served"
            cut = [name for name in joined if not self.caught_up(name)]
            assert cut in ([], joined[-1:]), "only the last to join is cut"
        return True

    def caught_up(self, name: str) -> bool:
        return self.scheduler.requests[name].num_computed_tokens == self.scheduler.requests[name].num_tokens


def scheduler(budget: int, blocks: int = 40, block_size: int = 4, max_model_len: int = 64, **more):
    return make_scheduler(blocks, block_size, max_model_len, budget, **CHUNKED | more)


def request(name: str, prompt: int | list[int], **more):
    return fakes.request(name, prompt, **dict(ignore_eos=True) | more)


def assert_right(*requests, capacity=64):
    for each in requests:
        tokens, reason = expected(each.prompt_token_ids, each.sampling_params, capacity)
        assert (each.output_token_ids, each.finish_reason) == (tokens, reason)


def test_a_long_prompt_is_cut_into_what_decodes_leave():
    loop = Watched(scheduler(budget=8))
    loop.scheduler.add(request("a", 5, max_tokens=6))
    loop.scheduler.add(request("b", 3, max_tokens=5))
    loop.step()
    loop.run(request("long", 17, max_tokens=1))
    assert loop.plans == [
        {"a": 5, "b": 3},
        {"a": 1, "b": 1, "long": 6},
        {"a": 1, "b": 1, "long": 6},
        {"a": 1, "b": 1, "long": 5},
        {"a": 1, "b": 1},
        {"a": 1},
    ]


def test_prompts_that_have_begun_go_before_new_ones_and_only_the_last_is_cut():
    loop = Watched(scheduler(budget=10))
    loop.run(*(request(name, length, max_tokens=2) for name, length in [("a", 13), ("b", 4), ("c", 9)]))
    assert loop.plans == [
        {"a": 10},
        {"a": 3, "b": 4, "c": 3},
        {"a": 1, "b": 1, "c": 6},
        {"c": 1},
    ]


def test_nobody_joins_a_pass_that_decodes_fill():
    loop = Watched(scheduler(budget=3))
    requests = [request(name, 1, max_tokens=4) for name in "abcd"]
    loop.run(*requests)
    assert [list(plan) for plan in loop.plans] == [["a", "b", "c"]] * 4 + [["d"]] * 4
    assert_right(*requests)


def test_the_order_of_arrival_decides_among_prompts_that_have_begun():
    """Not who got a seat first: the earlier one came back after it had given way."""
    loop = Watched(scheduler(budget=6, max_num_seqs=2))
    first, second = request("first", 20, max_tokens=1), request("second", 20, max_tokens=1)
    loop.scheduler.add(first)
    loop.step()
    loop.scheduler.block("first", "a tool")
    loop.scheduler.add(second)
    loop.step()
    loop.scheduler.unblock("first")
    loop.run()
    assert loop.plans[2:5] == [{"second": 6}, {"second": 6}, {"second": 2, "first": 4}], "but none joins before"
    assert_right(first, second)


def test_a_decode_goes_before_the_prompt_of_an_earlier_arrival():
    loop = Watched(scheduler(budget=6))
    first, second = request("first", 20, max_tokens=1), request("second", 4, max_tokens=6)
    loop.scheduler.add(first)
    loop.step()
    loop.scheduler.block("first", "a tool")
    loop.scheduler.add(second)
    loop.step()
    loop.scheduler.unblock("first")
    loop.run()
    assert loop.plans[2:5] == [{"second": 1, "first": 5}, {"second": 1, "first": 5}, {"second": 1, "first": 4}]
    assert_right(first, second)


def prompts(seed: int, count: int, longest: int) -> list[dict]:
    rng = random.Random(seed)
    return [
        dict(prompt=[rng.randrange(50) for _ in range(rng.randint(1, longest))], max_tokens=rng.randint(1, 9))
        for _ in range(count)
    ]


@pytest.mark.parametrize("cache", ["none", "radix"])
def test_whole_is_chunked_for_every_budget(cache):
    """The runner asserts every row of KV, ``expected`` every token."""
    for budget in range(1, 26):
        asked = [request(f"r{i}", **each) for i, each in enumerate(prompts(budget, 6, 24))]
        loop = Watched(scheduler(budget, max_num_seqs=1 + budget % 5, prefix_cache=cache))
        loop.run(*asked)
        assert_right(*asked)


@HOSTS
@pytest.mark.parametrize("cache", ["none", "radix"])
def test_a_prompt_gives_way_when_half_of_it_is_computed(host_blocks, cache):
    loop = Watched(scheduler(budget=6, host_blocks=host_blocks, prefix_cache=cache))
    one, two = request("one", 9, max_tokens=9), request("two", list(range(20)), max_tokens=3)
    loop.scheduler.add(one)
    loop.scheduler.add(two)
    loop.step()
    loop.step()
    assert loop.plans == [{"one": 6}, {"one": 3, "two": 3}] and two.num_computed_tokens == 3
    loop.step()
    assert two.num_computed_tokens == 8
    loop.scheduler.preempt("two")
    assert two.num_computed_tokens == (8 if host_blocks else 0)
    loop.run()
    again = sum(plan.get("two", 0) for plan in loop.plans[3:])
    kept = bool(host_blocks) or cache == "radix"
    assert again == (22 - 8 if kept else 22), "neither swapped nor cached rows are computed again"
    assert_right(one, two)


@HOSTS
@pytest.mark.parametrize("budget", [1, 3, 7])
def test_half_a_prompt_under_pressure(budget, host_blocks):
    """The pool is too small for all: prompts give way in the middle, and come back."""
    preempted = 0
    for seed in range(6):
        asked = [request(f"r{i}", **each | {"max_tokens": 12}) for i, each in enumerate(prompts(seed, 5, 20))]
        sched = scheduler(budget, blocks=10, max_model_len=40, host_blocks=host_blocks, max_num_seqs=4)
        Watched(sched).run(*asked)
        assert_right(*asked, capacity=40)
        preempted += sum(each.num_preemptions for each in asked)
    assert preempted or budget == 1, "with one token a pass hardly two are ever there together"


@HOSTS
@pytest.mark.parametrize("policy", ["priority", "mlfq"])
def test_a_better_rank_displaces_a_half_computed_prompt(policy, host_blocks):
    """Priority and MLFQ's levels work on chunks as on whole prompts."""
    sched = scheduler(budget=8, host_blocks=host_blocks, scheduling_policy=policy, max_num_seqs=1)
    loop = Watched(sched)
    long, short = request("long", 50, priority=1, max_tokens=2), request("short", 4, priority=0, max_tokens=2)
    loop.scheduler.add(long)
    loop.step()
    loop.step()
    loop.scheduler.add(short)
    loop.step()
    assert loop.plans == [{"long": 8}, {"long": 8}, {"short": 4}] and long.num_preemptions == 1
    loop.run()
    assert sum(plan.get("long", 0) for plan in loop.plans[3:]) == (51 - 16 if host_blocks else 51)
    assert_right(long, short)


def test_mlfq_counts_the_tokens_of_chunks():
    """A quantum of 32 is used up by four chunks of 8, so a prompt of 70 sinks from the queue that covers it."""
    loop = Watched(scheduler(budget=8, max_model_len=100, scheduling_policy="mlfq"))
    long = request("long", 70, max_tokens=2)
    loop.scheduler.add(long)
    levels = []
    for _ in range(9):
        loop.step()
        levels.append(loop.scheduler.policy.rank(long))
    assert levels == [2] * 9, "quantum 128 covers 70"
    short = request("short", 30, max_tokens=12)
    loop.scheduler.add(short)
    while short.num_tokens < 34:
        loop.step()
    assert loop.scheduler.policy.rank(short) == 1, "30 tokens and two more were its quantum of 32"
    loop.run()


def test_samples_wait_for_the_whole_prompt_of_the_first():
    loop = Watched(scheduler(budget=5))
    samples = [request(f"a/{i}", 12, group="a", sample_index=i, max_tokens=3) for i in range(3)]
    loop.run(*samples)
    assert loop.plans[:4] == [{"a/0": 5}, {"a/0": 5}, {"a/0": 2}, {"a/0": 1, "a/1": 1, "a/2": 1}]
    assert_right(*samples)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_passes_in_flight(depth):
    """A prompt may have several chunks on their way; a decode has one token at most."""
    asked = [request(f"r{i}", **each) for i, each in enumerate(prompts(3, 6, 20))]
    sched = scheduler(7)
    loop = Loop(sched)
    flying = []
    for each in asked:
        sched.add(each)
    while sched.has_unfinished():
        while len(flying) < depth:
            batch = sched.schedule()
            if not batch.num_scheduled_tokens:
                break
            flying.append((batch, loop.runner.execute(batch)))
        sched.update(*flying.pop(0))
        assert sched.kv.check_integrity(live=sched.requests)
    assert_right(*asked)


# -- budgets ------------------------------------------------------------------------------------------------------


def test_without_chunks_a_budget_below_the_capacity_is_refused():
    whole = dict(CHUNKED, enable_chunked_prefill=False)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 63; without chunked prefill .* at least 64"):
        scheduler(63, **whole)
    scheduler(64, **whole)
    scheduler(1)


def test_the_largest_budget_that_is_fast_enough():
    measured = {512: 0.041, 128: 0.020, 256: 0.024, 1024: 0.090}
    assert largest_budget(measured, 0.050) == 512
    assert largest_budget(measured, 0.041) == 512, "the target itself is fast enough"
    assert largest_budget(measured, 0.0409) == 256
    assert largest_budget(measured, 10) == 1024


def test_a_budget_above_one_that_is_too_slow_does_not_count():
    assert largest_budget({128: 0.02, 256: 0.06, 512: 0.04}, 0.05) == 128
    assert largest_budget({128: 0.03, 256: 0.02, 512: 0.06}, 0.05) == 256, (
        "a smaller one may be slower, if not too slow"
    )


def test_no_budget_is_fast_enough():
    with pytest.raises(ValueError, match=r"target is 0\.01 seconds between tokens; 128 tokens take 0\.0200"):
        largest_budget({256: 0.005, 128: 0.02}, 0.01)
    with pytest.raises(ValueError, match="target is 1 seconds between tokens; nothing was measured"):
        largest_budget({}, 1)
