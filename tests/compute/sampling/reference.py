"""What the sampler should do, written again in plain float64 Python, and the statistics to compare with."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import torch

from minillm.compute.sampling.processors import SamplingRow
from minillm.core.sampling_params import SamplingParams


def row(params: SamplingParams | None = None, seed=0, sample=0, prompt=(), output=(), eos=(), **fields) -> SamplingRow:
    return SamplingRow(params or SamplingParams(**fields), list(prompt), list(output), seed, sample, tuple(eos))


def log(probabilities, dtype=torch.float32) -> torch.Tensor:
    """Logits whose softmax is this; a probability of 0 gives −inf."""
    with np.errstate(divide="ignore"):
        return torch.tensor(np.log(np.asarray(probabilities, dtype=np.float64)), dtype=dtype)


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def keep(chances: list[float], ids) -> list[float]:
    ids = set(ids)
    total = math.fsum(chances[i] for i in ids)
    return [c / total if i in ids else 0.0 for i, c in enumerate(chances)]


def expected_probabilities(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, then min-p, then top-k, then top-p, each on what the one before it left."""
    chances = softmax([x / params.temperature for x in logits])
    best = max(chances)
    chances = keep(chances, [i for i, c in enumerate(chances) if c >= params.min_p * best * (1 - 1e-6)])
    ranked = sorted((i for i, c in enumerate(chances) if c > 0), key=lambda i: (-logits[i], i))
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
        chances = keep(chances, ranked)
    if params.top_p < 1:
        count = 1
        while math.fsum(chances[i] for i in ranked[:count]) < params.top_p - 1e-6:
            count += 1
        chances = keep(chances, ranked[:count])
    return chances


def expected_logits(logits: list[float], row: SamplingRow) -> list[float]:
    """Masks, bias, repetition penalty, then the other two."""
    p, new = row.params, list(logits)
    for i in range(len(new)):
        if p.allowed_token_ids is not None and i not in p.allowed_token_ids:
            new[i] = -math.inf
        if len(row.output_token_ids) < p.min_tokens and i in [*row.eos_token_ids, *p.stop_token_ids]:
            new[i] = -math.inf
        new[i] += (p.logit_bias or {}).get(i, 0.0)
        if i in row.prompt_token_ids or i in row.output_token_ids:
            new[i] = new[i] / p.repetition_penalty if new[i] > 0 else new[i] * p.repetition_penalty
        count = row.output_token_ids.count(i)
        new[i] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    return new


def critical_value(freedom: int) -> float:
    """Of the chi-square distribution, at a chance of 1 in 10,000 (Wilson and Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


def assert_distributed(drawn: list[int], chances: list[float]) -> None:
    """Chi-square test that ``drawn`` came from ``chances``; and nothing impossible was drawn."""
    assert all(0 <= token < len(chances) for token in drawn), "outside the vocabulary"
    counts = Counter(drawn)
    impossible = [token for token in counts if chances[token] == 0]
    assert not impossible, f"tokens of probability zero were drawn: {impossible}"
    cells, rare, rare_expected = [], 0, 0.0
    for token, chance in enumerate(chances):
        expected = chance * len(drawn)
        if expected < 10:  # too few for the approximation: into one cell
            rare, rare_expected = rare + counts[token], rare_expected + expected
        else:
            cells.append((counts[token], expected))
    if rare_expected >= 10:
        cells.append((rare, rare_expected))
    else:
        assert rare <= 30
    if len(cells) < 2:
        return
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    limit = critical_value(len(cells) - 1)
    assert statistic < limit, f"chi-square {statistic:.1f}, at most {limit:.1f}: {sorted(counts.items())}"
