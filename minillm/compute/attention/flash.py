"""FlashAttention to read: one head, one sequence, both loop orders, through a memory that counts its traffic.

The engine's tiles are in kernels/flash_attention.py; these are what chapter 01 derives and what its numbers come from.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from minillm.compute.attention.online import empty_state, finish_state, online_softmax_update


class HBM:
    """Device memory as a meter: whatever a routine loads or stores through it is counted, in bytes.

    Matrices and row statistics (m, l, logsumexp: one number a row) are counted apart, as the papers' formulas do.
    """

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()

    def load(self, x: Tensor) -> Tensor:
        """A copy on the chip of what lies at ``x``."""
        self._count(x)
        return x.clone()

    def store(self, place: Tensor, x: Tensor) -> None:
        """Write ``x`` to its place in memory."""
        self._count(place)
        place.copy_(x)

    def units(self, q: Tensor) -> float:
        """Traffic of matrices in readings of q: in multiples of N·d, if q is [N, d]."""
        return self.bytes["matrices"] / q.nbytes

    def _count(self, x: Tensor) -> None:
        self.bytes["statistics" if x.ndim == 1 else "matrices"] += x.numel() * x.element_size()


def naive_attention(q: Tensor, k: Tensor, v: Tensor, hbm: HBM) -> Tensor:
    """softmax(Q Kᵀ / √d) V with scores and probabilities in memory: 4Nd + 4N² elements. q, k, v [N, d]."""
    scores = q.new_empty(len(q), len(k))
    weights, o = torch.empty_like(scores), torch.empty_like(q)
    hbm.store(scores, hbm.load(q) @ hbm.load(k).T * q.shape[-1] ** -0.5)
    hbm.store(weights, hbm.load(scores).softmax(dim=-1))
    hbm.store(o, hbm.load(weights) @ hbm.load(v))
    return o


def flash_rows(q: Tensor, k: Tensor, v: Tensor, limits: Tensor, block: int, hbm: HBM) -> tuple[Tensor, Tensor]:
    """What one program of the kernel does: a tile of queries [rows, d], all keys, ``block`` at a time.

    Row i sees keys up to limits[i]. Returns o [rows, d] and logsumexp [rows] (FlashAttention-2, Algorithm 1).
    """
    q = hbm.load(q)
    m, l, acc = empty_state(q)  # noqa: E741
    end = min(len(k), int(limits[-1]) + 1)  # tiles that nobody sees are not loaded
    for start in range(0, end, block):
        tile_k = hbm.load(k[start : start + block])
        tile_v = hbm.load(v[start : start + block])
        scores = q @ tile_k.T * q.shape[-1] ** -0.5
        keys = torch.arange(start, start + len(tile_k))
        scores = scores.masked_fill(keys > limits[:, None], float("-inf"))
        m, l, acc = online_softmax_update(m, l, acc, scores, tile_v)  # noqa: E741
    return finish_state(m, l, acc)


def flash_attention_q_outer(
    q: Tensor, k: Tensor, v: Tensor, hbm: HBM, block_q: int, block_k: int, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Queries outside, keys inside (FlashAttention-2, the kernel's order): (2 + 2⌈N/block_q⌉) N d elements.

    q [N_q, d], k and v [N_k, d]; causal is aligned bottom right and reads, with square tiles, (⌈N/B⌉ + 3) N d.
    """
    o, lse = torch.empty_like(q), q.new_empty(len(q))
    for start in range(0, len(q), block_q):
        rows = slice(start, min(start + block_q, len(q)))
        limits = torch.arange(rows.start, rows.stop) + len(k) - len(q)
        if not causal:
            limits = torch.full_like(limits, len(k) - 1)
        out = flash_rows(q[rows], k, v, limits, block_k, hbm)
        hbm.store(o[rows], out[0])
        hbm.store(lse[rows], out[1])
    return o, lse


def flash_attention_kv_outer(q: Tensor, k: Tensor, v: Tensor, hbm: HBM, block_q: int, block_k: int) -> Tensor:
    """Keys outside, queries inside (FlashAttention, Algorithm 1): (3⌈N/block_k⌉ + 2) N d elements.

    Each K and V tile is read once; Q is read, O read and written again for every one of them, and so are m and l.
    """
    o = torch.zeros_like(q)
    m, l = q.new_full((len(q),), float("-inf")), q.new_zeros(len(q))  # line 2  # noqa: E741
    for column in range(0, len(k), block_k):  # line 5
        tile_k, tile_v = hbm.load(k[column : column + block_k]), hbm.load(v[column : column + block_k])  # line 6
        for row in range(0, len(q), block_q):  # line 7
            rows = slice(row, row + block_q)
            tile_q, tile_o = hbm.load(q[rows]), hbm.load(o[rows])  # line 8
            m_old, l_old = hbm.load(m[rows]), hbm.load(l[rows])
            scores = tile_q @ tile_k.T * q.shape[-1] ** -0.5  # line 9
            m_new, l_new, acc = online_softmax_update(m_old, l_old, tile_o * l_old[:, None], scores, tile_v)  # 10, 11
            hbm.store(o[rows], acc / l_new[:, None])  # line 12
            hbm.store(m[rows], m_new)  # line 13
            hbm.store(l[rows], l_new)
    return o
