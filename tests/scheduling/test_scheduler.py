import random

import pytest

from minillm.core.batch import ModelOutput
from minillm.core.request import RequestStatus
from tests.scheduling.fakes import (
    EOS,
    VOCAB,
    Loop,
    expected,
    make_scheduler,
    request,
)

# -- admission ------------------------------------------------------------------------------------------------------


def test_first_come_first_served():
    loop = Loop(make_scheduler(max_num_seqs=2, eos=()))
    names = ["d", "a", "c", "b", "e"]
    loop.run(*(request(name, max_tokens=1) for name in names))
    assert [p.ids for p in loop.passes] == [["d", "a"], ["c", "b"], ["e"]]


def test_a_small_request_does_not_overtake_one_over_the_budget():
    loop = Loop(make_scheduler(budget=32, eos=()))
    loop.run(request("a", 20, max_tokens=1), request("big", 20, max_tokens=1), request("small", 1, max_tokens=1))
    assert [p.ids for p in loop.passes] == [["a"], ["big", "small"]]


def test_a_small_request_does_not_overtake_one_that_lacks_blocks():
    scheduler = make_scheduler(blocks=5, block_size=4, max_model_len=12, batching="iteration", eos=())
    loop = Loop(scheduler)
    loop.run(request("a", 7, max_tokens=1), request("big", 11, max_tokens=1), request("small", 1, max_tokens=1))
    assert [p.ids for p in loop.passes] == [["a"], ["big", "small"]]


@pytest.mark.parametrize("last, first_pass", [(12, ["a", "b"]), (13, ["a"])])
def test_the_budget_holds_to_the_token(last, first_pass):
    loop = Loop(make_scheduler(budget=32, eos=()))
    loop.run(request("a", 20, max_tokens=1), request("b", last, max_tokens=1))
    assert loop.passes[0].ids == first_pass
    assert max(p.tokens for p in loop.passes) <= 32


def test_the_seats_hold():
    loop = Loop(make_scheduler(blocks=8, max_num_seqs=3, eos=(), batching="iteration"))
    loop.run(*(request(str(i), max_tokens=1 + i % 3) for i in range(8)))
    assert max(p.resident for p in loop.passes) == 3


def test_blocks_may_be_fewer_than_seats():
    loop = Loop(make_scheduler(blocks=2, max_num_seqs=3, eos=()))
    loop.run(*(request(str(i), max_tokens=2) for i in range(5)))
    assert [p.new for p in loop.passes if p.new] == [["0", "1"], ["2", "3"], ["4"]]


@pytest.mark.parametrize("length, blocks, capacity", [(32, 1, 32), (64, 1, 32), (20, 4, 20)])
def test_a_budget_below_capacity_is_refused(length, blocks, capacity):
    def build(budget):
        return make_scheduler(blocks=blocks, block_size=32, max_model_len=length, budget=budget)

    assert build(capacity).kv.capacity == capacity
    with pytest.raises(ValueError, match=f"max_num_batched_tokens is {capacity - 1}.*at least {capacity}"):
        build(capacity - 1)


# -- ends -----------------------------------------------------------------------------------------------------------


def ended(params: dict, answers: list[int], prompt: int = 3, **scheduler):
    """The request after a scripted run."""
    one = request("a", prompt, **params)
    Loop(make_scheduler(**scheduler), {"a": answers}).run(one)
    assert one.finished
    return one.output_token_ids, one.finish_reason, one.stop_reason


def test_length():
    assert ended({"max_tokens": 3}, [10, 11, 12, 13]) == ([10, 11, 12], "length", None)
    assert ended({"max_tokens": 1}, [10, 11]) == ([10], "length", None)


@pytest.mark.parametrize("prompt", [1, 5, 30, 31])
@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_capacity_ends_with_length(prompt, max_tokens):
    tokens, reason, _ = ended({"max_tokens": max_tokens}, [10] * 40, prompt, max_model_len=32)
    assert len(tokens) == 32 - prompt
    assert reason == "length"


def test_capacity_may_be_that_of_the_blocks():
    tokens, reason, _ = ended({"max_tokens": None}, [10] * 40, 3, blocks=2, block_size=4, max_model_len=32)
    assert (len(tokens), reason) == (5, "length")


@pytest.mark.parametrize("eos", EOS)
def test_every_end_token_counts(eos):
    assert ended({}, [10, eos, 11]) == ([10, eos], "stop", None)


def test_end_tokens_can_be_ignored():
    assert ended({"ignore_eos": True, "max_tokens": 3}, [2, 3, 2]) == ([2, 3, 2], "length", None)


def test_stop_tokens_name_themselves():
    assert ended({"stop_token_ids": [20, 21]}, [10, 21, 20]) == ([10, 21], "stop", 21)
    assert ended({"stop_token_ids": [2], "ignore_eos": True}, [3, 2]) == ([3, 2], "stop", 2)
    assert ended({"stop_token_ids": [2]}, [2])[1:] == ("stop", None), "an end token needs no name"


@pytest.mark.parametrize("params", [{}, {"stop_token_ids": [2]}, {"stop_token_ids": [2], "ignore_eos": True}])
def test_min_tokens_hold_back_every_end(params):
    assert ended({"min_tokens": 3, **params}, [2, 2, 2, 2])[:2] == ([2, 2, 2], "stop")


def test_an_end_token_at_the_limit_is_a_stop():
    assert ended({"max_tokens": 2}, [10, 2]) == ([10, 2], "stop", None)
    assert ended({"max_tokens": 2, "stop_token_ids": [9]}, [10, 9]) == ([10, 9], "stop", 9)


def test_several_tokens_of_one_pass_end_at_the_first_end():
    scheduler = make_scheduler()
    one = request("a")
    scheduler.add(one)
    batch = scheduler.schedule()
    assert scheduler.update(batch, ModelOutput(batch.step, {"a": [10, 11, 2, 12]})) == [one]
    assert one.output_token_ids == [10, 11, 2]
    assert one.finish_reason == "stop"


def test_a_pass_without_a_token_advances_nobody():
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    batch = scheduler.schedule()
    assert scheduler.update(batch, ModelOutput(batch.step)) == []
    assert scheduler.has_unfinished()


# -- finish, abort --------------------------------------------------------------------------------------------------


def test_finish_while_waiting():
    scheduler = make_scheduler()
    a, b = request("a"), request("b", max_tokens=1)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.finish("a", "abort")
    assert (a.status, a.finish_reason) == (RequestStatus.FINISHED, "abort")
    batch = scheduler.schedule()
    assert list(batch.num_scheduled_tokens) == ["b"]
    assert batch.finished_ids == [], "the runner never knew it"


def test_finish_while_running_frees_and_tells_the_runner_once():
    scheduler = make_scheduler(batching="iteration")
    loop = Loop(scheduler)
    a, b = request("a"), request("b")
    scheduler.add(a)
    scheduler.add(b)
    loop.step()
    scheduler.finish("a", "stop", "a word")
    assert (a.finish_reason, a.stop_reason) == ("stop", "a word")
    assert scheduler.kv.num_free_blocks == 3
    batch = scheduler.schedule()
    assert batch.finished_ids == ["a"]
    scheduler.update(batch, ModelOutput(batch.step, {"b": [10]}))
    assert scheduler.schedule().finished_ids == []


def test_an_empty_pass_does_not_swallow_finished_ids():
    scheduler = make_scheduler()
    loop = Loop(scheduler)
    loop.run(request("a", max_tokens=1))
    assert scheduler.schedule().num_scheduled_tokens == {}
    scheduler.add(request("b", max_tokens=1))
    assert scheduler.schedule().finished_ids == ["a"]


def test_finish_again_or_of_nobody_is_ignored():
    scheduler = make_scheduler()
    one = request("a", max_tokens=1)
    Loop(scheduler).run(one)
    scheduler.finish("a", "abort")
    scheduler.finish("nobody", "abort")
    assert one.finish_reason == "length"
    assert scheduler.kv.num_free_blocks == 4


def test_abort_while_the_pass_is_in_flight():
    scheduler = make_scheduler(blocks=1, batching="iteration")
    loop = Loop(scheduler, {"b": [10, 11]})
    a, b = request("a"), request("b", max_tokens=2)
    scheduler.add(a)
    assert loop.launch()
    scheduler.finish("a", "abort")
    assert scheduler.kv.num_free_blocks == 1
    scheduler.add(b)
    assert loop.launch(), "the block is b's while a's pass is still out"
    assert loop.land() == []
    assert a.output_token_ids == [], "an ended request gains nothing"
    assert loop.land() == [b]
    loop.run()
    assert b.output_token_ids == [10, 11]


def test_an_id_can_be_used_again():
    scheduler = make_scheduler(batching="iteration")
    loop = Loop(scheduler)
    first, second = request("a", 3), request("a", 5, max_tokens=4)
    scheduler.add(first)
    loop.step()
    scheduler.finish("a", "abort")
    loop.run(second)
    assert second.output_token_ids == expected(second.prompt_token_ids, second.sampling_params, 32)[0]


# -- passes in flight -----------------------------------------------------------------------------------------------


def test_a_second_schedule_leaves_out_who_is_in_flight():
    scheduler = make_scheduler(batching="iteration", eos=())
    loop = Loop(scheduler)
    a, b = request("a", max_tokens=2), request("b", max_tokens=2)
    scheduler.add(a)
    first = scheduler.schedule()
    assert scheduler.schedule().num_scheduled_tokens == {}
    scheduler.add(b)
    second = scheduler.schedule()
    assert (list(first.num_scheduled_tokens), list(second.num_scheduled_tokens)) == (["a"], ["b"])
    assert (first.step, second.step) == (0, 1), "an empty batch is no step"
    for batch in (first, second):
        scheduler.update(batch, loop.runner.execute(batch))
    third = scheduler.schedule()
    assert third.num_scheduled_tokens == {"a": 1, "b": 1}
    assert [known.new_token_ids for known in third.known_requests] == [a.output_token_ids, b.output_token_ids]


def random_requests(rng: random.Random, count: int, capacity: int):
    requests = []
    for i in range(count):
        prompt = [
            rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 5, capacity - 1, rng.randint(1, capacity - 1)]))
        ]
        max_tokens = rng.choice([None, 1, 2, rng.randint(1, 20)])
        params = dict(
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, min(max_tokens or 8, 8)) if rng.random() < 0.5 else 0,
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.sample(range(VOCAB), rng.randint(0, 5)),
        )
        requests.append(request(f"r{i}", prompt, **params))
    return requests


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("batching", ["static", "iteration"])
@pytest.mark.parametrize("block_size", [32, 4], ids=["contiguous", "small blocks"])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_depend_on_nothing_but_the_request(seed, block_size, batching, depth):
    """Whatever the batches, arrivals, aborts of others and passes in flight; and the JSON replays every token."""
    rng = random.Random(seed)
    seats = rng.randint(1, 6)
    scheduler = make_scheduler(
        blocks=seats * (32 // block_size), block_size=block_size, max_num_seqs=seats, batching=batching
    )
    loop = Loop(scheduler, depth=depth)
    requests = random_requests(rng, 12, scheduler.kv.capacity)
    waiting, aborted = list(requests), set()
    while waiting or loop.step():
        if waiting and rng.random() < 0.7:
            scheduler.add(waiting.pop(0))
        if rng.random() < 0.1 and scheduler.requests:
            victim = rng.choice(sorted(scheduler.requests))
            scheduler.finish(victim, "abort")
            aborted.add(victim)
        if rng.random() < 0.5:
            loop.step()
    for each in requests:
        tokens, reason = expected(each.prompt_token_ids, each.sampling_params, scheduler.kv.capacity)
        if each.request_id in aborted:
            assert each.finish_reason == "abort"
            assert each.output_token_ids == tokens[: len(each.output_token_ids)]
        else:
            assert (each.output_token_ids, each.finish_reason) == (tokens, reason)
    assert scheduler.kv.num_free_blocks == scheduler.kv.num_usable_blocks
    assert max(p.resident for p in loop.passes) <= seats
    assert max(p.tokens for p in loop.passes) <= scheduler.config.max_num_batched_tokens
