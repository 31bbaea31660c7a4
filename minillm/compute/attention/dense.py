"""Differentiable causal attention over whole sequences of equal length, without a cache: what training uses."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class DenseAttention:
    """Attention of ``batch`` sequences of ``length`` tokens, laid flat one after another."""

    def __init__(self, batch: int, length: int):
        self.batch, self.length = batch, length

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        if window is not None and window < self.length:
            raise NotImplementedError(f"training with a window of {window} under sequences of {self.length} tokens")
        # [B·L, H, D] -> [B, H, L, D]
        q, k, v = (x.view(self.batch, self.length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return o.transpose(1, 2).reshape(self.batch * self.length, o.shape[1], o.shape[3])
