"""The engine's FlashAttention over contiguous KV: the Triton kernel on a GPU, its torch twin elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.compute.attention.base import AttentionBackend, AttentionMetadata, LayerKV
from minillm.kernels.flash_attention import flash_attention, flash_attention_torch


class FlashAttention(AttentionBackend):
    """Tiles with the online softmax; no score matrix. ``use_triton``: the kernel instead of its twin."""

    def __init__(self, use_triton: bool = False):
        self.kernel = flash_attention if use_triton else flash_attention_torch

    def plan(self, metadata: AttentionMetadata) -> None:
        super().plan(metadata)
        device = metadata.query_start_loc.device
        self.first_rows = torch.tensor(metadata.first_rows, dtype=torch.int32, device=device)
        self.seq_lens = torch.tensor(metadata.seq_lens, dtype=torch.int32, device=device)

    def forward(
        self, q: Tensor, kv: LayerKV, scale: float, window: int | None = None, return_lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        meta = self.metadata
        o, lse = self.kernel(
            q,
            kv.k,
            kv.v,
            meta.query_start_loc,
            self.first_rows,
            self.seq_lens,
            max(meta.query_lens),
            scale,
            window=window,
        )
        return o, lse if return_lse else None
