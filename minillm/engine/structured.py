"""Constrained decoding: outputs that obey a JSON schema, a regular expression, a list of choices or a grammar.

SGLang, section 4, on the library llguidance, which vLLM and SGLang offer too. Its work: an Earley parser over a lexer
of derivatives, which says after any tokens which ones may come next. Ours: where that state lives, and what it saves.

**The state** of a request belongs to the runner's row and is a function of its grammar and of its output tokens. So
nothing of it is in a batch, and a runner that meets a request late, or meets it again, builds it anew. It follows the
tokens that the scheduler accepted; what was taken further than those is rolled back.

**Jump-forward.** Where the grammar leaves one token only, there is nothing to sample: the token is appended as if a
prompt had it, and one later pass computes all of them. Which token is the only one? ``{"name":`` may be written in
many tokens, down to one for each byte. SGLang retokenizes the text so far with the forced text behind it, which may
change tokens that were already computed, and throws their KV away. Here forced text has one spelling, the tokenizer's
own, and the mask allows no other; the last characters are left open while what comes after them could join them in
one token. So no computed token ever changes, tokens and log-probabilities are equal with and without jump-forward, and
the model reads text as it was trained to. What that loses: a spelling the model might have preferred, and the
tokens at an open end are sampled, one pass each, though their text is known.

A forced token has no log-probability, since no pass computed it; a request that asks for ``logprobs`` is served
without jump-forward. A tokenizer for which no spelling is canonical forces nothing and is only masked.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from torch import Tensor

from minillm.core.sampling_params import SamplingParams, StructuredOutputsParams
from minillm.models.tokenizer import Tokenizer

COMPILED = 64  # grammars kept compiled; to compile one takes milliseconds


class GrammarError(RuntimeError):
    """A grammar that cannot go on: it has become too large, or was given tokens that it does not allow."""


class Grammars:
    """The grammars of one tokenizer, each compiled once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        if not eos_token_ids:
            raise ValueError("structured_outputs end with the model's end token, and this model has none")
        self.vocab_size, self.eos_token_ids = vocab_size, tuple(eos_token_ids)
        self._tokenizer = LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._compiled = functools.lru_cache(maxsize=COMPILED)(self._compile)

    def start(self, params: SamplingParams) -> GrammarState:
        """The state before the first output token. ValueError for a grammar that is none, or that no text obeys."""
        matcher = self._compiled(params.structured_outputs.key())
        return GrammarState(self, matcher.deep_copy(), (*self.eos_token_ids, *params.stop_token_ids))

    def _compile(self, key: str) -> LLMatcher:
        params = StructuredOutputsParams(**json.loads(key))
        kind, grammar = _grammar(params)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"{kind} {getattr(params, kind)!r} cannot be used: {_first(matcher.get_error())}")
        matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(f"{kind} {getattr(params, kind)!r} cannot be used: no text obeys it")
        return matcher


class GrammarState:
    """How far the output of one request has come in its grammar."""

    def __init__(self, grammars: Grammars, matcher: LLMatcher, end_token_ids: Sequence[int]):
        self._grammars, self._matcher = grammars, matcher
        self._ends = sorted(set(end_token_ids))
        self._tokens: list[int] = []  # that the matcher has taken

    def follow(self, output_token_ids: list[int]) -> None:
        """Be where these tokens lead, all the output so far."""
        ahead = len(self._tokens)
        if self._tokens != output_token_ids[:ahead]:
            pairs = zip(self._tokens, output_token_ids, strict=False)
            kept = next((i for i, (a, b) in enumerate(pairs) if a != b), min(ahead, len(output_token_ids)))
            self._matcher.rollback(ahead - kept)
            del self._tokens[kept:]
        self._take(output_token_ids[len(self._tokens) :])

    def allowed(self) -> Tensor:
        """bool [V]: what may come next; where the output may end, the end tokens and the request's stop tokens too."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask = np.unpackbits(bits, count=self._grammars.vocab_size, bitorder="little").view(bool)
        if mask[self._grammars.eos_token_ids[0]]:
            mask[self._ends] = True
        return torch.from_numpy(mask)

    def forced(self, most: int) -> list[int]:
        """What must come next, ``most`` tokens of it at most, up to a stop token or the end token if that must come."""
        tokens: list[int] = []
        # One by one: each is then the only token of the mask at its place, whatever the library looks ahead.
        while len(tokens) < most and (ahead := self._matcher.compute_ff_tokens()):
            tokens.append(ahead[0])
            if ahead[0] in self._ends:
                return tokens
            self._take(ahead[:1])
        if len(tokens) < most and len(self._ends) == 1 and self._matcher.is_stopped():
            tokens.append(self._ends[0])
        return tokens

    def _take(self, tokens: list[int]) -> None:
        if tokens:
            self._matcher.consume_tokens(tokens)
            self._check()
            self._tokens += tokens

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot go on: {_first(self._matcher.get_error())}")


def _grammar(params: StructuredOutputsParams) -> tuple[str, str]:
    """The field that is given, and its grammar in the library's form."""
    options = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.json is not None:
        return "json", LLMatcher.grammar_from_json_schema(params.json, overrides=options)
    if params.json_object is not None:
        return "json_object", LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=options)
    if params.regex is not None:
        return "regex", LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in params.choice)
        return "choice", LLMatcher.grammar_from_lark(f"start: {choices}")
    try:
        return "grammar", LLMatcher.grammar_from_lark(any_to_lark(params.grammar))
    except Exception as error:  # the converter's own, of many kinds
        raise ValueError(f"grammar {params.grammar!r} cannot be used: {_first(str(error))}") from None


def _first(message: str) -> str:
    """What a message of the library says, in one line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["the library does not say why"]
    return next((line for line in lines if line.startswith("error:")), lines[0]).removeprefix("error: ")
