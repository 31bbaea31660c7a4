"""Online softmax: attention over keys that come a few at a time, in any order and any split.

The state of one query row is (m, l, acc): the largest score so far, the sum of exp(score − m) and the same sum of
exp(score − m) · value. Older work is rescaled when a larger score comes, never lost (Milakov and Gimelshein 2018;
FlashAttention, Algorithm 1).
"""

from __future__ import annotations

import torch
from torch import Tensor


def empty_state(q: Tensor):
    """The state of rows that have seen no key, one for each row of q [rows, d]: (−∞, 0, 0)."""
    m = q.new_full(q.shape[:1], float("-inf"))
    return m, torch.zeros_like(m), torch.zeros_like(q)


def online_softmax_update(m: Tensor, l: Tensor, acc: Tensor, scores: Tensor, values: Tensor):  # noqa: E741
    """One more block of keys. m, l [rows], acc [rows, d]; scores [rows, keys], −∞ where masked; values [keys, d].

    FlashAttention, Algorithm 1, lines 10 to 12, with the division by l left to the end.
    """
    m_new = torch.maximum(m, scores.max(dim=-1).values)
    # A row that has seen no key has m = −∞, and −∞ − (−∞) is NaN: any finite number serves there, all terms are 0.
    base = torch.where(m_new == float("-inf"), 0.0, m_new)
    rescale = torch.exp(m - base)
    p = torch.exp(scores - base[:, None])
    l_new = l * rescale + p.sum(dim=-1)
    return m_new, l_new, acc * rescale[:, None] + p @ values


def merge_states(m_a: Tensor, l_a: Tensor, acc_a: Tensor, m_b: Tensor, l_b: Tensor, acc_b: Tensor):
    """The state over both sets of keys. Associative and commutative; (−∞, 0, 0) is neutral. Shapes as above."""
    m = torch.maximum(m_a, m_b)
    base = torch.where(m == float("-inf"), 0.0, m)
    scale_a, scale_b = torch.exp(m_a - base), torch.exp(m_b - base)
    return m, l_a * scale_a + l_b * scale_b, acc_a * scale_a[..., None] + acc_b * scale_b[..., None]


def finish_state(m: Tensor, l: Tensor, acc: Tensor):  # noqa: E741
    """(o, logsumexp) of a state: o = acc / l and m + ln l; of a row that has seen no key, 0 and −∞."""
    o = acc / torch.where(l == 0, 1.0, l)[..., None]
    return o, torch.where(l == 0, float("-inf"), m + torch.log(l))
