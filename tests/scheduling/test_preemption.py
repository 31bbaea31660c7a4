"""Giving way, pausing, sharing, ranks: on a runner without a model that knows what every row must hold."""

import random

import pytest

from minillm.core.request import RequestStatus
from minillm.scheduling.policies import Policy
from tests.scheduling.fakes import Loop, expected, make_scheduler, request

PAGED = dict(block_size=4, batching="iteration", eos=())
HOSTS = pytest.mark.parametrize("host_blocks", [0, 100], ids=["recompute", "swap"])


def assert_right(*requests, capacity):
    for each in requests:
        tokens, _ = expected(each.prompt_token_ids, each.sampling_params, capacity)
        assert each.output_token_ids == tokens


@HOSTS
def test_the_last_to_come_gives_way_and_comes_back(host_blocks):
    scheduler = make_scheduler(blocks=5, max_model_len=20, host_blocks=host_blocks, **PAGED)
    loop = Loop(scheduler)
    a, b = (request(name, 6, max_tokens=12, ignore_eos=True) for name in "ab")
    loop.run(a, b)
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)
    alone = [i for i, p in enumerate(loop.passes) if p.ids == ["a"]]
    assert alone and all(p.ids == ["b"] for p in loop.passes[alone[-1] + 1 :])
    back = next(p for p in loop.passes if p.preempted == [] and p.ids == ["b"])
    given_way = len(b.prompt_token_ids) + len(loop.passes[: alone[0]])
    assert back.tokens == (1 if host_blocks else given_way), "only recompute computes again"
    assert_right(a, b, capacity=20)


@HOSTS
def test_who_gave_way_does_not_come_back_in_the_same_pass(host_blocks):
    scheduler = make_scheduler(blocks=6, max_model_len=24, host_blocks=host_blocks, **PAGED)
    loop = Loop(scheduler)
    requests = [request(name, 4, max_tokens=20, ignore_eos=True) for name in "abc"]
    loop.run(*requests)
    for p in loop.passes:
        assert not set(p.preempted) & set(p.ids)
    assert requests[0].num_preemptions == 0
    assert_right(*requests, capacity=24)


def test_who_joins_leaves_a_block_to_those_that_will_need_one():
    scheduler = make_scheduler(blocks=3, max_model_len=12, **PAGED)
    loop = Loop(scheduler)
    loop.run(request("a", 4, max_tokens=3, ignore_eos=True), request("b", 8, max_tokens=1))
    assert [p.ids for p in loop.passes] == [["a"]] * 3 + [["b"]], "b fits beside a's one block, for a single pass"
    assert not any(p.preempted for p in loop.passes)


def test_swap_where_the_host_is_full_recomputes():
    scheduler = make_scheduler(blocks=8, max_model_len=32, host_blocks=1, **PAGED)
    requests = [request(name, 6, max_tokens=20, ignore_eos=True) for name in "abcd"]
    Loop(scheduler).run(*requests)
    assert sum(r.num_preemptions for r in requests) > 1
    assert_right(*requests, capacity=32)


# -- samples share ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batching", ["static", "iteration"])
def test_samples_compute_their_prompt_once(batching):
    scheduler = make_scheduler(blocks=20, max_model_len=32, **PAGED | {"batching": batching})
    loop = Loop(scheduler)
    samples = [request(f"a/{i}", 6, group="a", sample_index=i, max_tokens=5, ignore_eos=True) for i in range(3)]
    other = request("b", 3, max_tokens=7, ignore_eos=True)
    loop.run(*samples, other)
    assert [p.ids for p in loop.passes[:2]] == [["a/0", "b"], ["a/0", "b", "a/1", "a/2"]]
    assert [p.tokens for p in loop.passes[:2]] == [9, 4]
    assert_right(*samples, other, capacity=32)


def test_samples_wait_for_seats_like_everybody():
    scheduler = make_scheduler(blocks=20, max_model_len=32, max_num_seqs=2, **PAGED)
    loop = Loop(scheduler)
    samples = [request(f"a/{i}", 6, group="a", sample_index=i, max_tokens=4, ignore_eos=True) for i in range(3)]
    late = request("b", 3, max_tokens=2, ignore_eos=True)
    loop.run(*samples, late)
    assert [p.ids for p in loop.passes][:2] == [["a/0"], ["a/0", "a/1"]], "a seat is kept for the sample, not for b"
    assert_right(*samples, late, capacity=32)


def test_a_sample_whose_siblings_are_gone_computes_its_own_prompt():
    scheduler = make_scheduler(blocks=20, max_model_len=32, max_num_seqs=1, **PAGED)
    loop = Loop(scheduler)
    samples = [request(f"a/{i}", 6, group="a", sample_index=i, max_tokens=2, ignore_eos=True) for i in range(2)]
    loop.run(*samples)
    assert [(p.ids, p.tokens) for p in loop.passes] == [(["a/0"], 6), (["a/0"], 1), (["a/1"], 6), (["a/1"], 1)]


# -- blocked ----------------------------------------------------------------------------------------------------------


def test_a_blocked_request_takes_no_seat_and_keeps_its_rows():
    scheduler = make_scheduler(blocks=20, max_model_len=32, max_num_seqs=1, **PAGED)
    loop = Loop(scheduler)
    a, b = (request(name, 6, max_tokens=4, ignore_eos=True) for name in "ab")
    scheduler.add(a)
    scheduler.add(b)
    loop.step()
    scheduler.block("a", "a tool")
    loop.step()
    assert loop.passes[-1].ids == ["b"] and a.status is RequestStatus.BLOCKED
    scheduler.unblock("a")
    assert a.status is RequestStatus.WAITING and scheduler.waiting == [a]
    loop.run()
    assert [p.ids for p in loop.passes] == [["a"]] + [["b"]] * 4 + [["a"]] * 3
    assert loop.passes[5].tokens == 1, "nothing is computed again"
    assert_right(a, b, capacity=32)


def test_blocks_of_the_blocked_are_the_first_to_go():
    scheduler = make_scheduler(blocks=6, max_model_len=20, **PAGED)
    loop = Loop(scheduler)
    a, b, c = (request(name, 4, max_tokens=8, ignore_eos=True) for name in "abc")
    for each in (a, b, c):
        scheduler.add(each)
    loop.step()
    scheduler.block("a", "a tool")
    while not a.num_preemptions:
        loop.step()
    assert (b.num_preemptions, c.num_preemptions) == (0, 0)
    scheduler.unblock("a")
    loop.run()
    assert_right(a, b, c, capacity=20)


# -- ranks ------------------------------------------------------------------------------------------------------------


@HOSTS
def test_priority_displaces_the_worst_and_nobody_of_its_own_rank(host_blocks):
    scheduler = make_scheduler(
        blocks=20, max_model_len=32, max_num_seqs=2, host_blocks=host_blocks, scheduling_policy="priority", **PAGED
    )
    loop = Loop(scheduler)
    low, middle, high, equal = (
        request(name, 4, priority=rank, max_tokens=6, ignore_eos=True)
        for name, rank in [("low", 5), ("middle", 3), ("high", 1), ("equal", 3)]
    )
    scheduler.add(low)
    scheduler.add(middle)
    loop.step()
    scheduler.add(high)
    scheduler.add(equal)
    loop.step()
    assert sorted(loop.passes[-1].ids) == ["high", "middle"]
    loop.run()
    assert (low.num_preemptions, middle.num_preemptions, equal.num_preemptions) == (1, 0, 0)
    last = [max(i for i, p in enumerate(loop.passes) if r.request_id in p.ids) for r in (high, equal, low)]
    assert last == sorted(last)
    assert_right(low, middle, high, equal, capacity=32)


def test_fcfs_displaces_nobody():
    scheduler = make_scheduler(blocks=20, max_model_len=32, max_num_seqs=1, **PAGED)
    loop = Loop(scheduler)
    scheduler.add(request("a", 4, priority=9, max_tokens=6, ignore_eos=True))
    loop.step()
    loop.run(request("b", 1, priority=0, max_tokens=1))
    assert [p.ids for p in loop.passes] == [["a"]] * 6 + [["b"]]


def test_mlfq_lets_short_answers_overtake_a_long_one():
    """FCFS keeps the short ones behind the long one; MLFQ has them all out first."""

    def completion(policy):
        scheduler = make_scheduler(
            blocks=40, max_model_len=128, max_num_seqs=1, host_blocks=40, scheduling_policy=policy, **PAGED
        )
        loop = Loop(scheduler)
        scheduler.add(request("long", 4, max_tokens=100, ignore_eos=True))
        for _ in range(40):
            loop.step()
        loop.run(*(request(f"s{i}", 4, max_tokens=5, ignore_eos=True) for i in range(4)))
        return {name: max(i for i, p in enumerate(loop.passes) if name in p.ids) for name in ("s3", "long")}

    fcfs, mlfq = completion("fcfs"), completion("mlfq")
    assert fcfs["long"] < fcfs["s3"]
    assert mlfq["s3"] < 62 < mlfq["long"]


def test_mlfq_joins_at_the_queue_that_covers_the_prompt():
    scheduler = make_scheduler(blocks=80, max_model_len=256, max_num_seqs=1, scheduling_policy="mlfq", **PAGED)
    policy = scheduler.policy
    for prompt, level in [(1, 0), (32, 0), (33, 1), (64, 1), (65, 2), (200, 3)]:
        assert policy.rank(request(f"p{prompt}", prompt)) == level


def test_mlfq_starves_nobody():
    """A stream of short requests for ever: the long prompt still runs, once its patience has ended."""
    scheduler = make_scheduler(
        blocks=80, max_model_len=128, max_num_seqs=1, host_blocks=80, scheduling_policy="mlfq", **PAGED
    )
    scheduler.policy.patience = 30
    loop = Loop(scheduler)
    long = request("long", 70, max_tokens=3, ignore_eos=True)
    scheduler.add(request("s", 2, max_tokens=2, ignore_eos=True))
    scheduler.add(long)
    for i in range(120):
        if len(scheduler.waiting) < 3:
            scheduler.add(request(f"s{i}", 2, max_tokens=2, ignore_eos=True))
        loop.step()
        if long.finished:
            break
    first = next(i for i, p in enumerate(loop.passes) if "long" in p.ids)
    assert 29 <= first <= 35 and long.finished


# -- at random --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "mlfq"])
@HOSTS
@pytest.mark.parametrize("seed", range(4))
def test_tokens_depend_on_nothing_but_the_request(seed, host_blocks, policy, depth):
    rng = random.Random(seed)
    scheduler = make_scheduler(
        blocks=rng.randint(8, 14),
        block_size=4,
        max_model_len=32,
        max_num_seqs=rng.randint(2, 6),
        host_blocks=host_blocks and rng.choice([5, 100]),
        batching=rng.choice(["static", "iteration"]),
        scheduling_policy=policy,
    )
    loop = Loop(scheduler, depth=depth)
    waiting = []
    for i in range(8):
        ids = [rng.randrange(50) for _ in range(rng.randint(1, 20))]
        more = dict(priority=rng.randint(0, 2), max_tokens=rng.randint(1, 12))
        n = rng.choice([1, 1, 3])
        for j in range(n):
            waiting.append(request(f"r{i}/{j}", ids, group=f"r{i}" if n > 1 else None, sample_index=j, **more))
    everybody = list(waiting)
    while waiting or scheduler.has_unfinished():
        if waiting and rng.random() < 0.7:
            scheduler.add(waiting.pop(0))
        if rng.random() < 0.2 and scheduler.requests:
            chosen = scheduler.requests[rng.choice(sorted(scheduler.requests))]
            if chosen.status is RequestStatus.BLOCKED:
                scheduler.unblock(chosen.request_id)
            elif depth == 1 and scheduler.kv.holds(chosen.request_id) and rng.random() < 0.5:
                scheduler.preempt(chosen.request_id)
            elif depth == 1:
                scheduler.block(chosen.request_id, "a tool")
        if not loop.step():
            for each in scheduler.requests.values():
                if each.status is RequestStatus.BLOCKED:
                    scheduler.unblock(each.request_id)
                    break
    for each in everybody:
        tokens, reason = expected(each.prompt_token_ids, each.sampling_params, scheduler.kv.capacity)
        assert (each.output_token_ids, each.finish_reason) == (tokens, reason)
    assert scheduler.kv.num_free_blocks == scheduler.kv.num_usable_blocks
    assert scheduler.kv.host_pool.num_free == scheduler.kv.host_pool.num_usable


# -- once wrong -------------------------------------------------------------------------------------------------------


def test_who_is_in_the_pass_already_does_not_give_way_in_it():
    """A rank that falls with the tokens just scheduled, as MLFQ's may, must not make its request the one to preempt."""

    class Falling(Policy):
        served = False

        def rank(self, request):
            return (2 if self.served else 0) if request.request_id == "a" else 1

        def scheduled(self, request, tokens):
            self.served = self.served or request.request_id == "a"

        def between_passes(self, waiting):
            self.served = False
            return False

    scheduler = make_scheduler(blocks=3, max_model_len=12, **PAGED)
    scheduler.policy = Falling()
    loop = Loop(scheduler)
    requests = [request(name, 4, max_tokens=8, ignore_eos=True) for name in "ab"]
    loop.run(*requests)
    assert [p.preempted for p in loop.passes[:2]] == [[], ["b"]]
    assert_right(*requests, capacity=12)
