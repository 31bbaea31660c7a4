"""How a request is sampled: vLLM's names and defaults."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass, field, fields

# Beyond these, float32 logits would overflow to infinity and probabilities to NaN.
LARGEST_BIAS = 1e6
LARGEST_PENALTY = 1e6


@dataclass
class StructuredOutputsParams:
    """What an output must look like: exactly one of json, regex, choice, grammar and json_object.

    json         a JSON schema, as a dict or as text
    regex        a regular expression that the whole output matches (Rust's syntax: no look-around, no back references)
    choice       strings, one of which is the output
    grammar      a context-free grammar, in Lark's notation (begins with ``start:``) or llama.cpp's GBNF
    json_object  any JSON object
    disable_any_whitespace   JSON without any space between its parts. vLLM's default is False. Here it is True: where
                 spaces may stand, a model may write them for ever, and nothing there is forced
    """

    json: str | dict | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = True

    def __post_init__(self) -> None:
        if self.json_object not in (None, False, True):
            raise ValueError(f"json_object is {self.json_object!r}; it must be True or None")
        self.json_object = self.json_object or None
        if not isinstance(self.disable_any_whitespace, bool):
            raise ValueError(f"disable_any_whitespace is {self.disable_any_whitespace!r}; it must be True or False")
        kinds = ("json", "regex", "choice", "grammar", "json_object")
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs has {' and '.join(given) or 'nothing'}; give exactly one of {', '.join(kinds)}"
            )
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name} is {value!r}; it must be a string")
        self.choice = _as_list("choice", self.choice)
        if self.choice is not None and not (self.choice and all(isinstance(c, str) and c for c in self.choice)):
            raise ValueError(f"choice is {self.choice!r}; it must hold strings of at least one character")
        if self.json is not None:
            self._check_schema()

    def _check_schema(self) -> None:
        try:
            schema = json.loads(self.json) if isinstance(self.json, str) else json.loads(json.dumps(self.json))
        except (TypeError, ValueError) as error:
            raise ValueError(f"json is {self.json!r}, which is no JSON ({error}); it must be a JSON schema") from None
        if not isinstance(schema, dict):
            raise ValueError(f"json is {self.json!r}; a JSON schema is an object")

    def key(self) -> str:
        """Equal for equal grammars."""
        return json.dumps(vars(self))


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
    prompt_logprobs_start   only from this position of the prompt on, so that a prefix cache may serve what is before
                         (SGLang's logprob_start_len)
    presence_penalty     subtracted from the logit of every token that is in the output
    frequency_penalty    subtracted once for each time it is there
    repetition_penalty   divides positive logits and multiplies negative ones of tokens in prompt or output
    logit_bias           token id -> number added to its logit
    allowed_token_ids    sample from these tokens only
    structured_outputs   a grammar that the output obeys, StructuredOutputsParams or a dict of its fields; the output
                         ends where the grammar does, or earlier at max_tokens or a stop string. Not with ignore_eos,
                         min_tokens or allowed_token_ids
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
    prompt_logprobs_start: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self.stop = _as_list("stop", [self.stop] if isinstance(self.stop, str) else self.stop) or []
        self.stop_token_ids = _as_list("stop_token_ids", self.stop_token_ids) or []
        self.allowed_token_ids = _as_list("allowed_token_ids", self.allowed_token_ids)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise ValueError(f"logit_bias is {self.logit_bias!r}; it must be a dict of token id -> number")
            self.logit_bias = dict(_bias_entry(token, bias) for token, bias in self.logit_bias.items())

        self._whole("n", 1)
        self._whole("top_k", -1)
        self._whole("max_tokens", 1, optional=True)
        self._whole("min_tokens", 0)
        self._whole("logprobs", 0, optional=True)
        self._whole("prompt_logprobs", 0, optional=True)
        self._whole("prompt_logprobs_start", 0)
        self._whole("seed", 0, 2**64 - 1, optional=True)
        self._real("temperature", 0.0)
        self._real("top_p", 0.0, 1.0, low_open=True)
        self._real("min_p", 0.0, 1.0)
        self._real("presence_penalty", -2.0, 2.0)
        self._real("frequency_penalty", -2.0, 2.0)
        self._real("repetition_penalty", 1 / LARGEST_PENALTY, LARGEST_PENALTY)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; it must not be above max_tokens ({self.max_tokens})")
        if self.greedy and self.n > 1:
            raise ValueError(f"n is {self.n} at temperature 0; greedy samples are all alike, so n must be 1")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ValueError(f"stop is {self.stop!r}; it must hold strings of at least one character")
        if self.allowed_token_ids == []:
            raise ValueError("allowed_token_ids is empty; it must hold at least one token id, or be None")
        for name, tokens in self.token_ids_named().items():
            for token in tokens:
                if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                    raise ValueError(f"{name} holds {token!r}; token ids are whole numbers, at least 0")
        self.structured_outputs = _structured(self.structured_outputs)
        if self.min_tokens and self.allowed_token_ids and {*self.allowed_token_ids} <= {*self.stop_token_ids}:
            raise ValueError(
                f"allowed_token_ids is {self.allowed_token_ids}, all of them stop tokens, which min_tokens "
                f"({self.min_tokens}) forbids at first; one must be none"
            )

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
        fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        if not fits or value > high or value < low or (low_open and value == low):
            bound = f"above {low}" if low_open else f"at least {low}"
            bound += "" if high == math.inf else f" and at most {high}"
            raise ValueError(f"{name} is {value!r}; it must be a finite number, {bound}")


def _structured(value) -> StructuredOutputsParams | None:
    if isinstance(value, dict):  # from JSON
        try:
            return StructuredOutputsParams(**value)
        except TypeError:
            known = ", ".join(f.name for f in fields(StructuredOutputsParams))
            raise ValueError(f"structured_outputs is {value!r}; its fields are {known}") from None
    if value is not None and not isinstance(value, StructuredOutputsParams):
        raise ValueError(f"structured_outputs is {value!r}; it must be StructuredOutputsParams or None")
    return value


def _as_list(name: str, value) -> list | None:
    if value is not None and not isinstance(value, list | tuple | set | frozenset | range):
        raise ValueError(f"{name} is {value!r}; it must be a list")
    return None if value is None else list(value)


def _bias_entry(token, bias) -> tuple[int, float]:
    # JSON, here and in HTTP requests, turns integer keys into strings.
    if isinstance(token, str) and token.isascii() and token.isdigit():
        token = int(token)
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= LARGEST_BIAS:
        raise ValueError(f"logit_bias of token {token!r} is {bias!r}; it must be a number within ±{LARGEST_BIAS:g}")
    return token, float(bias)
