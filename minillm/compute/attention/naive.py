"""Attention as the formula says it: the whole score matrix, then softmax, then the product. Chapter 0's backend."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.compute.attention.base import AttentionBackend, LayerKV


class NaiveAttention(AttentionBackend):
    """softmax(Q Kᵀ · scale) V for one request after another, over KV that lies contiguous in the cache."""

    def forward(
        self, q: Tensor, kv: LayerKV, scale: float, window: int | None = None, return_lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        o = torch.empty_like(q)
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = q.new_empty(q.shape[:2], dtype=wide) if return_lse else None
        q = q.to(wide)  # once for all requests; ``o`` takes the results back to its own dtype
        for tokens, k, v in self.requests(kv):
            part = attend_one(q[tokens], k, v, scale, window, return_lse)
            o[tokens] = part[0]
            if lse is not None:
                lse[tokens] = part[1]
        return o, lse


def attend_one(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, return_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """One sequence: q [N_q, Hq, D] against k and v [N_k, Hkv, D] -> o [N_q, Hq, D], logsumexp [N_q, Hq].

    Causal, aligned bottom right: query i sees keys j with j − i ≤ N_k − N_q and, under a window, the last ``window``
    of those. Query heads of one group share a K head, so the group's queries are rows of one matrix product.
    """
    n_q, heads, d = q.shape
    n_k, kv_heads, _ = k.shape
    group = heads // kv_heads
    if n_q == 1 and window is not None and window < n_k:
        k, v, n_k = k[-window:], v[-window:], window  # one query: the window is a slice, no mask
    # All of it in at least float32; on a CPU that is also twice as fast as small products in bfloat16.
    wide = torch.promote_types(q.dtype, torch.float32)
    # [N_q, Hkv · G, D] -> [Hkv, G · N_q, D]
    rows = (q.to(wide) * scale).view(n_q, kv_heads, group, d).permute(1, 2, 0, 3).reshape(kv_heads, group * n_q, d)
    scores = torch.bmm(rows, k.to(wide).permute(1, 2, 0))
    if n_q > 1:
        blind = ~visible(n_q, n_k, window, q.device)
        scores = scores.view(kv_heads, group, n_q, n_k).masked_fill_(blind, float("-inf")).view_as(scores)
    weights = scores.softmax(dim=-1)
    if n_k < n_q:  # queries that see no key: softmax of nothing is NaN, attention to nothing is 0
        weights = weights.nan_to_num(0.0)
    o = torch.bmm(weights, v.to(wide).transpose(0, 1))
    o = o.view(kv_heads, group, n_q, d).permute(2, 0, 1, 3).reshape(n_q, heads, d).to(q.dtype)
    if not return_lse:
        return o, None
    return o, scores.logsumexp(dim=-1).view(heads, n_q).T


def visible(n_q: int, n_k: int, window: int | None, device: torch.device) -> Tensor:
    """bool [N_q, N_k]: which keys each query may see."""
    ahead = torch.arange(n_k, device=device) - torch.arange(n_q, device=device)[:, None] - (n_k - n_q)
    return ahead <= 0 if window is None else (ahead <= 0) & (ahead > -window)
