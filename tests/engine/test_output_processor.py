"""The output processor, driven by hand-made requests and pass results. Checks also run on wrong versions of it."""

import math
import random
from dataclasses import dataclass, field, replace

import pytest

from minillm.core.batch import ModelOutput, TokenLogprob
from minillm.core.outputs import RequestOutput
from minillm.core.request import Request, RequestStatus
from minillm.core.sampling_params import SamplingParams
from minillm.engine import output_processor
from minillm.engine.output_processor import OutputProcessor, could_become
from tests import toy_tokenizers as toy

HALF = "\ufffd"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return toy.byte_level(tmp_path_factory.mktemp("byte_level"))


# -- a prompt on its way, without engine, scheduler or model --------------------------------------------------------


def logprobs_of(token: int) -> list[TokenLogprob]:
    """Made up, but to be told apart: the sampled token, and one more likely."""
    return [TokenLogprob(token, -1 - token / 1000, 2), TokenLogprob(token + 1, -0.5, 1)]


@dataclass
class Prompt:
    """A prompt of n samples with an output processor of its own, stepped by hand."""

    tokenizer: object
    params: SamplingParams
    eos: tuple[int, ...] = ()
    prompt_ids: list[int] = field(default_factory=lambda: [65])
    request_id: str = "p"

    def __post_init__(self):
        self.processor = output_processor.OutputProcessor(self.tokenizer)
        names = [f"{self.request_id}/{i}" for i in range(self.params.n)]
        self.requests = [Request(name, self.prompt_ids, self.params, 0, i) for i, name in enumerate(names)]
        self.processor.add(self.request_id, "the prompt", self.requests)
        self.outputs: list[RequestOutput] = []
        self.stopped: list[tuple[str, str]] = []

    def step(self, *tokens: list[int] | None, **more) -> RequestOutput | None:
        """A pass that gives sample i tokens[i]; ends what a scheduler would end."""
        advanced, sampled = [], {}
        for request, new in zip(self.requests, tokens, strict=False):
            if new and not request.finished:
                sampled[request.request_id] = new
                advanced.append(request)
                for token in new:
                    request.output_token_ids.append(token)
                    if self._finishes(request, token):
                        request.status = RequestStatus.FINISHED
                        break
        logprobs = {name: [logprobs_of(token) for token in new] for name, new in sampled.items()}
        result = ModelOutput(0, sampled, logprobs if self.params.logprobs is not None else {}, **more)
        outputs, stopped = self.processor.process(advanced, result)
        for name, stop in stopped:
            request = next(request for request in self.requests if request.request_id == name)
            assert not request.finished, "the scheduler knows"
            request.status, request.finish_reason, request.stop_reason = RequestStatus.FINISHED, "stop", stop
        self.stopped += stopped
        assert len(outputs) == (1 if advanced else 0)
        self.outputs += outputs
        return outputs[0] if outputs else None

    def _finishes(self, request: Request, token: int) -> bool:
        if len(request.output_token_ids) >= self.params.min_tokens:
            if token in self.eos and not self.params.ignore_eos:
                request.finish_reason = "stop"
            elif token in self.params.stop_token_ids:
                request.finish_reason, request.stop_reason = "stop", token
        if request.finish_reason is None and len(request.output_token_ids) == self.params.max_tokens:
            request.finish_reason = "length"
        return request.finish_reason is not None

    def run(self, tokens: list[int], per_step: int = 1):
        """All of one sample's tokens, or up to its end. Its last output; whatever happens, nothing is withdrawn."""
        for at in range(0, len(tokens), per_step):
            if not self.requests[0].finished:
                self.step(tokens[at : at + per_step])
        return self.last()

    def last(self, index: int = 0):
        shown = ""
        for output in self.outputs:
            sample = output.outputs[index]
            shown += sample.delta
            assert sample.text == shown, "text that was given out was withdrawn, or not given out"
        sample = self.outputs[-1].outputs[index]
        assert sample.finished == self.requests[index].finished
        return sample


def run(tokenizer, text, per_step=1, eos=(), **params):
    """The output for these tokens (a string: one for each byte), as one sample."""
    tokens = toy.byte_ids(text) if isinstance(text, str | bytes) else text
    params.setdefault("max_tokens", None)
    return Prompt(tokenizer, SamplingParams(**params), eos).run(tokens, per_step)


def ended(sample, text, reason="stop", stop=None, tokens=None):
    assert (sample.text, sample.finish_reason, sample.stop_reason) == (text, reason, stop)
    assert tokens is None or len(sample.token_ids) == tokens


# -- stop strings ---------------------------------------------------------------------------------------------------


def check_stop_string_over_tokens(tokenizer):
    ended(run(tokenizer, "so STOP here", stop="STOP"), "so ", stop="STOP", tokens=7)
    the, stop = tokenizer.encode(" the")[0], tokenizer.encode("STOP")[0]
    ended(run(tokenizer, [the, stop, the], stop="heST"), " t", stop="heST", tokens=2)
    ended(run(tokenizer, [the, stop, the], stop=" theSTOP t"), "", stop=" theSTOP t", tokens=3)
    ended(run(tokenizer, "aaab", stop="aab"), "a", stop="aab", tokens=4)


def check_stop_string_inside_one_token(tokenizer):
    stop = tokenizer.encode("STOP")[0]
    ended(run(tokenizer, [97, stop, 98], stop="T"), "aS", stop="T", tokens=2)


def check_stop_string_that_ends_inside_a_token_of_half_characters(tokenizer):
    """A token may hold the last byte of a stop string and the first of what comes after it, which is not shown."""
    straddling = tokenizer.token_id(toy.letters(b"\xad\xe4"))
    ended(run(tokenizer, [97, 0xE4, 0xB8, straddling, 0xB8, 0xAD], stop="中"), "a", stop="中", tokens=4)
    ended(run(tokenizer, "a😀b", stop="😀"), "a", stop="😀", tokens=5)
    ended(run(tokenizer, "a中文", stop="中文"), "a", stop="中文", tokens=7)
    ended(run(tokenizer, "é e\u0301", stop="\u0301"), "é e", stop="\u0301", tokens=6)


def check_of_two_stop_strings_the_first_completed_wins(tokenizer):
    """Of those that end together, the longest. The order they are listed in means nothing."""
    the, stop = tokenizer.encode(" the")[0], tokenizer.encode("STOP")[0]
    for tokens, stops, text, winner in (
        ([97, the], ["e", "h"], "a t", "h"),
        ([97, stop], ["STOP", "TO"], "aS", "TO"),
        ([97, stop], ["P", "TOP", "OP"], "aS", "TOP"),
        ([97, stop], ["STOPS", "ST", "S"], "a", "S"),
        ([the, stop], ["OP", "heS"], " t", "heS"),
    ):
        for order in (stops, stops[::-1]):
            ended(run(tokenizer, tokens, stop=order), text, stop=winner)


def check_stop_string_that_begins_another(tokenizer):
    ended(run(tokenizer, "a then b", stop=["then", "the"]), "a ", stop="the", tokens=5)
    ended(run(tokenizer, "a then b", stop=["then b", "the end"]), "a ", stop="then b", tokens=8)


def check_stop_string_stays_if_asked(tokenizer):
    stop = tokenizer.encode("STOP")[0]
    ended(run(tokenizer, "so STOP here", stop="STOP", include_stop_str_in_output=True), "so STOP", stop="STOP")
    ended(run(tokenizer, [97, stop], stop="TO", include_stop_str_in_output=True), "aSTO", stop="TO")


def check_min_tokens(tokenizer):
    """Before min_tokens a stop string is text; one that is completed after them counts, wherever it began."""
    ended(run(tokenizer, "abcabc", stop="b", min_tokens=2), "abca", stop="b", tokens=5)
    ended(run(tokenizer, "abcabc", stop="b", min_tokens=1), "a", stop="b", tokens=2)
    ended(run(tokenizer, "abcd", stop="bc", min_tokens=2), "a", stop="bc", tokens=3)
    ended(run(tokenizer, "aaa", stop="aa", min_tokens=2), "a", stop="aa", tokens=3)
    assert run(tokenizer, "abcabc", stop="b", min_tokens=5).text == "abcabc"


def check_stop_string_by_the_last_token_allowed(tokenizer):
    """It could be called length as well, but what the caller asked for has happened."""
    for per_step in (1, 3):
        ended(run(tokenizer, "so STOP", per_step, stop="STOP", max_tokens=7), "so ", stop="STOP", tokens=7)
    prompt = Prompt(tokenizer, SamplingParams(stop="STOP", max_tokens=4))
    prompt.run(toy.byte_ids("STOP"))
    assert prompt.stopped == [], "the scheduler has ended it already"
    prompt = Prompt(tokenizer, SamplingParams(stop="STOP", max_tokens=5))
    prompt.run(toy.byte_ids("STOP"))
    assert prompt.stopped == [("p/0", "STOP")]


def check_stop_string_in_what_was_held_back_to_the_end(tokenizer):
    """Half a character at the end is U+FFFD, and that may be just what a stop string waits for."""
    half = "中".encode()[:2]
    ended(run(tokenizer, b"ab" + half, stop="b" + HALF, max_tokens=4), "a", stop="b" + HALF, tokens=4)
    ended(run(tokenizer, b"ab" + half, stop="b" + HALF, max_tokens=5), "a", None)
    ended(run(tokenizer, b"ab" + half, max_tokens=4), "ab" + HALF, "length")


def check_random_texts_and_stop_strings(tokenizer):
    """Whatever the split into tokens and passes: the text is cut where the first stop string is completed."""
    rng = random.Random(0)
    for _ in range(150):
        text = toy.random_text(rng, 20)
        stops = [text[at : at + rng.randrange(1, 5)] for at in (rng.randrange(len(text)) for _ in range(2))]
        stops.append("".join(rng.sample("abe\n中", 2)))
        ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
        end, start, winner = min(ends)
        include = rng.random() < 0.3
        for tokens in (toy.byte_ids(text), tokenizer.encode(text)):
            sample = run(tokenizer, tokens, rng.randrange(1, 4), stop=stops, include_stop_str_in_output=include)
            ended(sample, text[: end if include else start], stop=winner)
            assert len(tokenizer.decode(sample.token_ids)) >= end
            assert HALF in (whole := tokenizer.decode(sample.token_ids[:-1])) or len(whole) < end, "a token too many"


# -- held back and released -----------------------------------------------------------------------------------------


def deltas(tokenizer, text, **params):
    prompt = Prompt(tokenizer, SamplingParams(max_tokens=None, **params))
    prompt.run(toy.byte_ids(text))
    return [output.outputs[0].delta for output in prompt.outputs]


def check_what_could_become_a_stop_string_waits(tokenizer):
    """And is released as soon as it cannot."""
    assert deltas(tokenizer, "aSTxb", stop="STOP") == ["a", "", "", "STx", "b"]
    assert deltas(tokenizer, "SSTb", stop="STOP") == ["", "S", "", "STb"]
    assert deltas(tokenizer, "a\n\nb", stop="\n\n\n") == ["a", "", "", "\n\nb"]
    assert deltas(tokenizer, "abc", stop=["xy", "zw"]) == ["a", "b", "c"]
    assert deltas(tokenizer, "ab", stop=["bcd", "ab c"]) == ["", ""]
    assert deltas(tokenizer, "STa", stop="STOP", include_stop_str_in_output=True) == ["S", "T", "a"]


def check_what_waits_is_released_at_the_end(tokenizer):
    end = tokenizer.token_id(toy.END)
    ended(run(tokenizer, "so STO", stop="STOP", max_tokens=6), "so STO", "length")
    ended(run(tokenizer, [*b"so STO", end], stop="STOP", eos=(end,)), "so STO", "stop")
    ended(run(tokenizer, [*b"so STO", 9], stop="STOP", stop_token_ids=[9]), "so STO", "stop", 9)


def check_no_half_characters_are_streamed(tokenizer):
    rng = random.Random(2)
    for _ in range(30):
        text = toy.random_text(rng)
        pieces = deltas(tokenizer, text)
        assert "".join(pieces) == text and HALF not in "".join(pieces)
    assert deltas(tokenizer, "a中b") == ["a", "", "", "中", "b"]


# -- end tokens and stop tokens -------------------------------------------------------------------------------------


def check_text_of_end_tokens(tokenizer):
    """It is left out, whether the token is special or plain; the token itself is in token_ids."""
    end = tokenizer.token_id(toy.END)
    for eos in (end, ord("x")):
        ended(run(tokenizer, [97, eos, 98], eos=(eos, 7)), "a", "stop", None, tokens=2)
        ended(run(tokenizer, [eos], eos=(eos,)), "", "stop", None, tokens=1)
    assert run(tokenizer, [97, end, 98], eos=(end,), ignore_eos=True).text == "ab"
    assert run(tokenizer, "axb", eos=(ord("x"),), ignore_eos=True).text == "axb"


def check_text_of_stop_tokens(tokenizer):
    the = tokenizer.encode(" the")[0]
    ended(run(tokenizer, [97, the, 98], stop_token_ids=[the]), "a", "stop", the, tokens=2)
    ended(run(tokenizer, [97, the], stop_token_ids=[the], include_stop_str_in_output=True), "a the", "stop", the)
    # The stop token would have completed a stop string, but its text is not part of the output.
    ended(run(tokenizer, [97, the], stop_token_ids=[the], stop="a t"), "a", "stop", the)


# -- several tokens a pass, log-probabilities -----------------------------------------------------------------------


def check_tokens_behind_a_stop_string_are_dropped(tokenizer):
    """A pass may accept several; text, ids and log-probabilities end together."""
    for per_step in (1, 2, 4, 7):
        sample = run(tokenizer, "abXcdef", per_step, stop="X", logprobs=1)
        ended(sample, "ab", stop="X")
        assert sample.token_ids == toy.byte_ids("abX")
        assert len(sample.logprobs) == 3


def check_tokens_behind_an_end_are_dropped(tokenizer):
    for params, eos in ((dict(max_tokens=3), ()), (dict(), (ord("X"),))):
        sample = run(tokenizer, "abXcdef", 5, eos, logprobs=1, **params)
        assert sample.token_ids == toy.byte_ids("abX")
        assert len(sample.logprobs) == 3


def check_logprobs_stand_beside_their_tokens(tokenizer):
    for per_step in (1, 3):
        sample = run(tokenizer, "a中", per_step, logprobs=1, max_tokens=4)
        assert [next(iter(entries)) for entries in sample.logprobs] == sample.token_ids == toy.byte_ids("a中")
        for token, entries in zip(sample.token_ids, sample.logprobs, strict=True):
            assert list(entries) == [token, token + 1], "the sampled one first"
            assert (entries[token].logprob, entries[token].rank) == (-1 - token / 1000, 2)
            assert entries[token].decoded_token == tokenizer.token_text(token)
        assert math.isclose(sample.cumulative_logprob, sum(-1 - token / 1000 for token in sample.token_ids))


def check_no_logprobs_unless_asked(tokenizer):
    sample = run(tokenizer, "abc")
    assert sample.logprobs is None and sample.cumulative_logprob is None
    assert run(tokenizer, "abc", logprobs=0).logprobs is not None, "0 asks for the sampled token's"


def check_prompt_logprobs(tokenizer):
    """They come in the pieces in which the prompt is computed; the first token has none."""
    prompt = Prompt(tokenizer, SamplingParams(prompt_logprobs=1, max_tokens=None), prompt_ids=[65, 66, 67, 68])
    assert prompt.step(prompt_logprobs={"p/0": [logprobs_of(66), logprobs_of(67)]}) is None
    prompt.step([97], prompt_logprobs={"p/0": [logprobs_of(68)]})
    output = prompt.step([98])
    assert output.prompt_logprobs[0] is None
    assert [list(entries) for entries in output.prompt_logprobs[1:]] == [[66, 67], [67, 68], [68, 69]]
    assert output.prompt_logprobs[1][66].decoded_token == "B"
    assert Prompt(tokenizer, SamplingParams()).step([97]).prompt_logprobs is None


# -- several samples ------------------------------------------------------------------------------------------------


def check_samples_are_gathered_by_prompt(tokenizer):
    """One output for all of them, in order; finished only when all are, and then forgotten."""
    prompt = Prompt(tokenizer, SamplingParams(n=3, stop="X", max_tokens=4, logprobs=1))
    first = prompt.step([97], [98], [99])
    assert [(sample.index, sample.text) for sample in first.outputs] == [(0, "a"), (1, "b"), (2, "c")]
    prompt.step([ord("X")], [98], [99])
    assert [sample.finish_reason for sample in prompt.outputs[-1].outputs] == ["stop", None, None]
    prompt.step(None, None, [ord("X")])
    output = prompt.outputs[-1]
    assert not output.finished and [sample.finished for sample in output.outputs] == [True, False, True]
    assert [sample.delta for sample in output.outputs] == ["", "", ""]
    assert prompt.processor.prompt_id("p/0") == "p", "the prompt still runs"
    prompt.step(None, [98, 98])
    output = prompt.outputs[-1]
    assert output.finished
    assert [prompt.last(i).text for i in range(3)] == ["a", "bbbb", "cc"]
    assert [sample.finish_reason for sample in output.outputs] == ["stop", "length", "stop"]
    assert [len(sample.logprobs) for sample in output.outputs] == [2, 4, 3]
    assert not prompt.processor.prompts and prompt.processor.prompt_id("p/1") is None


def check_outputs_are_snapshots(tokenizer):
    """A caller may keep or change one; the next is complete all the same."""
    prompt = Prompt(tokenizer, SamplingParams(logprobs=1))
    first = prompt.step([97]).outputs[0]
    assert first.token_ids == [97] and len(first.logprobs) == 1
    first.token_ids.append(1), first.logprobs.clear()
    second = prompt.step([98]).outputs[0]
    assert first.text == "a" and second.text == "ab"
    assert second.token_ids == [97, 98] and len(second.logprobs) == 2


# -- abort ----------------------------------------------------------------------------------------------------------


def check_abort_gives_the_text_so_far(tokenizer):
    """With all that was held back."""
    prompt = Prompt(tokenizer, SamplingParams(n=2, stop="X y", max_tokens=4))
    prompt.step([97], [98])
    prompt.step([98, 99, 100], [ord("X"), 0xE4])
    output = prompt.processor.abort("p")
    assert output.finished
    assert [(sample.text, sample.finish_reason) for sample in output.outputs] == [
        ("abcd", "length"),
        ("bX" + HALF, "abort"),
    ]
    assert output.outputs[1].token_ids == [98, ord("X"), 0xE4]
    assert output.outputs[1].delta == "X" + HALF
    assert prompt.processor.abort("p") is None and prompt.processor.prompt_id("p/0") is None


def check_abort_before_any_token(tokenizer):
    output = Prompt(tokenizer, SamplingParams()).processor.abort("p")
    assert (output.finished, output.outputs[0].text, output.outputs[0].finish_reason) == (True, "", "abort")
    assert output.times.first_token is None and output.times.finished >= output.times.arrival


CHECKS = {name: check for name, check in list(globals().items()) if name.startswith("check_")}


@pytest.mark.parametrize("name", CHECKS)
def test_output_processor(name, tokenizer):
    CHECKS[name](tokenizer)


# -- wrong versions -------------------------------------------------------------------------------------------------


class TokenByToken:
    def __init__(self, tokenizer, prompt):
        self.add = lambda token: tokenizer.decode([token])

    def finish(self):
        return ""


class DropsTheRest(output_processor.IncrementalDetokenizer):
    def finish(self):
        return ""


class Rewritten(OutputProcessor):
    """The stop string search again, to have its rules broken one by one."""

    across_tokens = True
    choose = staticmethod(lambda found, stops: min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0])))
    min_tokens = staticmethod(lambda params: params.min_tokens)

    def _add_text(self, sample, new, params):
        old = len(sample.text)
        sample.text += new
        if len(sample.output.token_ids) <= self.min_tokens(params):
            return None
        found = []
        for stop in params.stop:
            start = max(0, old - len(stop) + 1) if self.across_tokens else old
            if (at := sample.text.find(stop, start)) >= 0:
                found.append((at, stop))
        if not found:
            return None
        at, stop = self.choose(found, params.stop)
        sample.text = sample.text[: at + len(stop) * params.include_stop_str_in_output]
        sample.detokenizer = None
        self._finish(sample, "stop", stop)
        return stop


class WithinATokenOnly(Rewritten):
    across_tokens = False


class AcrossTokensOnly(OutputProcessor):
    """Looks at how the text ends after each token."""

    def _add_text(self, sample, new, params):
        ends = (sample.text + new).endswith(tuple(params.stop) or "\0")
        return super()._add_text(sample, new, params if ends else replace(params, stop=[]))


class FirstListedWins(Rewritten):
    choose = staticmethod(lambda found, stops: min(found, key=lambda hit: stops.index(hit[1])))


class FirstBegunWins(Rewritten):
    choose = staticmethod(lambda found, stops: min(found))


class LastWins(Rewritten):
    choose = staticmethod(lambda found, stops: max(found))


class IgnoresMinTokens(Rewritten):
    min_tokens = staticmethod(lambda params: 0)


class MinTokensOneTooMany(Rewritten):
    min_tokens = staticmethod(lambda params: params.min_tokens + 1)


class AlwaysIncludesTheStopString(OutputProcessor):
    def _add_text(self, sample, new, params):
        text = sample.text + new
        stop = super()._add_text(sample, new, params)
        if stop is not None:
            sample.text = sample.output.text = text[: text.find(stop) + len(stop)]
        return stop


class KeepsAllBehindTheStopString(OutputProcessor):
    def _add_text(self, sample, new, params):
        text = sample.text + new
        stop = super()._add_text(sample, new, params)
        if stop is not None and params.include_stop_str_in_output:
            sample.text = sample.output.text = text
        return stop


class LengthBeforeStop(OutputProcessor):
    def _advance(self, sample, request, output):
        stop = super()._advance(sample, request, output)
        if request.finished:
            sample.output.finish_reason, sample.output.stop_reason = request.finish_reason, request.stop_reason
        return stop


class TellsTheSchedulerAnyway(OutputProcessor):
    def process(self, advanced, output):
        outputs, _ = super().process(advanced, output)
        samples = zip(advanced, outputs, strict=True)
        return outputs, [(r.request_id, o.outputs[0].stop_reason) for r, o in samples if o.outputs[0].stop_reason]


class LogprobsOfTheWholePass(OutputProcessor):
    def _advance(self, sample, request, output):
        positions = output.logprobs.get(request.request_id, [])
        before = list(sample.output.logprobs or [])
        stop = super()._advance(sample, request, output)
        if sample.output.logprobs is not None:
            sample.output.logprobs = before + [self._logprobs(position) for position in positions]
        return stop


class LogprobsOneOff(OutputProcessor):
    def _logprobs(self, position):
        entries = super()._logprobs(position)
        return dict(reversed(entries.items()))


class KeepsEndTokensText(OutputProcessor):
    def _advance(self, sample, request, output):
        reason, request.finish_reason = request.finish_reason, request.finish_reason and "length"
        stop = super()._advance(sample, request, output)
        request.finish_reason = reason
        if stop is None and request.finished:
            sample.output.finish_reason = reason
        return stop


class DropsTheEndToken(OutputProcessor):
    def _finish(self, sample, reason, stop_reason):
        super()._finish(sample, reason, stop_reason)
        if reason == "stop" and not isinstance(stop_reason, str):
            sample.output.token_ids.pop()


class NoLogprobsForZero(OutputProcessor):
    def add(self, request_id, prompt, requests):
        super().add(request_id, prompt, requests)
        for sample in self.prompts[request_id].samples.values():
            if not requests[0].sampling_params.logprobs:
                sample.output.logprobs = None


class ForgetsEarlierPromptLogprobs(OutputProcessor):
    def process(self, advanced, output):
        for name in output.prompt_logprobs:
            self._prompt_of[name].prompt_logprobs = [None]
        return super().process(advanced, output)


class FinishedWithTheFirst(OutputProcessor):
    def _emit(self, state):
        output = super()._emit(state)
        output.finished = any(sample.finished for sample in output.outputs)
        return output


class NeverForgets(OutputProcessor):
    def _emit(self, state):
        output = super()._emit(state)
        self.prompts[state.request_id] = state
        return output


class OneGrowingOutput(OutputProcessor):
    def _emit(self, state):
        output = super()._emit(state)
        for sample, live in zip(output.outputs, state.samples.values(), strict=True):
            sample.token_ids = live.output.token_ids
        return output


class AbortEndsAll(OutputProcessor):
    def abort(self, request_id):
        for sample in self.prompts[request_id].samples.values():
            self._finish(sample, "abort", None)
        return self._emit(self.prompts[request_id])


class AbortKeepsBack(OutputProcessor):
    def abort(self, request_id):
        if request_id in self.prompts:
            for sample in self.prompts[request_id].samples.values():
                sample.text, sample.detokenizer = sample.output.text, None
        return super().abort(request_id)


class AbortOnlyMarks(OutputProcessor):
    def abort(self, request_id):
        state = self.prompts.pop(request_id, None)
        return state and self._emit_running(state)

    def _emit_running(self, state):
        self.prompts[state.request_id] = state
        return self._emit(state)


WRONG = {
    TokenByToken: [
        "check_no_half_characters_are_streamed",
        "check_stop_string_that_ends_inside_a_token_of_half_characters",
    ],
    DropsTheRest: ["check_stop_string_in_what_was_held_back_to_the_end", "check_abort_gives_the_text_so_far"],
    AcrossTokensOnly: ["check_stop_string_inside_one_token", "check_of_two_stop_strings_the_first_completed_wins"],
    WithinATokenOnly: [
        "check_stop_string_over_tokens",
        "check_stop_string_by_the_last_token_allowed",
        "check_random_texts_and_stop_strings",
    ],
    FirstListedWins: ["check_of_two_stop_strings_the_first_completed_wins", "check_random_texts_and_stop_strings"],
    FirstBegunWins: ["check_of_two_stop_strings_the_first_completed_wins"],
    LastWins: ["check_of_two_stop_strings_the_first_completed_wins", "check_random_texts_and_stop_strings"],
    IgnoresMinTokens: ["check_min_tokens"],
    MinTokensOneTooMany: ["check_min_tokens"],
    AlwaysIncludesTheStopString: ["check_stop_string_over_tokens", "check_stop_string_that_begins_another"],
    KeepsAllBehindTheStopString: ["check_stop_string_stays_if_asked"],
    LengthBeforeStop: ["check_stop_string_by_the_last_token_allowed"],
    TellsTheSchedulerAnyway: ["check_stop_string_by_the_last_token_allowed"],
    LogprobsOfTheWholePass: [
        "check_tokens_behind_a_stop_string_are_dropped",
        "check_tokens_behind_an_end_are_dropped",
    ],
    LogprobsOneOff: ["check_logprobs_stand_beside_their_tokens", "check_prompt_logprobs"],
    NoLogprobsForZero: ["check_no_logprobs_unless_asked"],
    ForgetsEarlierPromptLogprobs: ["check_prompt_logprobs"],
    KeepsEndTokensText: ["check_text_of_end_tokens", "check_text_of_stop_tokens"],
    DropsTheEndToken: ["check_text_of_end_tokens", "check_text_of_stop_tokens"],
    FinishedWithTheFirst: ["check_samples_are_gathered_by_prompt"],
    NeverForgets: ["check_samples_are_gathered_by_prompt"],
    OneGrowingOutput: ["check_outputs_are_snapshots"],
    AbortEndsAll: ["check_abort_gives_the_text_so_far"],
    AbortKeepsBack: ["check_abort_gives_the_text_so_far"],
    AbortOnlyMarks: ["check_abort_before_any_token"],
}
WRONG_HOLDS = {
    "nothing": (
        lambda text, stops: 0,
        ["check_what_could_become_a_stop_string_waits", "check_random_texts_and_stop_strings"],
    ),
    "always as much as a stop string": (
        lambda text, stops: min(len(text), max(map(len, stops), default=0)),
        ["check_what_could_become_a_stop_string_waits"],
    ),
    "only its first character": (
        lambda text, stops: int(any(text.endswith(stop[0]) for stop in stops)),
        ["check_what_could_become_a_stop_string_waits", "check_random_texts_and_stop_strings"],
    ),
    "for ever": (lambda text, stops: len(text) if stops else 0, ["check_what_could_become_a_stop_string_waits"]),
}


@pytest.mark.parametrize("version", WRONG)
def test_a_wrong_version_is_noticed(version, tokenizer, monkeypatch):
    part = "OutputProcessor" if issubclass(version, OutputProcessor) else "IncrementalDetokenizer"
    monkeypatch.setattr(output_processor, part, version)
    for name in WRONG[version]:
        with pytest.raises(AssertionError):
            CHECKS[name](tokenizer)


@pytest.mark.parametrize("name", WRONG_HOLDS)
def test_holding_back_the_wrong_text_is_noticed(name, tokenizer, monkeypatch):
    version, checks = WRONG_HOLDS[name]
    monkeypatch.setattr(output_processor, "could_become", version)
    for check in checks:
        with pytest.raises(AssertionError):
            CHECKS[check](tokenizer)


def test_released_too_late_is_noticed(tokenizer, monkeypatch):
    """What is held back must come out when the sample ends."""

    class NeverReleases(OutputProcessor):
        def _finish(self, sample, reason, stop_reason):
            shown = sample.output.text
            super()._finish(sample, reason, stop_reason)
            sample.output.text = shown if reason == "length" else sample.output.text

    monkeypatch.setattr(output_processor, "OutputProcessor", NeverReleases)
    with pytest.raises(AssertionError):
        check_what_waits_is_released_at_the_end(tokenizer)


def test_the_rewritten_search_is_right_until_a_rule_is_broken(tokenizer, monkeypatch):
    monkeypatch.setattr(output_processor, "OutputProcessor", Rewritten)
    for check in CHECKS.values():
        check(tokenizer)


def test_every_check_refuses_something():
    refused = {name for names in WRONG.values() for name in names}
    refused |= {name for _, names in WRONG_HOLDS.values() for name in names}
    assert CHECKS.keys() - refused == {"check_what_waits_is_released_at_the_end"}, "which has a test of its own"


# -- the rest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [
        ("", ["ab"], 0),
        ("a", [], 0),
        ("xa", ["ab"], 1),
        ("xab", ["ab"], 0),  # complete: not for this function
        ("aba", ["abab"], 3),
        ("abab", ["abab"], 2),  # complete, but what it ends in may begin another
        ("xaba", ["abc", "bad"], 2),
        ("aaa", ["aaaa", "b"], 3),
        ("a", ["a"], 0),
        ("中", ["中文"], 1),
    ],
)
def test_could_become(text, stops, held):
    assert could_become(text, stops) == held


def test_could_become_against_its_definition():
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(8)))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(3))]
        ends = [text[-length:] for length in range(1, len(text) + 1)]
        held = [len(end) for end in ends for stop in stops if stop.startswith(end) and stop != end]
        assert could_become(text, stops) == max(held, default=0)


def test_without_a_tokenizer():
    """Token ids go in and come out; there is no text."""
    prompt = Prompt(None, SamplingParams(n=2, logprobs=1, max_tokens=2))
    prompt.step([5], [6])
    output = prompt.step([7], [8])
    assert output.finished
    assert [(sample.text, sample.token_ids) for sample in output.outputs] == [("", [5, 7]), ("", [6, 8])]
    assert output.outputs[0].logprobs[0][5].decoded_token is None


def test_what_a_request_output_carries(tokenizer):
    prompt = Prompt(tokenizer, SamplingParams(max_tokens=2), prompt_ids=[65, 66])
    first = prompt.step([97])
    assert (first.request_id, first.prompt, first.prompt_token_ids) == ("p", "the prompt", [65, 66])
    times = first.times
    assert times.arrival <= times.first_token and times.finished is None
    arrival, first_token = times.arrival, times.first_token
    last = prompt.step([98])
    assert (last.times.arrival, last.times.first_token) == (arrival, first_token)
    assert last.times.finished >= first_token


def test_prompts_do_not_mix(tokenizer):
    processor = OutputProcessor(tokenizer)
    requests = [Request(name, [65], SamplingParams(stop="X"), 0) for name in ("a", "b")]
    for request in requests:
        processor.add(request.request_id, None, [request])
    requests[0].output_token_ids += toy.byte_ids("no")
    requests[1].output_token_ids += toy.byte_ids("yX")
    outputs, stopped = processor.process(requests, ModelOutput(0))
    assert [(o.request_id, o.outputs[0].text, o.finished) for o in outputs] == [("a", "no", False), ("b", "y", True)]
    assert stopped == [("b", "X")]
    assert list(processor.prompts) == ["a"] and processor.prompt_id("a") == "a" and processor.prompt_id("b") is None
    assert processor.abort("no such") is None


def test_results_for_a_prompt_that_has_gone_are_passed_over(tokenizer):
    """It was aborted while the pass ran."""
    prompt = Prompt(tokenizer, SamplingParams(prompt_logprobs=1))
    prompt.processor.abort("p")
    assert prompt.processor.process([], ModelOutput(0, prompt_logprobs={"p/0": [logprobs_of(1)]})) == ([], [])
