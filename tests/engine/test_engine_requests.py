"""What the engine takes in, refuses, aborts and closes."""

import gc
import math
import random
import weakref

import pytest

from minillm.core.request import RequestStatus
from minillm.core.sampling_params import SamplingParams
from minillm.engine.engine import Engine, EngineDeadError
from minillm.scheduling.scheduler import Scheduler
from tests.support import MAX_LEN, VOCAB, all_free, assert_same, drain, greedy, random_prompt, serve

RNG = random.Random(0)
SHORT = {"prompt_token_ids": [1, 2, 3]}


def bad_params(**values) -> SamplingParams:
    """Params changed after they were checked: the engine must look again."""
    params = SamplingParams()
    for name, value in values.items():
        setattr(params, name, value)
    return params


REFUSED = {
    "empty prompt": ({"prompt_token_ids": []}, None, "the prompt is empty"),
    "prompt fills the context": ({"prompt_token_ids": [1] * MAX_LEN}, None, f"has {MAX_LEN} tokens.*into {MAX_LEN}"),
    "token id too high": ({"prompt_token_ids": [1, VOCAB]}, None, f"the prompt holds token id {VOCAB}.*to {VOCAB - 1}"),
    "negative token id": ({"prompt_token_ids": [-1]}, None, "the prompt holds token id -1"),
    "token id no number": ({"prompt_token_ids": ["a"]}, None, "the prompt holds token id 'a'"),
    "token id a float": ({"prompt_token_ids": [1.0]}, None, "the prompt holds token id 1.0"),
    "token id a bool": ({"prompt_token_ids": [True]}, None, "the prompt holds token id True"),
    "ids no list": ({"prompt_token_ids": 5}, None, "prompt_token_ids is 5"),
    "ids None": ({"prompt_token_ids": None}, None, "prompt_token_ids is None"),
    "text without tokenizer": ("Once", None, "no tokenizer"),
    "prompt a number": (7, None, "prompt is 7"),
    "prompt None": (None, None, "prompt is None"),
    "bare list": ([1, 2], None, r"prompt is \[1, 2\]"),
    "dict of something else": ({"text": "Once"}, None, "prompt is {'text': 'Once'}"),
    "stop token": (SHORT, SamplingParams(stop_token_ids=[3, VOCAB]), f"stop_token_ids holds token id {VOCAB}"),
    "bias": (SHORT, SamplingParams(logit_bias={VOCAB + 1: 1.0}), f"logit_bias holds token id {VOCAB + 1}"),
    "negative bias id": (SHORT, bad_params(logit_bias={-1: 1.0}), "logit_bias holds token id -1"),
    "allowed": (SHORT, SamplingParams(allowed_token_ids=[0, 999]), "allowed_token_ids holds token id 999"),
    "logprobs": (SHORT, SamplingParams(logprobs=VOCAB + 1), f"logprobs is {VOCAB + 1}; the vocabulary has {VOCAB}"),
    "prompt_logprobs": (SHORT, SamplingParams(prompt_logprobs=300), "prompt_logprobs is 300; the vocabulary has 256"),
    "stop string": (SHORT, SamplingParams(stop=["a"]), "stop strings need a tokenizer"),
    "max_tokens": (SHORT, bad_params(max_tokens=0), "max_tokens is 0"),
    "negative max_tokens": (SHORT, bad_params(max_tokens=-1), "max_tokens is -1"),
    "NaN": (SHORT, bad_params(temperature=math.nan), "temperature is nan"),
    "NaN top_p": (SHORT, bad_params(top_p=math.nan), "top_p is nan"),
    "nothing left to sample": (
        SHORT,
        SamplingParams(min_tokens=2, allowed_token_ids=[5, 254], stop_token_ids=[5]),
        "min_tokens is 2.*allowed_token_ids",
    ),
}


@pytest.mark.parametrize("prompt, params, message", REFUSED.values(), ids=REFUSED)
def test_what_can_never_be_served_is_refused(engine_factory, prompt, params, message):
    engine = engine_factory()
    with pytest.raises(ValueError, match=message):
        engine.add_request("a", prompt, params)
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    assert not engine.outputs.prompts
    assert all_free(engine)
    assert serve(engine, {"a": (SHORT, greedy(2))})["a"].finished, "the id is still to be had"


@pytest.mark.parametrize("request_id", [5, None, ("a", 1)])
def test_ids_are_strings(engine_factory, request_id):
    engine = engine_factory()
    with pytest.raises(ValueError, match=r"request id is .* string"):
        engine.add_request(request_id, SHORT)
    assert not engine.has_unfinished_requests()


def test_an_id_in_use_is_refused_and_free_again_at_the_end(engine_factory):
    engine = engine_factory()
    engine.add_request("a", SHORT, greedy(2))
    for _ in range(2):  # while it waits, while it runs
        with pytest.raises(ValueError, match="request id 'a' is in use"):
            engine.add_request("a", SHORT, greedy(2))
        engine.step()
    assert not engine.has_unfinished_requests()
    assert serve(engine, {"a": (SHORT, greedy(3))})["a"].outputs[0].finish_reason == "length"


def test_ids_of_samples_are_in_use_too(engine_factory, model64):
    engine = engine_factory()
    engine.add_request("a", SHORT, SamplingParams(n=2, seed=1))
    with pytest.raises(ValueError, match="'a/1' is in use"):
        engine.add_request("a/1", SHORT)
    engine.abort("a")
    engine.add_request("b/0", SHORT)
    with pytest.raises(ValueError, match="'b' is in use"):
        engine.add_request("b", SHORT, SamplingParams(n=2))
    assert list(engine.outputs.prompts) == ["b/0"]


def one_sample_ends_first(engine) -> int:
    """Queue "a" with n = 3 and step until some samples have finished and some not. How many have."""
    params = SamplingParams(n=3, seed=4, max_tokens=30, ignore_eos=True)
    first = serve(engine, {"probe": (SHORT, params)})["probe"].outputs
    # A token that one sample says early and another one late.
    stop = next(token for token in first[0].token_ids[:10] if token not in first[1].token_ids[:20])
    engine.add_request("a", SHORT, SamplingParams(n=3, seed=4, max_tokens=30, ignore_eos=True, stop_token_ids=[stop]))
    for _ in range(20):
        (output,) = engine.step()
        if output.outputs[0].finished:
            assert not output.outputs[1].finished
            return sum(sample.finished for sample in output.outputs)
    raise AssertionError("no sample finished")


def test_the_id_of_a_finished_sample_stays_taken_while_others_run(engine_factory):
    engine = engine_factory()
    one_sample_ends_first(engine)
    with pytest.raises(ValueError, match="'a/0' is in use"):
        engine.add_request("a/0", SHORT)
    drain(engine)
    engine.add_request("a/0", SHORT, greedy(1))
    assert set(drain(engine)) == {"a/0"}


# -- lengths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{}, {"max_model_len": 40}, {"max_model_len": 2}])
def test_a_prompt_of_capacity_minus_one_gives_one_token(engine_factory, limits):
    engine = engine_factory(**limits)
    capacity = limits.get("max_model_len", MAX_LEN)
    assert engine.kv.capacity == capacity
    prompt = random_prompt(RNG, capacity - 1)
    for max_tokens in (None, 1, 50):
        output = serve(engine, {"a": (prompt, greedy(max_tokens))})["a"].outputs[0]
        assert len(output.token_ids) == 1
        assert output.finish_reason == "length"
    with pytest.raises(ValueError, match=f"the prompt has {capacity} tokens.*max_model_len is {capacity}"):
        engine.add_request("b", random_prompt(RNG, capacity))


def test_without_max_tokens_the_context_is_filled(engine_factory):
    engine = engine_factory(max_model_len=24)
    for length in (1, 10, 23):
        output = serve(engine, {"a": (random_prompt(RNG, length), greedy(None))})["a"].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (24 - length, "length")


def test_max_model_len_does_not_change_what_fits(engine_factory):
    prompt, params = random_prompt(RNG, 9), greedy(10, logprobs=2)
    want = serve(engine_factory(), {"a": (prompt, params)})["a"]
    assert_same(serve(engine_factory(max_model_len=19), {"a": (prompt, params)})["a"], want)


def test_lengths_beyond_the_model_are_refused_at_construction(engine_factory):
    with pytest.raises(ValueError, match=f"max_model_len is {MAX_LEN + 1}.*end at {MAX_LEN}"):
        engine_factory(max_model_len=MAX_LEN + 1)
    with pytest.raises(ValueError, match="must be at least 128"):
        engine_factory(chapter=3, max_num_batched_tokens=127)
    with pytest.raises(ValueError, match="the KV cache may take 1,000 bytes"):
        engine_factory(kv_cache_memory_bytes=1000)


def test_an_idle_engine_steps_to_nothing(engine_factory):
    engine = engine_factory()
    assert engine.step() == []
    assert engine.metrics.forward_passes == 0


# -- abort ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(8))
def test_abort_at_any_moment_returns_every_block_and_leaves_the_others(engine_factory, steps):
    rng = random.Random(steps)
    requests = {name: (random_prompt(rng, 3 + i), greedy(3 + 2 * i, logprobs=1)) for i, name in enumerate("abc")}
    alone = {name: serve(engine_factory(), {name: requests[name]})[name] for name in requests}
    engine = engine_factory(max_num_seqs=2)  # c waits for a and b
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    done = {}
    for _ in range(steps):
        done |= {output.request_id: output for output in engine.step() if output.finished}
    last = engine.abort("b")
    assert engine.check_integrity()
    if "b" in done:
        assert last is None, "it had finished"
    else:
        assert last.finished
        assert last.outputs[0].finish_reason == "abort"
        assert last.outputs[0].token_ids == alone["b"].outputs[0].token_ids[: min(steps, 5)]
    drain(engine, done)
    for name in "ac":
        assert_same(done[name], alone[name])
    assert ("b" in done) == (last is None), "an abort's output is returned by abort alone"
    assert all_free(engine)


def test_abort_of_nobody(engine_factory):
    engine = engine_factory()
    assert engine.abort("nobody") is None
    serve(engine, {"a": (SHORT, greedy(1))})
    assert engine.abort("a") is None


def test_abort_with_some_samples_finished(engine_factory):
    engine = engine_factory()
    finished = one_sample_ends_first(engine)
    output = engine.abort("a")
    reasons = [sample.finish_reason for sample in output.outputs]
    assert reasons.count("stop") == finished
    assert reasons.count("abort") == 3 - finished
    assert output.finished
    assert all_free(engine)
    assert not engine.has_unfinished_requests()


def test_abort_of_everything_before_the_first_step(engine_factory):
    engine = engine_factory()
    for name in "abc":
        engine.add_request(name, SHORT)
    for name in "bac":
        assert engine.abort(name).outputs[0].token_ids == []
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    assert all_free(engine)


# -- a learner's own parts ------------------------------------------------------------------------------------------


class LastComeFirstServed(Scheduler):
    def add(self, request):
        self.requests[request.request_id] = request
        self.waiting.insert(0, request)


def test_a_scheduler_of_ones_own_runs(engine_factory):
    engine = engine_factory(max_num_seqs=1, parts={"scheduler": LastComeFirstServed})
    done = serve(engine, {name: (SHORT, greedy(1)) for name in "abc"})
    assert list(done) == ["c", "b", "a"]


def test_a_scheduler_may_come_from_a_factory(engine_factory):
    seen = []

    def factory(config, kv, eos):
        seen.append((config.max_model_len, kv.num_free_blocks > 0, eos))
        return Scheduler(config, kv, eos)

    engine = engine_factory(parts={"scheduler": factory})
    assert seen == [(MAX_LEN, True, (254, 255))]
    assert engine.scheduler.eos_token_ids == {254, 255}


# -- close ----------------------------------------------------------------------------------------------------------


def test_close_aborts_gives_back_and_refuses_everything_after(engine_factory):
    engine = engine_factory()
    engine.add_request("a", SHORT, greedy(9))
    engine.step()
    request = engine.scheduler.requests["a"]
    runner = weakref.ref(engine.executor.runner)
    engine.close()
    engine.close()
    gc.collect()
    assert runner() is None, "the KV cache is still held"
    assert request.status is RequestStatus.FINISHED
    assert all_free(engine)
    assert not engine.alive
    calls = (engine.step, lambda: engine.add_request("b", SHORT), lambda: engine.abort("a"))
    for call in calls:
        with pytest.raises(EngineDeadError, match="serves no more: it was closed"):
            call()


def test_two_engines_share_a_model(model64):
    from minillm.core.config import EngineConfig

    config = EngineConfig.latest(dtype="float64", kv_cache_memory_bytes=1 << 20)
    first, second = Engine(model64, config), Engine(model64, config)
    a = serve(first, {"a": (SHORT, greedy(4))})["a"]
    first.close()
    assert_same(serve(second, {"a": (SHORT, greedy(4))})["a"], a)
