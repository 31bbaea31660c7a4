"""One token for every row of logits."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from minillm.compute.sampling.draws import SAMPLE, uniform
from minillm.compute.sampling.processors import SamplingRow, probabilities, process_logits
from minillm.core.batch import TokenLogprob


@dataclass
class SamplerOutput:
    """Per row: the token, and what its request asked of log-probabilities (None if nothing)."""

    token_ids: list[int]
    logprobs: list[list[TokenLogprob] | None] = field(default_factory=list)


class Sampler:
    """Greedy or random, each row by its own parameters; a row's token never depends on the rows beside it."""

    def __call__(self, logits: Tensor, rows: list[SamplingRow]) -> SamplerOutput:
        """logits [R, V] of any dtype."""
        plain = all(row.params.greedy and row.params.logprobs is None and not row.changes_logits for row in rows)
        if plain:
            # max, not argmax: several times faster on bfloat16 on a CPU, and the first of equals as well.
            tokens = logits.max(-1).indices.tolist()
            return SamplerOutput(tokens, [None] * len(rows))
        raw = logits.to(torch.promote_types(logits.dtype, torch.float32))
        processed = process_logits(raw.clone(), rows)
        tokens = processed.max(-1).indices.tolist()
        random = [i for i, row in enumerate(rows) if not row.params.greedy]
        if random:
            chosen = [rows[i] for i in random]
            chances = probabilities(processed[random], chosen)
            draws = [uniform(row.seed, row.sample_index, len(row.output_token_ids), SAMPLE) for row in chosen]
            for i, token in zip(random, draw(chances, draws), strict=True):
                tokens[i] = token
        wanted = [row.params.logprobs for row in rows]
        return SamplerOutput(tokens, top_logprobs(raw, tokens, wanted))


def draw(chances: Tensor, draws: list[float]) -> list[int]:
    """Inverse-transform sampling: per row of probabilities [R, V], the first token whose running sum exceeds u.

    The sum is taken in float64 and u is scaled to its end, so a token of probability 0 is never drawn.
    """
    running = chances.to(torch.float64).cumsum(-1)
    total = running[:, -1:]
    if not total.isfinite().all():
        raise ValueError("a row of logits is not numbers, or leaves no token to draw")
    u = torch.tensor(draws, dtype=torch.float64, device=chances.device)[:, None] * total
    u = torch.minimum(u, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(running, u, right=True)[:, 0].tolist()


def top_logprobs(logits: Tensor, tokens: list[int], wanted: list[int | None]) -> list[list[TokenLogprob] | None]:
    """For each row that asks (``wanted`` k, not None): the given token first, then the k most likely."""
    asking = [i for i, k in enumerate(wanted) if k is not None]
    result: list[list[TokenLogprob] | None] = [None] * len(wanted)
    if not asking:
        return result
    logits = logits[asking]
    logprobs = logits.log_softmax(-1)
    chosen = torch.tensor([tokens[i] for i in asking], device=logits.device)[:, None]
    own = logits.gather(-1, chosen)
    # Rank as the sampler orders, by logits (log-probabilities may round to equals): more likely tokens, and equal ones
    # of lower id, come before.
    ids = torch.arange(logits.shape[-1], device=logits.device)
    ranks = ((logits > own) | ((logits == own) & (ids < chosen))).sum(-1) + 1
    k = min(max(wanted[i] for i in asking), logits.shape[-1])
    indices = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    values, indices = logprobs.gather(-1, indices).tolist(), indices.tolist()
    for row, i in enumerate(asking):
        first = TokenLogprob(tokens[i], logprobs[row, tokens[i]].item(), ranks[row].item())
        best = zip(indices[row][: wanted[i]], values[row][: wanted[i]], strict=True)
        result[i] = [first, *(TokenLogprob(t, p, rank + 1) for rank, (t, p) in enumerate(best))]
    return result
