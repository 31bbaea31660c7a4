"""What a caller gets back: vLLM's RequestOutput and its parts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Logprob:
    """Log-probability of one token at one position, before any penalty, temperature or cut-off."""

    logprob: float
    rank: int  # 1 is the most likely token
    decoded_token: str | None


@dataclass
class CompletionOutput:
    """One sample of a prompt, as far as it has come."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # of the sampled tokens; None unless logprobs were asked for
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # "stop", "length" or "abort"; None while it runs
    stop_reason: int | str | None = None  # stop token or string, None for the model's end token; or why it failed
    delta: str = ""  # text added since the output before this one

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestTimes:
    """Seconds on time.monotonic's clock; None for what has not happened."""

    arrival: float
    first_token: float | None = None
    finished: float | None = None


@dataclass
class RequestOutput:
    """A prompt and its ``n`` samples; cumulative, so the last one of a request says everything."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    # The first entry is None, as nothing precedes it, and so are those before prompt_logprobs_start.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    times: RequestTimes | None = None
    num_cached_tokens: int | None = (
        None  # of the prompt, not computed since a prefix cache had them; None: not known yet
    )
