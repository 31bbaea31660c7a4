"""Programs of calls: what they write is what hand-written calls write, and what they share is counted."""

import functools
import re
import threading

import pytest

import minillm
from minillm import LLM, SamplingParams
from minillm.core.config import LAST_BUILT, EngineConfig
from minillm.engine.engine import EngineDeadError
from minillm.programs import Function, State, function, gen, run_programs, select
from tests.support import FailingExecutor, all_free

INTRO = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of"
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(embedded):
    embedded("tiny")
    with LLM("tiny", dtype="float64", kv_cache_memory_bytes=64 << 20) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left_behind(llm):
    before = threading.active_count()
    llm.metrics.reset()
    yield
    assert not llm._inbox and not llm.engine.outputs.prompts
    assert all_free(llm.engine)
    assert threading.active_count() == before


@pytest.fixture
def cold(embedded):
    """f(**engine_args) -> an LLM of one's own, nothing in its cache."""
    built = []

    def make(**args):
        built.append(LLM("tiny", dtype="float64", **({"kv_cache_memory_bytes": 16 << 20} | args)))
        return built[-1]

    yield make
    for each in built:
        each.close()


def write(llm, prompt: str, **params) -> str:
    """A call by hand."""
    (output,) = llm.generate(prompt, SamplingParams(**({"temperature": 0, "max_tokens": 8} | params)))
    return output.outputs[0].text


def score(llm, text: str, choice: str) -> float:
    """Mean log-probability of a choice's tokens behind a text, where the tokens of both just follow each other."""
    before, after = llm.tokenizer.encode(text), llm.tokenizer.encode(choice)
    assert llm.tokenizer.encode(text + choice) == before + after
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate({"prompt_token_ids": before + after}, params)
    logprobs = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[len(before) :]]
    assert len(logprobs) == len(after)
    return sum(logprobs) / len(logprobs)


# -- what a program writes ------------------------------------------------------------------------------------------


def test_results_are_those_of_calls_by_hand(llm):
    @function
    def story(s, who):
        s += f"{who} said unto"
        s += gen("first", max_tokens=6) + ", and then" + gen("second", max_tokens=5, stop=["."])
        s += " The end."
        s += gen(max_tokens=3, temperature=1, seed=7)
        assert "first" in s
        return len(s["first"])

    state = story.run(llm, who="The LORD", sampling_params=GREEDY)
    text = "The LORD said unto"
    first = write(llm, text, max_tokens=6)
    second = write(llm, f"{text}{first}, and then", max_tokens=5, stop=["."])
    whole = f"{text}{first}, and then{second} The end."
    last = write(llm, whole, max_tokens=3, temperature=1, seed=7)
    assert (state["first"], state["second"]) == (first, second)
    assert state.text() == whole + last
    assert state.value == len(first) and state.error is None
    assert state.meta("first").outputs[0].text == first
    assert state.calls == 3


def test_control_flow_on_what_a_call_found(llm):
    @function
    def loop(s):
        s += "She"
        words = []
        while len(words) < 3 and "," not in s.text():
            s += gen("word", max_tokens=2)
            words.append(s["word"])
        return words

    state = loop.run(llm, sampling_params=GREEDY)
    text, words = "She", []
    while len(words) < 3 and "," not in text:
        words.append(write(llm, text, max_tokens=2))
        text += words[-1]
    assert state.value == words and state.text() == text
    assert state["word"] == words[-1], "the last of a name"


def test_one_program_may_call_another(llm):
    @function
    def inner(s, word):
        s += word + gen(word, max_tokens=2)

    @function
    def outer(s):
        s += "He"
        inner(s, " was")
        apart = inner.run(llm, word="Darcy", sampling_params=GREEDY)  # with a state of its own
        s += f" and {apart['Darcy']}"

    state = outer.run(llm, sampling_params=GREEDY)
    want = f"He was{write(llm, 'He was', max_tokens=2)}"
    assert state.text() == f"{want} and {write(llm, 'Darcy', max_tokens=2)}"
    assert isinstance(inner, Function) and inner.__name__ == "inner"


def test_shaped_calls(llm):
    @function
    def form(s):
        s += "His age was " + gen("age", regex="[1-9][0-9]", temperature=1, seed=1)
        s += ", his answer " + gen("answer", choice=["yes", "no"])
        s += ", and " + gen("json", json={"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]})
        s += "; " + gen("grammar", grammar='start: "x" "y"')

    state = form.run(llm, sampling_params=SamplingParams(temperature=0, max_tokens=24))
    assert re.fullmatch("[1-9][0-9]", state["age"]) and state["answer"] in ("yes", "no")
    assert state["grammar"] == "xy" and state["json"].startswith('{"a":1')
    assert llm.metrics.tokens_forced > 0


@pytest.mark.parametrize("chapter", [0, 2, 3, LAST_BUILT])
def test_on_the_engine_of_every_kind(llm, cold, chapter):
    @function
    def program(s):
        s += INTRO
        s += select("which", [" a wife", " a good cook", " it"])
        forks = s.fork(2)
        for i, fork in enumerate(forks):
            fork += f" {i}" + gen("x", max_tokens=4)
        forks.join()

    want = program.run(llm, sampling_params=GREEDY)
    got = program.run(cold(config=EngineConfig.at_chapter(chapter)), sampling_params=GREEDY)
    assert got.text() == want.text() and got["x"] == want["x"]
    assert got.meta("which") == pytest.approx(want.meta("which"), abs=1e-9)


# -- select ---------------------------------------------------------------------------------------------------------


def test_select_takes_the_highest_mean_log_probability(llm):
    texts = ["And God said unto", "She was a woman of", "He went to"]
    choices = [" him", " me, I am the LORD", " very little", " town again"]

    @function
    def choose(s, text):
        s += text
        s += select("chosen", choices)
        s += "."

    chosen = set()
    for state, text in zip(choose.run_batch(llm, [{"text": text} for text in texts]), texts, strict=True):
        by_hand = {choice: score(llm, text, choice) for choice in choices}
        assert state.meta("chosen") == pytest.approx(by_hand, abs=1e-9)
        best = max(by_hand, key=by_hand.get)
        assert state["chosen"] == best and state.text() == f"{text}{best}."
        chosen.add(best)
    assert len(chosen) > 1


def test_select_scores_all_choices_from_where_the_first_parts_from_the_text(llm):
    """ "Eliz" and "abeth" make other tokens than either: from there the text's end is part of every choice."""
    encode = llm.tokenizer.encode
    text, choices = "And so did Eliz", ["abeth", "a"]
    before = encode(text)
    start = min(sum(1 for _ in zip_common(before, encode(text + choice))) for choice in choices)
    assert start < len(before)
    state = function(lambda s: s.__iadd__(text).__iadd__(select("x", choices))).run(llm)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for choice in choices:
        (output,) = llm.generate(text + choice, params)
        logprobs = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[start:]]
        assert state.meta("x")[choice] == pytest.approx(sum(logprobs) / len(logprobs), abs=1e-9)


def zip_common(a, b):
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


def test_select_computes_the_text_once(cold):
    llm = cold()

    @function
    def choose(s):
        s += INTRO + select("x", [" a wife", " a cook", " it"])

    state = choose.run(llm)
    length = len(llm.tokenizer.encode(INTRO))
    assert state.calls == 4, "the text, then a prompt for each choice"
    assert state.cached_tokens == llm.metrics.tokens_cached >= 3 * (length - 2)
    assert llm.metrics.forward_passes == 2
    assert llm.metrics.tokens_computed < length + 3 * 6


def test_prompt_logprobs_may_start_where_a_cached_prefix_ends(cold):
    llm = cold()
    ids = llm.tokenizer.encode(INTRO)
    whole = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, prompt_logprobs=2))[0]
    assert whole.num_cached_tokens == 0
    for start in (0, 1, 2, 7, len(ids) - 1):
        params = SamplingParams(max_tokens=1, prompt_logprobs=2, prompt_logprobs_start=start)
        (part,) = llm.generate({"prompt_token_ids": ids}, params)
        assert part.num_cached_tokens == max(0, start - 1)
        assert len(part.prompt_logprobs) == len(ids)
        assert part.prompt_logprobs[: max(1, start)] == [None] * max(1, start)
        for got, want in zip(
            part.prompt_logprobs[max(1, start) :], whole.prompt_logprobs[max(1, start) :], strict=True
        ):
            assert {t: x.logprob for t, x in got.items()} == pytest.approx({t: x.logprob for t, x in want.items()})
    with pytest.raises(ValueError, match=f"prompt_logprobs_start is {len(ids)}"):
        llm.generate({"prompt_token_ids": ids}, SamplingParams(prompt_logprobs=0, prompt_logprobs_start=len(ids)))


# -- fork and join --------------------------------------------------------------------------------------------------


def test_forks_share_the_prefix_and_join_gathers(cold):
    llm = cold()

    @function
    def tree(s, n):
        s += INTRO
        forks = s.fork(n)
        for i, fork in enumerate(forks):
            fork += f" {i} " + gen("thought", max_tokens=6)
            if i:
                fork += gen("more", max_tokens=2)
        forks.join()
        s += " Of these," + gen("last", max_tokens=3)
        return [fork.text() for fork in forks]

    state = tree.run(llm, n=4, sampling_params=GREEDY)
    want = [write(llm, f"{INTRO} {i} ", max_tokens=6) for i in range(4)]
    assert state["thought"] == want
    assert state["more"] == [write(llm, f"{INTRO} {i} {want[i]}", max_tokens=2) for i in (1, 2, 3)]
    assert len(state.meta("thought")) == 4
    assert all(text.startswith(f"{INTRO} {i} {want[i]}") for i, text in enumerate(state.value))
    assert state.text() == f"{INTRO} Of these,{state['last']}"
    length = len(llm.tokenizer.encode(INTRO))
    assert all(meta.num_cached_tokens >= length - 1 for meta in state.meta("thought"))
    assert state.cached_tokens >= 5 * (length - 1)
    assert state.calls == 1 + 4 + 3 + 1 and state.prompt_tokens > 9 * length


def test_forks_of_forks_and_a_fork_alone(llm):
    @function
    def deep(s):
        s += "In the beginning"
        (one,) = s.fork(1)
        one += gen("a", max_tokens=2)
        twins = one.fork()
        for twin in twins:
            twin += gen("b", max_tokens=2)
        twins.join()
        assert one["b"] == [twins[0]["b"]] * 2
        return one.text(), twins[0].text()

    state = deep.run(llm, sampling_params=GREEDY)
    first = write(llm, "In the beginning", max_tokens=2)
    second = write(llm, f"In the beginning{first}", max_tokens=2)
    assert state.value == (f"In the beginning{first}", f"In the beginning{first}{second}")
    assert state.text() == "In the beginning"
    assert "a" not in state
    with pytest.raises(KeyError, match="'a'"):
        _ = state["a"]


def test_a_seed_gives_every_call_its_own(llm):
    @function
    def draws(s):
        s += "The"
        forks = s.fork(4)
        for fork in forks:
            fork += gen("x", max_tokens=8)
        forks.join()
        return s["x"]

    def values(seed):
        params = SamplingParams(seed=seed, temperature=2)
        return [state.value for state in draws.run_batch(llm, [{}, {}], sampling_params=params)]

    assert len({text for value in values(1) for text in value}) == 8
    assert values(1) == values(1) != values(2)


# -- together -------------------------------------------------------------------------------------------------------


def test_eight_programs_share_passes(cold):
    @function
    def program(s, number):
        s += f"Chapter {number}."
        s += gen("a", max_tokens=6)
        s += " And" if len(s["a"]) % 2 else " But"
        s += gen("b", max_tokens=6)
        s += select("c", [" so", " then"])

    arguments = [{"number": number} for number in range(8)]
    together, apart = cold(), cold()
    states = program.run_batch(together, arguments, sampling_params=GREEDY)
    for state, each in zip(states, arguments, strict=True):
        assert state.text() == program.run(apart, **each, sampling_params=GREEDY).text()
    assert together.metrics.forward_passes < apart.metrics.forward_passes / 4
    again = cold()
    states = run_programs(again, [functools.partial(program, **each) for each in arguments], GREEDY, at_once=2)
    assert all(state.error is None for state in states)
    assert together.metrics.forward_passes < again.metrics.forward_passes < apart.metrics.forward_passes


def test_calls_of_one_program_overlap_until_it_reads(cold):
    """Forks are queued and go together; a state's own calls come one after another."""
    llm = cold(prefix_cache="none")

    @function
    def program(s):
        s += "A"
        forks = s.fork(3)
        for fork in forks:
            fork += gen("x", max_tokens=4)

    program.run(llm, sampling_params=SamplingParams(temperature=0, ignore_eos=True))
    assert llm.metrics.forward_passes == 4


def test_different_programs_and_another_caller_on_one_engine(llm):
    stream = llm.stream("She", SamplingParams(temperature=0, max_tokens=12))

    def one(s):
        s += "He" + gen("x", max_tokens=3)

    def two(s):
        s += "It" + select("y", [" is", " was"])

    states = run_programs(llm, [one, two], GREEDY)
    assert isinstance(states[0], State) and states[0]["x"] == write(llm, "He", max_tokens=3)
    assert states[1]["y"] in (" is", " was")
    assert list(stream)[-1].outputs[0].text == write(llm, "She", max_tokens=12)


# -- what goes wrong ------------------------------------------------------------------------------------------------


def test_errors_of_one_program_do_not_harm_others(llm):
    @function
    def program(s, number):
        s += f"Number {number}" + gen("x", max_tokens=4)
        if number == 1:
            forks = s.fork(2)
            for fork in forks:
                fork += gen("y", max_tokens=100)
            raise LookupError("of its own")
        if number == 2:
            s += gen("y", regex="(")
            return s["y"]
        if number == 3:
            s += gen("never read", max_tokens=4) + gen("y", grammar="no grammar")
        if number == 4:
            return s["nobody"]
        if number == 5:
            try:
                s += gen("y", temperature=-1)
            except ValueError as error:
                return str(error)
        if number == 6:
            fork = s.fork(2)[0]
            fork += gen("y", regex="(")
            try:
                return fork.text()
            except ValueError:
                return "caught"
        s += gen("z", max_tokens=2)
        return s["z"]

    states = program.run_batch(llm, [{"number": number} for number in range(8)], sampling_params=GREEDY)
    kinds = [type(state.error) for state in states]
    assert kinds == [type(None), LookupError, ValueError, ValueError, KeyError, type(None), type(None), type(None)]
    assert "regex" in str(states[2].error) and "grammar" in str(states[3].error)
    assert "'nobody': the state has 'x'" in str(states[4].error)
    assert "temperature is -1" in states[5].value and states[6].value == "caught"
    for number in (0, 7):
        want = write(llm, f"Number {number}", max_tokens=4)
        assert states[number]["x"] == want
        assert states[number].value == write(llm, f"Number {number}{want}", max_tokens=2)
    assert states[2]["x"] and states[3]["never read"]
    with pytest.raises(KeyError, match="failed"):
        _ = states[2]["y"]
    with pytest.raises(LookupError, match="of its own"):
        program.run(llm, number=1)


def test_what_a_failed_program_has_running_is_aborted(llm):
    def program(s):
        s += "A"
        short, long = s.fork(2)
        long += gen("x", max_tokens=100, ignore_eos=True)
        short += gen("x", max_tokens=2)
        short.text()
        raise LookupError

    (state,) = run_programs(llm, [program], GREEDY)
    assert isinstance(state.error, LookupError)
    assert llm.metrics.forward_passes < 10


def test_a_failed_pass_fails_those_in_it(llm, cold):
    frail = cold()
    frail.engine.executor = FailingExecutor.__new__(FailingExecutor)
    frail.engine.executor.__dict__ |= dict(runner=None, error=MemoryError("no room"), at=(0,), after=False, passes=0)

    def program(s):
        s += "A" + gen("x")
        return s["x"]

    (state,) = run_programs(frail, [program])
    assert isinstance(state.error, RuntimeError) and "no room" in str(state.error)
    assert isinstance(state.error.__cause__, MemoryError)
    frail.close()
    (state,) = run_programs(frail, [program])
    assert isinstance(state.error, EngineDeadError)


def test_an_interrupt_ends_all_and_comes_out(llm, monkeypatch):
    begun, ended, went_on = [], [], []

    def program(s):
        begun.append(s)
        try:
            s += "A" + gen("x", max_tokens=50)
            s.text()
            went_on.append(s)
        finally:
            ended.append(s)

    steps = []
    step = llm.engine.step

    def interrupted():
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_programs(llm, [program] * 3, GREEDY)
    assert len(begun) == len(ended) == 3 and not went_on


def test_a_state_that_is_read_from_elsewhere_or_too_late(llm):
    def program(s):
        s += "A" + gen("x", max_tokens=2)
        caught = []

        def other():
            try:
                s.text()
            except RuntimeError as error:
                caught.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return caught

    (state,) = run_programs(llm, [program], GREEDY)
    assert "its own program" in state.value[0]
    with pytest.raises(RuntimeError, match="has ended"):
        state += "more"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: gen("x", n=2), "n is 2"),
        (lambda: gen("x", regex="a", choice=["b"]), "regex and choice"),
        (lambda: select("x", []), r"choices is \[\]"),
        (lambda: select("x", ["a", ""]), "at least one character"),
        (lambda: select("x", ["a", "a"]), "no two may be equal"),
    ],
)
def test_bad_parts_are_refused_where_they_are_written(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_bad_programs(llm):
    def raised_by(body):
        (state,) = run_programs(llm, [body])
        return f"{type(state.error).__name__}: {state.error}"

    assert "TypeError: 3 cannot be appended" in raised_by(lambda s: s.__iadd__(3))
    assert "ValueError: n is 0" in raised_by(lambda s: s.fork(0))
    assert "has no text before it" in raised_by(lambda s: s.__iadd__(select("x", ["a", "b"])))
    assert "the prompt is empty" in raised_by(lambda s: s.__iadd__(gen("x")))
    with pytest.raises(ValueError, match="n is 2"):
        run_programs(llm, [], SamplingParams(n=2))
    with pytest.raises(ValueError, match="at_once is 0"):
        run_programs(llm, [], at_once=0)
    with pytest.raises(TypeError, match="temprature"):
        gen("x", temprature=1)
    assert minillm.gen is gen and minillm.select is select and minillm.run_programs is run_programs
