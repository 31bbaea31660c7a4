"""Attention written down plainly in float64, to hold every backend against; and the bound on their errors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minillm.compute.attention.base import AttentionMetadata

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> tuple[Tensor, Tensor]:
    """q [N_q, Hq, D], k and v [N_k, Hkv, D] of any dtype -> o, logsumexp in float64. Query by query, head by head."""
    q, k, v = q.double(), k.double(), v.double()
    (n_q, heads, _), (n_k, kv_heads, _) = q.shape, k.shape
    o = torch.zeros(n_q, heads, v.shape[2], dtype=torch.float64)
    lse = torch.full((n_q, heads), -math.inf, dtype=torch.float64)
    for i in range(n_q):
        place = n_k - n_q + i  # the query's own row
        first = 0 if window is None else max(0, place - window + 1)
        for head in range(heads):
            if place < first:
                continue
            shared = head * kv_heads // heads
            keys, values = k[first : place + 1, shared], v[first : place + 1, shared]
            scores = [float(q[i, head] @ key) * scale for key in keys]
            most = max(scores)
            weights = [math.exp(score - most) for score in scores]
            total = sum(weights)
            for weight, value in zip(weights, values, strict=True):
                o[i, head] += weight / total * value
            lse[i, head] = most + math.log(total)
    return o, lse


def low_precision(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> tuple[Tensor, Tensor]:
    """What three torch calls in q's own dtype give: the measure of how much error is to be expected."""
    (n_q, heads, _), (n_k, kv_heads, _) = q.shape, k.shape
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1).transpose(0, 1) for x in (k, v))
    scores = (q.transpose(0, 1) @ k.transpose(1, 2)) * scale
    own = torch.arange(n_q)[:, None] + n_k - n_q
    seen = torch.arange(n_k) <= own
    if window is not None:
        seen &= torch.arange(n_k) > own - window
    scores = scores.masked_fill(~seen, -math.inf)
    o = scores.softmax(-1).nan_to_num(0.0) @ v
    return o.transpose(0, 1), scores.logsumexp(-1).transpose(0, 1)


def assert_as_good(got: Tensor, low: Tensor, want: Tensor) -> None:
    """``got`` is off by at most twice what the low-precision run is, plus 2 ulp (of its dtype) of the largest value."""
    ulp = torch.finfo(low.dtype).eps
    assert got.shape == want.shape
    nothing = want == -math.inf
    assert torch.equal(got.double() == -math.inf, nothing)
    got, low, want = (x.double().masked_fill(nothing, 0) for x in (got, low, want))
    assert got.isfinite().all()
    if not want.numel():
        return
    bound = 2 * (low - want).abs().max() + 2 * ulp * want.abs().max()
    assert (got - want).abs().max() <= bound


def metadata(query_lens: list[int], seq_lens: list[int], first_rows: list[int]) -> AttentionMetadata:
    """One step's metadata over contiguous KV: new tokens are the last rows of each sequence."""
    starts = [0]
    for new in query_lens:
        starts.append(starts[-1] + new)
    slots = [
        first + row
        for new, rows, first in zip(query_lens, seq_lens, first_rows, strict=True)
        for row in range(rows - new, rows)
    ]
    return AttentionMetadata(
        query_lens=query_lens,
        seq_lens=seq_lens,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        block_table=torch.arange(1, len(query_lens) + 1, dtype=torch.int32)[:, None],
        first_rows=first_rows,
    )


def draw(n_q: int, n_k: int, heads: int, kv_heads: int, d: int, dtype=torch.float64, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return randn(n_q, heads, d), randn(n_k, kv_heads, d), randn(n_k, kv_heads, d)
