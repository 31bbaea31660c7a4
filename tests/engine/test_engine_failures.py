"""An exception in a step leaves the engine usable for the others, or marks it dead and says so."""

import random

import pytest

from minillm.core.sampling_params import SamplingParams
from minillm.engine.engine import EngineDeadError
from minillm.scheduling.scheduler import Scheduler
from tests.support import all_free, assert_same, drain, failing, greedy, random_prompt, serve

ERRORS = [RuntimeError("out of memory"), KeyboardInterrupt()]


def requests(count: int = 4):
    rng = random.Random(0)
    return {name: (random_prompt(rng, 4 + i), greedy(4, logprobs=1)) for i, name in enumerate("abcdef"[:count])}


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("after", [False, True], ids=["before the pass", "after the pass"])
@pytest.mark.parametrize("at", range(4))
def test_a_failed_pass_aborts_its_batch_and_nobody_else(engine_factory, error, after, at):
    wanted = requests()
    alone = {name: serve(engine_factory(), {name: wanted[name]})[name] for name in wanted}
    engine = engine_factory(max_num_seqs=2, parts=failing(error=error, at=(at,), after=after))
    for name, (prompt, params) in wanted.items():
        engine.add_request(name, prompt, params)
    for _ in range(at):
        engine.step()
    with pytest.raises(type(error)) as raised:
        engine.step()
    assert raised.value is error, "the exception comes out as it was"
    assert engine.alive
    assert all_free(engine), "c and d have not started"
    done, first = {}, engine.step()
    for output in first:
        if output.finished:
            done[output.request_id] = output
    assert set(done) == {"a", "b"}, "the next step delivers them"
    for name in "ab":
        (sample,) = done[name].outputs
        assert sample.finish_reason == "abort"
        assert sample.token_ids == alone[name].outputs[0].token_ids[:at]
    assert [output.request_id for output in first] == ["a", "b", "c", "d"], "and has run the others"
    drain(engine, done)
    for name in "cd":
        assert_same(done[name], alone[name])
    # The failed ids are free again, and a later request gets the right tokens.
    assert_same(serve(engine, {"a": wanted["a"]})["a"], alone["a"])
    assert all_free(engine)
    assert set(engine.executor.runner.rows) <= {"a"}, "the runner was told of all that ended"


def test_failures_in_a_row_lose_no_output(engine_factory):
    engine = engine_factory(max_num_seqs=1, parts=failing(error=RuntimeError("boom"), at=(0, 1, 3)))
    for name, (prompt, params) in requests(4).items():
        engine.add_request(name, prompt, params)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="boom"):
            engine.step()
    first = engine.step()
    assert [(o.request_id, o.outputs[0].finish_reason) for o in first] == [("a", "abort"), ("b", "abort"), ("c", None)]
    with pytest.raises(RuntimeError, match="boom"):
        engine.step()
    done = drain(engine)
    assert [(name, done[name].outputs[0].finish_reason) for name in done] == [("c", "abort"), ("d", "length")]


def test_outputs_are_due_although_nothing_runs(engine_factory):
    engine = engine_factory(parts=failing(error=RuntimeError("boom"), at=(0,)))
    engine.add_request("a", *requests(1)["a"])
    with pytest.raises(RuntimeError, match="boom"):
        engine.step()
    assert engine.has_unfinished_requests()
    assert [output.request_id for output in engine.step()] == ["a"]
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


def test_all_samples_of_a_failed_prompt_end(engine_factory):
    engine = engine_factory(parts=failing(error=RuntimeError("boom"), at=(3,)))
    prompt = random_prompt(random.Random(0), 3)
    engine.add_request("a", prompt, SamplingParams(n=3, seed=0, ignore_eos=True, max_tokens=9))
    for _ in range(3):
        engine.step()
    with pytest.raises(RuntimeError, match="boom"):
        engine.step()
    (output,) = engine.step()
    # The others share the first one's prompt, so they begin a pass later.
    assert [(len(s.token_ids), s.finish_reason) for s in output.outputs] == [(3, "abort"), (2, "abort"), (2, "abort")]
    assert all_free(engine)


def test_ids_that_ended_before_a_failed_pass_still_reach_the_runner(engine_factory):
    """The failed batch carried them, and nobody read it."""
    engine = engine_factory(parts=failing(error=RuntimeError("boom"), at=(1, 2)))
    (prompt, _), one_token = requests(1)["a"], greedy(1)
    engine.add_request("first", prompt, one_token)
    engine.step()
    for name in ("second", "third"):
        engine.add_request(name, prompt, one_token)
        with pytest.raises(RuntimeError, match="boom"):
            engine.step()
    assert "first" in engine.executor.runner.rows
    engine.add_request("last", prompt, one_token)
    engine.step()
    assert set(engine.executor.runner.rows) == {"last"}


def test_a_failed_submit_is_a_failed_pass(engine_factory):
    engine = engine_factory()
    submit = engine.executor.submit

    def refuse(batch):
        raise OSError("a rank is gone")

    engine.executor.submit = refuse
    engine.add_request("a", *requests(1)["a"])
    with pytest.raises(OSError, match="a rank is gone"):
        engine.step()
    engine.executor.submit = submit
    assert drain(engine)["a"].outputs[0].finish_reason == "abort"


def test_the_model_may_raise(engine_factory, monkeypatch):
    """The real executor, an error inside the forward pass."""
    engine = engine_factory()
    engine.add_request("a", *requests(1)["a"])
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor.runner, "model", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    want = serve(engine_factory(), {"b": requests(2)["b"]})["b"]
    engine.add_request("b", *requests(2)["b"])
    done = drain(engine)
    assert done["a"].outputs[0].finish_reason == "abort"
    assert_same(done["b"], want)


# -- the engine's own books -----------------------------------------------------------------------------------------


def breaking(method: str, error: BaseException):
    """A scheduler whose ``method`` fails at its second call."""

    class Breaking(Scheduler):
        calls = 0

    def broken(self, *args):
        self.calls += 1
        if self.calls == 2:
            raise error
        return getattr(Scheduler, method)(self, *args)

    setattr(Breaking, method, broken)
    return {"scheduler": Breaking}


def assert_dead(engine, message: str) -> None:
    assert not engine.alive
    prompt, params = requests(1)["a"]
    for call in (engine.step, lambda: engine.add_request("z", prompt, params), lambda: engine.abort("a"), engine.step):
        with pytest.raises(EngineDeadError, match=f"serves no more: {message}"):
            call()
    engine.close()
    assert engine.executor.runner is None, "a dead engine gives its memory back too"
    with pytest.raises(EngineDeadError, match=f"serves no more: {message}"):
        engine.step()


@pytest.mark.parametrize("method, where", [("update", "taking in a pass"), ("schedule", "scheduling")])
def test_a_failure_of_the_books_is_the_end(engine_factory, method, where):
    engine = engine_factory(parts=breaking(method, KeyError("lost")))
    engine.add_request("a", *requests(1)["a"])
    engine.step()
    with pytest.raises(EngineDeadError, match=rf"the engine is dead: {where} failed with KeyError\('lost'\)") as raised:
        engine.step()
    assert isinstance(raised.value.__cause__, KeyError)
    assert_dead(engine, where)


@pytest.mark.parametrize("method, where", [("update", "taking in a pass"), ("schedule", "scheduling")])
def test_an_interrupt_in_the_books_is_the_end_too(engine_factory, method, where):
    """Half of an update may have been done: nobody can say what the books are worth."""
    engine = engine_factory(parts=breaking(method, KeyboardInterrupt()))
    engine.add_request("a", *requests(1)["a"])
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert_dead(engine, where)


def test_a_scheduler_that_runs_nobody_is_found_out(engine_factory):
    class Idle(Scheduler):
        def schedule(self):
            self.batching.may_admit = lambda running: False
            return super().schedule()

    engine = engine_factory(parts={"scheduler": Idle})
    engine.add_request("a", *requests(1)["a"])
    with pytest.raises(EngineDeadError, match="requests are queued but none can run"):
        engine.step()
