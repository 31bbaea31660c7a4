"""The bytes of the KV cache: one arena, seen through one view per layer and named row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from minillm.memory.kv_manager import KVGeometry

_ALIGN = 256  # bytes; GPU kernels load rows with wide vectors


class KVLayer:
    """K and V of one layer: ``k``, ``v`` of shape [num_rows, Hkv, D]; row = slot."""

    def __init__(self, rows: dict[str, Tensor], kv_write: Callable[..., None] | None = None):
        self.rows, self.kv_write = rows, kv_write
        self.k, self.v = rows["k"], rows["v"]

    def write(self, slots: Tensor, **values: Tensor) -> None:
        """Store values [T, …] of each named row in rows ``slots`` int64 [T]."""
        if self.kv_write is not None and values.keys() == {"k", "v"}:
            self.kv_write(values["k"], values["v"], self.k, self.v, slots)
            return
        for name, value in values.items():
            self.rows[name].index_copy_(0, slots, value)


class KVCache:
    """Allocates the arena that a geometry asks for and cuts it into views.

    ``kv_write`` stores new k and v in one launch (kernels/kv_write.py); None: torch does, row name by row name.
    """

    def __init__(
        self, geometry: KVGeometry, device: str | torch.device = "cpu", kv_write: Callable[..., None] | None = None
    ):
        self.geometry = geometry
        num_rows = geometry.num_rows
        self._layers: dict[int, KVLayer] = {}
        plan, offset = [], 0
        for group in geometry.groups:
            for layer in group.layers:
                for name, (shape, dtype) in group.spec.rows.items():
                    dtype = getattr(torch, dtype)
                    size = num_rows * dtype.itemsize * torch.Size(shape).numel()
                    plan.append((layer, name, shape, dtype, offset, size))
                    offset += -(-size // _ALIGN) * _ALIGN
        self.arena = _zeros(offset, torch.device(device))
        views: dict[int, dict[str, Tensor]] = {}
        for layer, name, shape, dtype, start, size in plan:
            rows = self.arena[start : start + size].view(dtype).view(num_rows, *shape)
            views.setdefault(layer, {})[name] = rows
        self._layers = {layer: KVLayer(rows, kv_write) for layer, rows in views.items()}

    def layer(self, index: int) -> KVLayer:
        return self._layers[index]

    def copy_blocks(self, copies: list[tuple[int, int, int]]) -> None:
        """Copy whole blocks (KV group, from, to) in every layer of the group, before a pass."""
        for group, source, target in copies:
            for rows in self._group_rows(group):
                rows[self._span(target)] = rows[self._span(source)]

    def copy_rows(self, group: int, sources: Tensor, targets: Tensor) -> None:
        """Copy single rows (int64 slots) in every layer of a group; reads all before it writes any."""
        for rows in self._group_rows(group):
            rows[targets] = rows[sources]

    def read_blocks(self, group: int, blocks: list[int]) -> list[Tensor]:
        """Copies of these blocks' rows, one tensor [blocks · block_size, …] for each layer and row name in order."""
        index = self._rows_of(blocks)
        return [rows[index] for rows in self._group_rows(group)]

    def write_blocks(self, group: int, blocks: list[int], values: list[Tensor]) -> None:
        """The inverse of ``read_blocks``."""
        index = self._rows_of(blocks)
        for rows, value in zip(self._group_rows(group), values, strict=True):
            rows[index] = value.to(rows.device)

    def _group_rows(self, group: int):
        for layer in self.geometry.groups[group].layers:
            yield from self._layers[layer].rows.values()

    def _span(self, block: int) -> slice:
        first = self.geometry.first_row(block)
        return slice(first, first + self.geometry.block_size)

    def _rows_of(self, blocks: list[int]) -> Tensor:
        first = torch.tensor([self.geometry.first_row(block) for block in blocks], dtype=torch.int64)
        return (first[:, None] + torch.arange(self.geometry.block_size)).flatten().to(self.arena.device)


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Zeros, since attention may multiply a masked row by a weight of 0, and 0 · NaN is NaN."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    # NumPy asks the system for zeroed memory, whose pages are only taken when first written; torch writes it all.
    memory = np.zeros(num_bytes + _ALIGN, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGN
    return torch.from_numpy(memory[start : start + num_bytes])
