"""Longest prefix first: who waits is ordered by what the cache has of it."""

import pytest

from minillm.core.config import EngineConfig
from minillm.scheduling.cache_aware import LongestPrefixFirst
from tests.scheduling.fakes import Loop, expected, make_scheduler, request

A, B = list(range(10, 22)), list(range(30, 42))


def scheduler(blocks: int = 40, max_num_seqs: int = 1, **more):
    how = dict(blocks=blocks, block_size=4, max_model_len=40, batching="iteration", eos=(), max_num_seqs=max_num_seqs)
    return make_scheduler(**how | dict(scheduling_policy="lpm", prefix_cache="radix") | more)


def ask(name: str, prompt: list[int], **more):
    return request(name, prompt, **dict(max_tokens=1, ignore_eos=True) | more)


def order_of(loop: Loop) -> list[str]:
    """Who was let in, in order."""
    return [name for p in loop.passes for name in p.new]


def test_longer_prefixes_first_and_equal_ones_by_arrival():
    loop = Loop(scheduler())
    loop.run(ask("seed", A))
    loop.run(
        ask("none", B),
        ask("short", [*A[:3], 1]),
        ask("long", [*A[:9], 1]),
        ask("none too", [1, 2]),
        ask("as long", [*A[:9], 2]),
        ask("all", [*A, 5]),
    )
    assert order_of(loop) == ["seed", "all", "long", "as long", "short", "none", "none too"]


def test_what_the_last_one_left_counts_at_once():
    """The order is made anew before every pass: a branch is walked to its end before the next is begun."""
    loop = Loop(scheduler())
    loop.run(*(ask(f"{name}{i}", [*stem, i]) for i in range(3) for name, stem in (("a", A), ("b", B))))
    assert order_of(loop) == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_fcfs_does_not_look():
    loop = Loop(scheduler(scheduling_policy="fcfs"))
    loop.run(*(ask(f"{name}{i}", [*stem, i]) for i in range(2) for name, stem in (("a", A), ("b", B))))
    assert order_of(loop) == ["a0", "b0", "a1", "b1"]


@pytest.mark.parametrize("patience", [1, 3, 8])
def test_who_was_overtaken_often_enough_goes_first(patience):
    sched = scheduler()
    sched.policy.patience = patience
    loop = Loop(sched)
    loop.run(ask("seed", A))
    loop.scheduler.add(ask("lonely", B))
    for i in range(12):  # there is always one more with a longer prefix
        loop.scheduler.add(ask(f"a{i}", [*A, i]))
    loop.run()
    assert order_of(loop).index("lonely") == 1 + patience


def test_to_wait_is_not_to_be_overtaken():
    """In a long queue all wait; a starved order would be that of arrival and share less."""
    sched = scheduler()
    sched.policy.patience = 2
    loop = Loop(sched)
    loop.run(
        ask("first", [1, 2], max_tokens=20),
        ask("a0", [*A, 0]),
        ask("a1", [*A, 1]),
        ask("b0", [*B, 0]),
        ask("a2", [*A, 2]),
        ask("b1", [*B, 1]),
    )
    assert order_of(loop) == ["first", "a0", "a1", "a2", "b0", "b1"], "b0 was overtaken once, by a2"


def test_an_earlier_arrival_overtakes_nobody():
    sched = scheduler()
    policy = sched.policy
    early, late = ask("early", A), ask("late", B)
    policy.between_passes([early, late])
    policy.scheduled(early, 12)
    assert policy._overtaken == {}
    policy.between_passes([late])
    policy.scheduled(early, 1)
    assert policy._overtaken == {}, "it runs already"


def test_more_than_most_are_served_by_arrival():
    sched = scheduler()
    sched.policy.most = 5
    loop = Loop(sched)
    loop.run(ask("seed", A))
    waiting = [ask(f"b{i}", [*B[:i], 1]) for i in range(5)] + [ask("a", [*A, 1])]
    before = sched.kv.cache.num_compared
    loop.run(*waiting)
    assert order_of(loop)[1:4] == ["b0", "a", "b1"], "six wait, then five"
    assert sched.kv.cache.num_compared > before


def test_nobody_who_runs_is_displaced():
    sched = scheduler(max_num_seqs=2)
    loop = Loop(sched)
    loop.run(ask("seed", A))
    runs = [ask(name, [7, i], max_tokens=6) for i, name in enumerate(("one", "two"))]
    for each in runs:
        sched.add(each)
    loop.step()
    assert isinstance(sched.policy, LongestPrefixFirst)
    loop.run(*(ask(f"a{i}", [*A, i]) for i in range(4)))
    assert not any(p.preempted for p in loop.passes) and [r.num_preemptions for r in runs] == [0, 0]
    assert order_of(loop)[:3] == ["seed", "one", "two"]


def test_extras_are_looked_up_too():
    loop = Loop(scheduler())
    loop.run(ask("seed", A))
    other = ask("other", [*A, 1])
    other.cache_salt = "a tenant"
    loop.run(other, ask("none", B), ask("same", [*A, 2]))
    assert order_of(loop) == ["seed", "same", "other", "none"]


@pytest.mark.parametrize("cache", ["radix", "block_hash"])
def test_nobody_is_remembered_in_the_end(cache):
    sched = scheduler(blocks=12, max_num_seqs=3, prefix_cache=cache)
    loop = Loop(sched)
    asked = [ask(f"r{i}", [*(A, B)[i % 2][: 1 + i], i], max_tokens=8) for i in range(10)]
    for each in asked[:5]:
        sched.add(each)
    loop.step()
    sched.finish("r4", "abort")
    sched.finish("r0", "abort")
    loop.run(*asked[5:])
    assert not sched.policy._cached and not sched.policy._overtaken
    for each in asked:
        if each.finish_reason != "abort":
            assert each.output_token_ids == expected(each.prompt_token_ids, each.sampling_params, 40)[0]


def test_there_is_no_such_order_without_a_cache():
    with pytest.raises(ValueError, match="scheduling_policy is 'lpm' and prefix_cache 'none'"):
        EngineConfig(kv_layout="paged", scheduling_policy="lpm")
