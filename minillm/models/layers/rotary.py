"""Rotary position embedding (Su et al. 2021) and the scalings that stretch it past its trained context."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from minillm.core.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Angles per position: inv_freq float32 [head_dim / 2], and the factor on cos and sin (1 but for YaRN).

    default  θᵢ = theta^(−2i/d).
    linear   all angles divided by ``factor`` (position interpolation, Chen et al. 2023).
    llama3   long wavelengths divided by ``factor``, short ones kept, a linear blend between the two.
    yarn     the blend runs over dimensions between ``beta_fast`` and ``beta_slow`` rotations, and attention is
             sharpened by 0.1·ln(factor) + 1 (Peng et al. 2023, section 3).
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / rope.theta**exponent
    if rope.type == "default":
        return inv_freq, 1.0
    if rope.type == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.type == "llama3":
        rotations = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
        keep = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0, 1)
        return keep * inv_freq + (1 - keep) * inv_freq / rope.factor, 1.0

    def dimension(rotations: float) -> float:  # which dimension turns this often within the original context
        ratio = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    scaled = ramp * inv_freq / rope.factor + (1 - ramp) * inv_freq

    def sharpen(scale: float, mscale: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    factor = rope.attention_factor
    if factor is None:
        if rope.mscale and rope.mscale_all_dim:
            factor = sharpen(rope.factor, rope.mscale) / sharpen(rope.factor, rope.mscale_all_dim)
        else:
            factor = sharpen(rope.factor)
    return scaled, factor


class RotaryEmbedding(nn.Module):
    """Rotates pairs (i, i + d/2) of a head by position · inv_freq[i], Llama's half-split layout."""

    def __init__(self, rope: RopeConfig, head_dim: int, *, device):
        super().__init__()
        inv_freq, self.factor = inverse_frequencies(rope, head_dim)
        self.register_buffer("inv_freq", inv_freq.to(device), persistent=False)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions int64 [T] -> cos, sin of shape [T, 1, head_dim] in max(float32, dtype), for every layer alike.

        sin's first half is negated, which folds the minus sign of the rotation into the table.
        """
        angles = positions.to(torch.float32)[:, None] * self.inv_freq
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        dtype = torch.promote_types(dtype, torch.float32)
        return cos[:, None].to(dtype), sin[:, None].to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, cpp: bool = False) -> Tensor:
    """x [T, heads, d] rotated by the tables of its positions; computed in the tables' dtype, returned in x's.

    ``cpp``: in C++, where no gradient is wanted.
    """
    if cpp and not torch.is_grad_enabled():
        return torch.ops.minillm.rotary(x, cos, sin)
    wide = x.to(cos.dtype)
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)
