"""How a request is sampled: vLLM's names and defaults."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field


@dataclass
class SamplingParams:
    """Sampling of one request. Bad values raise ValueError with the value and what would be right.

    n                    samples per prompt; sample i differs from sample j under the same seed
    temperature          0 is greedy: the most likely token, the lowest id among equals
    top_p                keep the fewest most likely tokens whose probabilities sum to at least top_p; 1 keeps all
    top_k                keep exactly the k most likely tokens (equals by lowest id); 0 or -1 keeps all
    min_p                keep tokens at least min_p times as likely as the most likely
    max_tokens           output tokens at most; None runs to the end of the context
    min_tokens           no end token, stop token or stop string before this many output tokens
    seed                 makes every draw a function of the request alone; None takes one from the engine's own seed
    stop                 strings that end the output; their text is cut off unless include_stop_str_in_output
    stop_token_ids       tokens that end the output, beside the model's own end tokens
    ignore_eos           go on past the model's end tokens
    logprobs             log-probabilities of this many most likely tokens at each position, and of the sampled one
    prompt_logprobs      the same for every prompt token after the first
    presence_penalty     subtracted from the logit of every token that is in the output
    frequency_penalty    subtracted once for each time it is there
    repetition_penalty   divides positive logits and multiplies negative ones of tokens in prompt or output
    logit_bias           token id -> number added to its logit
    allowed_token_ids    sample from these tokens only
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        self.stop_token_ids = list(self.stop_token_ids or [])
        if self.logit_bias is not None:
            # JSON, here and in HTTP requests, turns integer keys into strings.
            self.logit_bias = {int(token): float(bias) for token, bias in self.logit_bias.items()}
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = list(self.allowed_token_ids)

        self._whole("n", 1)
        self._whole("top_k", -1)
        self._whole("max_tokens", 1, optional=True)
        self._whole("min_tokens", 0)
        self._whole("logprobs", 0, optional=True)
        self._whole("prompt_logprobs", 0, optional=True)
        self._whole("seed", 0, 2**64 - 1, optional=True)
        self._real("temperature", 0.0)
        self._real("top_p", 0.0, 1.0, low_open=True)
        self._real("min_p", 0.0, 1.0)
        self._real("presence_penalty", -2.0, 2.0)
        self._real("frequency_penalty", -2.0, 2.0)
        self._real("repetition_penalty", 0.0, low_open=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; it must not be above max_tokens ({self.max_tokens})")
        if self.greedy and self.n > 1:
            raise ValueError(f"n is {self.n} at temperature 0; greedy samples are all alike, so n must be 1")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ValueError(f"stop is {self.stop!r}; it must hold strings of at least one character")
        if self.allowed_token_ids == []:
            raise ValueError("allowed_token_ids is empty; it must hold at least one token id, or be None")
        for token, bias in (self.logit_bias or {}).items():
            if not math.isfinite(bias):
                raise ValueError(f"logit_bias of token {token} is {bias}; it must be a finite number")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def token_ids_named(self) -> dict[str, list[int]]:
        """Field -> the token ids it names, which only an engine can check against its vocabulary."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": list(self.logit_bias or {}),
            "allowed_token_ids": self.allowed_token_ids or [],
        }

    def to_dict(self) -> dict:
        return asdict(self)

    def _whole(self, name: str, low: int, high: int | None = None, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise ValueError(f"{name} is {value!r}; it must be a whole number, {bound}{' or None' if optional else ''}")

    def _real(self, name: str, low: float, high: float = math.inf, low_open: bool = False) -> None:
        value = getattr(self, name)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or value > high or value < low or (low_open and value == low):
            bound = f"above {low}" if low_open else f"at least {low}"
            bound += "" if high == math.inf else f" and at most {high}"
            raise ValueError(f"{name} is {value!r}; it must be a finite number, {bound}")
