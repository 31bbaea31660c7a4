"""What sampling parameters do to logits, in vLLM's order.

``process_logits`` may change which token is most likely, so greedy requests pass through it too; ``probabilities``
never does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.core.sampling_params import SamplingParams

# Logits are only float32-exact: a sum this close to top_p has reached it, and so has a ratio to min_p.
ROUNDING = 1e-6


@dataclass
class SamplingRow:
    """One row of logits: whose it is and what came before."""

    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    seed: int
    sample_index: int
    eos_token_ids: tuple[int, ...] = ()
    allowed: Tensor | None = None  # bool [V], what a grammar allows here; set anew for each position

    @property
    def changes_logits(self) -> bool:
        p = self.params
        return bool(
            self.allowed is not None
            or p.allowed_token_ids is not None
            or p.logit_bias
            or len(self.output_token_ids) < p.min_tokens
            or p.presence_penalty
            or p.frequency_penalty
            or p.repetition_penalty != 1
        )


def process_logits(logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Masks, bias and penalties, row by row, in place. logits [R, V], at least float32."""
    for logit, row in zip(logits, rows, strict=True):
        if row.changes_logits:
            _process_row(logit, row)
    return logits


def _process_row(logits: Tensor, row: SamplingRow) -> None:
    params, device = row.params, logits.device

    def ids(tokens) -> Tensor:
        return torch.tensor(list(tokens), dtype=torch.int64, device=device)

    if row.allowed is not None:
        logits.masked_fill_(~row.allowed, float("-inf"))
    if params.allowed_token_ids is not None:
        allowed = ids(params.allowed_token_ids)
        kept = logits[allowed]
        logits.fill_(float("-inf"))
        logits[allowed] = kept
    if len(row.output_token_ids) < params.min_tokens:
        # Stop tokens too: min_tokens promises a length whatever would end it.
        logits[ids({*row.eos_token_ids, *params.stop_token_ids})] = float("-inf")
    if params.logit_bias:
        logits[ids(params.logit_bias)] += torch.tensor(
            list(params.logit_bias.values()), dtype=logits.dtype, device=device
        )
    if params.repetition_penalty != 1:
        seen = ids({*row.prompt_token_ids, *row.output_token_ids})
        old = logits[seen]
        logits[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.output_token_ids:
        tokens, counts = torch.unique(ids(row.output_token_ids), return_counts=True)
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts.to(logits.dtype)


def probabilities(logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Temperature, min-p, top-k, top-p, softmax: logits [R, V], processed, none greedy -> probabilities [R, V].

    top-k keeps exactly k and top-p the fewest tokens that reach top_p; among equal logits the lower ids stay.
    """

    def column(values, dtype=logits.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=logits.device)[:, None]

    params = [row.params for row in rows]
    # The most likely token moves to 0 first, so that a tiny temperature overflows to -inf and never to NaN.
    tiny = torch.finfo(logits.dtype).tiny
    logits = (logits - logits.max(-1, keepdim=True).values) / column(max(p.temperature, tiny) for p in params)
    if any(p.min_p for p in params):
        floor = column(p.min_p for p in params).log() - ROUNDING
        logits = logits.masked_fill(logits < floor, float("-inf"))
    vocab = logits.shape[-1]
    if any(0 < p.top_k < vocab or p.top_p < 1 for p in params):
        # Stable, so that of equal logits the lower id comes first.
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        k = column(p.top_k if p.top_k > 0 else vocab for p in params)
        ordered = ordered.masked_fill(torch.arange(vocab, device=logits.device) >= k, float("-inf"))
        # float64, or the running sum over a large vocabulary drifts. A row with top_p 1 keeps its whole tail.
        running = ordered.to(torch.float64).softmax(-1).cumsum(-1)
        limit = column((p.top_p - ROUNDING if p.top_p < 1 else math.inf for p in params), torch.float64)
        enough = running[:, :-1] >= limit  # without this token, so the most likely one always stays
        ordered[:, 1:].masked_fill_(enough, float("-inf"))
        logits = torch.full_like(logits, float("-inf")).scatter(-1, order, ordered)
    return logits.softmax(-1)
