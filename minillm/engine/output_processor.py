"""From token ids back to text: incremental, with stop strings, gathered by prompt."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from minillm.core.batch import ModelOutput, TokenLogprob
from minillm.core.outputs import CompletionOutput, Logprob, RequestOutput, RequestTimes
from minillm.core.request import Request
from minillm.core.sampling_params import SamplingParams
from minillm.models.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass
class SampleState:
    """One of a prompt's n samples."""

    output: CompletionOutput
    detokenizer: IncrementalDetokenizer | None
    text: str = ""  # all there is; ``output.text`` may lag behind it by what could become a stop string
    sent: int = 0  # characters of output.text that earlier outputs carried


@dataclass
class PromptState:
    """A prompt with its samples, by internal request id."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    times: RequestTimes
    samples: dict[str, SampleState] = field(default_factory=dict)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None  # of the first sample that ran


class OutputProcessor:
    """Holds the text side of every unfinished prompt."""

    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer
        self.prompts: dict[str, PromptState] = {}
        self._prompt_of: dict[str, PromptState] = {}  # internal request id -> its prompt

    def add(self, request_id: str, prompt: str | None, requests: list[Request]) -> None:
        """Take in a prompt's n requests."""
        first = requests[0]
        state = PromptState(
            request_id,
            prompt,
            first.prompt_token_ids,
            first.sampling_params,
            RequestTimes(arrival=time.monotonic()),
            prompt_logprobs=None
            if first.sampling_params.prompt_logprobs is None
            else [None] * max(1, first.sampling_params.prompt_logprobs_start),
        )
        for request in requests:
            detokenizer = self.tokenizer and IncrementalDetokenizer(self.tokenizer, request.prompt_token_ids)
            wants = request.sampling_params.logprobs is not None
            output = CompletionOutput(
                request.sample_index, logprobs=[] if wants else None, cumulative_logprob=0.0 if wants else None
            )
            state.samples[request.request_id] = SampleState(output, detokenizer)
            self._prompt_of[request.request_id] = state
        self.prompts[request_id] = state

    def prompt_id(self, internal_id: str) -> str | None:
        """The prompt that a scheduler's request belongs to; None once it has finished."""
        state = self._prompt_of.get(internal_id)
        return None if state is None else state.request_id

    def process(
        self, advanced: list[Request], output: ModelOutput
    ) -> tuple[list[RequestOutput], list[tuple[str, str]]]:
        """Take in the tokens of a pass. Returns the prompts' outputs, and (request, stop string) of those it ended.

        The latter still run as far as the scheduler knows: it must be told before it schedules again.
        """
        touched: dict[str, PromptState] = {}
        stopped = []
        for request_id, positions in output.prompt_logprobs.items():
            state = self._prompt_of.get(request_id)
            # Every sample computes the prompt; the first one's report is enough.
            if state is not None and request_id == next(iter(state.samples)):
                state.prompt_logprobs.extend(self._logprobs(position) for position in positions)
        for request in advanced:
            state = self._prompt_of[request.request_id]
            touched[state.request_id] = state
            if state.num_cached_tokens is None:
                state.num_cached_tokens = request.num_cached_tokens
            if state.times.first_token is None:
                state.times.first_token = time.monotonic()
            stop = self._advance(state.samples[request.request_id], request, output)
            if stop is not None and not request.finished:
                stopped.append((request.request_id, stop))
        return [self._emit(state) for state in touched.values()], stopped

    def abort(self, request_id: str, why: str | None = None) -> RequestOutput | None:
        """End a prompt's unfinished samples with reason "abort"; its last output, or None if it is not known.

        ``why`` becomes their stop reason.
        """
        state = self.prompts.get(request_id)
        if state is None:
            return None
        for sample in state.samples.values():
            if not sample.output.finished:
                self._finish(sample, "abort", why)
        return self._emit(state)

    def _advance(self, sample: SampleState, request: Request, output: ModelOutput) -> str | None:
        """Append what the request gained. The stop string that ended it, or None."""
        params, completion = request.sampling_params, sample.output
        new_tokens = request.output_token_ids[len(completion.token_ids) :]
        for i, token in enumerate(new_tokens):
            completion.token_ids.append(token)
            if completion.logprobs is not None:
                position = output.logprobs[request.request_id][i]
                completion.logprobs.append(self._logprobs(position))
                completion.cumulative_logprob += position[0].logprob
            # An end or stop token ends the text before itself.
            silent = request.finish_reason == "stop" and i == len(new_tokens) - 1
            if silent and not params.include_stop_str_in_output:
                break
            if sample.detokenizer and (stop := self._add_text(sample, sample.detokenizer.add(token), params)):
                return stop
        if request.finished:
            if sample.detokenizer and (stop := self._add_text(sample, sample.detokenizer.finish(), params)):
                return stop
            sample.detokenizer = None
            self._finish(sample, request.finish_reason, request.stop_reason)
        else:
            held = 0 if params.include_stop_str_in_output else could_become(sample.text, params.stop)
            completion.text = sample.text[: len(sample.text) - held]
        return None

    def _add_text(self, sample: SampleState, new: str, params: SamplingParams) -> str | None:
        """Append text. The stop string it completes, which ends the sample, or None."""
        old = len(sample.text)
        sample.text += new
        if len(sample.output.token_ids) <= params.min_tokens:
            return None
        starts = {stop: sample.text.find(stop, max(0, old - len(stop) + 1)) for stop in params.stop}
        found = [(at + len(stop), at, stop) for stop, at in starts.items() if at >= 0]
        if not found:
            return None
        # Of several, the one completed first, and of those the longest: as if text came character by character, so
        # that the cut does not depend on how the text was split into tokens.
        _, at, stop = min(found)
        sample.text = sample.text[: at + len(stop) if params.include_stop_str_in_output else at]
        sample.detokenizer = None  # what it holds back lies behind the stop string
        self._finish(sample, "stop", stop)
        return stop

    @staticmethod
    def _finish(sample: SampleState, reason: str, stop_reason: int | str | None) -> None:
        if sample.detokenizer is not None:
            sample.text += sample.detokenizer.finish()
        sample.output.text = sample.text
        sample.output.finish_reason, sample.output.stop_reason = reason, stop_reason

    def _emit(self, state: PromptState) -> RequestOutput:
        """A snapshot of the prompt; forgets it if all its samples have finished."""
        outputs = []
        for sample in state.samples.values():
            completion = sample.output
            outputs.append(
                CompletionOutput(
                    index=completion.index,
                    text=completion.text,
                    token_ids=list(completion.token_ids),
                    cumulative_logprob=completion.cumulative_logprob,
                    logprobs=None if completion.logprobs is None else list(completion.logprobs),
                    finish_reason=completion.finish_reason,
                    stop_reason=completion.stop_reason,
                    delta=completion.text[sample.sent :],
                )
            )
            sample.sent = len(completion.text)
        finished = all(output.finished for output in outputs)
        if finished:
            state.times.finished = time.monotonic()
            del self.prompts[state.request_id]
            for request_id in state.samples:
                del self._prompt_of[request_id]
        prompt_logprobs = None if state.prompt_logprobs is None else list(state.prompt_logprobs)
        return RequestOutput(
            state.request_id,
            state.prompt,
            state.prompt_token_ids,
            outputs,
            finished,
            prompt_logprobs,
            state.times,
            state.num_cached_tokens,
        )

    def _logprobs(self, position: list[TokenLogprob]) -> dict[int, Logprob]:
        text = self.tokenizer.token_text if self.tokenizer else lambda _: None
        return {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id)) for entry in position}


def could_become(text: str, stops: list[str]) -> int:
    """Length of the longest end of ``text`` that begins a stop string without completing it."""
    longest = max((min(len(stop) - 1, len(text)) for stop in stops), default=0)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(len(stop) > length and stop.startswith(tail) for stop in stops):
            return length
    return 0
