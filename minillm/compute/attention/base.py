"""What a step tells attention, and what an attention backend must answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

import minillm.kernels  # noqa: F401  its Triton switch must be set before torch.compiler.disable imports Triton


class Attention(Protocol):
    """What a model's forward is given: all it may know about attention and the KV cache."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D], rotated -> [T, Hq, D]; ``window`` rows are visible, None for all."""
        ...


class LayerKV(Protocol):
    """One layer's share of the KV cache."""

    k: Tensor  # [num_rows, Hkv, D]; row = slot
    v: Tensor

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, Hkv, D] in rows ``slots`` int64 [T]."""
        ...


@dataclass
class AttentionMetadata:
    """One step's ragged batch, as one KV group sees it: R requests, T new tokens in all, flat in request order.

    Rows of the cache are counted here, never positions: after eviction the two differ, and only rotary embedding
    asks for positions. Lists are on the host, for planning; tensors are on the device.
    """

    query_lens: list[int]  # R: new tokens of each request
    seq_lens: list[int]  # R: cache rows each request attends to, its new ones included
    query_start_loc: Tensor  # int32 [R + 1]: request r's tokens are query_start_loc[r] : query_start_loc[r + 1]
    slot_mapping: Tensor  # int64 [T]: cache row of every new token
    block_table: Tensor  # int32 [R, most blocks of any]: block ids, padded with the null block 0
    first_rows: list[int]  # R: cache row where each request's first block begins
    block_size: int = 1 << 30  # rows of a block; in paged KV block b begins at row b · block_size
    tree_mask: Tensor | None = None  # bool [T, most query tokens]: which new tokens a new token sees (chapter 11)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)


class AttentionBackend(ABC):
    """Attention over cached K and V. One object a model runner; ``plan`` once a step, ``forward`` once a layer.

    An engine makes its own as f(config, device): so a class, or a factory, is what ``LLM(…, attention=…)`` takes.
    """

    def __init__(self, config=None, device=None):
        self.metadata: AttentionMetadata | None = None

    def plan(self, metadata: AttentionMetadata) -> None:
        """Take in the step's batch, after padding and before the first layer."""
        self.metadata = metadata

    @abstractmethod
    def forward(
        self, q: Tensor, kv: LayerKV, scale: float, window: int | None = None, return_lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Causal attention, aligned bottom right: a request's last query sees all its rows.

        q [T, Hq, D] -> o [T, Hq, D] in q's dtype and, if asked for, logsumexp [T, Hq] in max(float32, dtype), with
        which partial results over disjoint keys merge. A query that sees no row has o = 0, logsumexp = −∞.
        """

    def requests(self, kv: LayerKV) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Request by request: which of the step's tokens are its own, and its K and V [rows, Hkv, D]."""
        meta, end = self.metadata, 0
        for r, (new, rows, first) in enumerate(zip(meta.query_lens, meta.seq_lens, meta.first_rows, strict=True)):
            start, end = end, end + new
            if rows <= meta.block_size:
                where = slice(first, first + rows)
            else:  # the row of token t: block table, then offset within the block (PagedAttention, figure 5)
                t = torch.arange(rows, device=meta.block_table.device)
                where = meta.block_table[r, t // meta.block_size].long() * meta.block_size + t % meta.block_size
            yield slice(start, end), kv.k[where], kv.v[where]


class StepAttention:
    """The Attention of one engine step: writes the new rows of a layer's KV, then asks the backend."""

    def __init__(self, backend: AttentionBackend, kv_cache, metadata: AttentionMetadata):
        self.backend, self.kv_cache, self.metadata = backend, kv_cache, metadata
        backend.plan(metadata)

    # The one place where a compiled step may break its graph: everything round it has static structure.
    @torch.compiler.disable
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        kv = self.kv_cache.layer(layer)
        kv.write(self.metadata.slot_mapping, k=k, v=v)
        return self.backend.forward(q, kv, scale, window)[0]
