"""Root-mean-square normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) · weight over the last dimension; the statistic in at least float32.

    With a ``residual`` it is that of x + residual, and the sum is returned beside it: y, x + residual.
    ``cpp``: in C++, where no gradient is wanted.
    """

    def __init__(self, size: int, eps: float, *, dtype, device, cpp: bool = False):
        super().__init__()
        self.eps, self.cpp = eps, cpp
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        cpp = self.cpp and not torch.is_grad_enabled()
        if residual is not None:
            if cpp:
                return torch.ops.minillm.add_rms_norm(x, residual, self.weight, self.eps)
            residual = x + residual
            return self(residual), residual
        if cpp:
            return torch.ops.minillm.rms_norm(x, self.weight, self.eps)
        # F.rms_norm raises float16 and bfloat16 to float32 inside and leaves float64 alone.
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
