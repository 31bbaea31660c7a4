"""What one layer keeps in the KV cache for every token.

Layers of equal spec form a KV group, and each request owns one list of block ids per group. Chapter 0 has one spec and
so one group; window, latent, state and quantized specs are further classes with the same two answers.
"""

from __future__ import annotations

from dataclasses import dataclass

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class FullAttentionSpec:
    """K and V of every token, in full."""

    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def rows(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> (shape, dtype) of what one token stores."""
        shape = (self.num_kv_heads, self.head_dim)
        return {"k": (shape, self.dtype), "v": (shape, self.dtype)}

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * ITEMSIZE[self.dtype]
