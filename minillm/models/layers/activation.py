"""SwiGLU's activation (Shazeer 2020)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor, cpp: bool = False) -> Tensor:
    """gate_up [T, 2 N], the gate first -> silu(gate) · up [T, N]. ``cpp``: in C++, where no gradient is wanted."""
    if cpp and not torch.is_grad_enabled():
        return torch.ops.minillm.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
