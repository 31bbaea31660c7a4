"""The engine's PagedAttention: the Triton kernel on a GPU; elsewhere gather the blocks, then torch's attention.

Off a GPU the cost of paging is a copy. It is made a few requests at a time, so that what is gathered is read again
while a processor still has it in its cache. So a step falls into *groups*, rectangles of requests with equally many
queries and nearly equally many keys; a prompt falls into stretches of queries, each as good as a request of its own.

In bfloat16 on a CPU an operator in C++ serves decodes and short prompts: it reads K and V where they lie. Where there
are many scores the copy is worth its while, since matrix units are fed from it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.compute.attention.base import AttentionBackend, AttentionMetadata, LayerKV
from minillm.kernels import use_triton
from minillm.kernels.cpp import takes_head_dim, use_cpp
from minillm.kernels.paged_attention import paged_attention, paged_attention_torch

GROUP_BYTES = 8 << 20  # K and V that a group gathers: well inside a last-level cache, and few calls a layer
GROUP_PADDING = 256  # keys that a group may compute in vain: about what the calls of one more group cost
FEW_QUERIES = 8  # of a request that the C++ operator serves, whatever the context
FEW_SCORES = 8192  # queries · keys of a request that it serves as well; beyond, matrix units are worth a copy
STRETCH = 256  # queries of a stretch, which reads only the keys up to its own end


@dataclass(frozen=True)
class Stretch:
    """Consecutive queries of one request, all of which see a key."""

    request: int
    first: int  # the first one's row in q
    n: int
    keys: int  # that the last of them may see


@dataclass
class Group:
    """B stretches of n queries each; their keys are gathered, and padded to the most that any has, S."""

    tokens: Tensor | slice  # the queries' rows in q, [B · n]
    blocks: Tensor  # whose rows to gather
    padding: Tensor  # gathered rows that are nobody's keys
    k_room: Tensor  # [blocks, numbers of a block]: where they are gathered
    v_room: Tensor
    k: Tensor  # [B, Hkv, S, D]: the same memory, as attention reads it
    v: Tensor
    mask: Tensor | None  # [B or 1, 1, n, S], to be added to the scores; None: every query sees all


class PagedAttention(AttentionBackend):
    """Attention over KV in blocks, of which the null block is a whole one too."""

    def __init__(self, config=None, device: torch.device | str = "cpu"):
        super().__init__(config, device)
        self.use_triton = config is not None and use_triton(config.kernel_backend, torch.device(device))
        self.use_cpp = config is not None and use_cpp(config.kernel_backend, config.dtype, device)
        self.workspace: dict[str, Tensor] = {}  # one for all layers: fresh memory would cost more than the copy

    def plan(self, metadata: AttentionMetadata) -> None:
        super().plan(metadata)
        device = metadata.query_start_loc.device
        self.seq_lens = torch.tensor(metadata.seq_lens, dtype=torch.int32, device=device)
        few = []
        if self.use_cpp:
            lengths = enumerate(zip(metadata.query_lens, metadata.seq_lens, strict=True))
            few = [r for r, (new, rows) in lengths if new <= FEW_QUERIES or new * rows <= FEW_SCORES]
        self.few = torch.tensor(few, dtype=torch.int32, device=device)  # the requests that C++ serves
        self.groups: dict[tuple, list[Group]] = {}  # made when the first layer asks, whose window and sizes they suit

    def forward(
        self, q: Tensor, kv: LayerKV, scale: float, window: int | None = None, return_lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        meta = self.metadata
        if self.use_triton or return_lse:
            kernel = paged_attention if self.use_triton else paged_attention_torch
            where = meta.query_start_loc, self.seq_lens, meta.block_table, meta.block_size, max(meta.query_lens)
            o, lse = kernel(q, kv.k, kv.v, *where, scale, window)
            return o, lse if return_lse else None
        few = self.few if takes_head_dim(q.shape[2]) else self.few[:0]
        kind = window, kv.k.dtype, kv.k.shape, kv.v.shape
        if kind not in self.groups:
            self.groups[kind] = [self._group(together, kv, window) for together in self._together(kv, few.tolist())]
        # A query that sees no key is in no group; the operator, where it serves all, writes all.
        o = torch.empty_like(q) if len(few) == len(meta.query_lens) else torch.zeros_like(q)
        if len(few):
            where = few, meta.query_start_loc, self.seq_lens, meta.block_table, meta.block_size
            torch.ops.minillm.paged_attention(q, kv.k, kv.v, o, *where, scale, window)
        for group in self.groups[kind]:
            for rows, room in ((kv.k, group.k_room), (kv.v, group.v_room)):
                torch.index_select(rows.view(-1, room.shape[1]), 0, group.blocks, out=room)
                if len(group.padding):  # a weight of 0 times what a former owner left there may be NaN
                    room.view(-1, room.shape[1] // meta.block_size).index_fill_(0, group.padding, 0)
            o[group.tokens] = attend_group(q[group.tokens], group.k, group.v, group.mask, scale)
        return o, None

    def _together(self, kv: LayerKV, served: Collection[int] = ()) -> list[list[Stretch]]:
        """The step's queries in stretches, and those of one group together: alike, and not too many keys in all.

        ``served``: requests that belong to no group.
        """
        stretches, end = [], 0
        for request, (new, rows) in enumerate(zip(self.metadata.query_lens, self.metadata.seq_lens, strict=True)):
            begin, end = end, end + new
            for i in range(max(0, new - rows), new if request not in served else 0, STRETCH):
                n = min(STRETCH, new - i)
                stretches.append(Stretch(request, begin + i, n, rows - new + i + n))
        most_keys = GROUP_BYTES // (kv.k[0].nbytes + kv.v[0].nbytes)
        groups: list[list[Stretch]] = []
        for stretch in sorted(stretches, key=lambda s: (s.n, s.keys), reverse=True):
            if groups and groups[-1][0].n == stretch.n:
                width, size = groups[-1][0].keys, len(groups[-1]) + 1
                padding = size * width - sum(s.keys for s in groups[-1]) - stretch.keys
                if padding <= GROUP_PADDING and size * width <= most_keys:
                    groups[-1].append(stretch)
                    continue
            groups.append([stretch])
        return groups

    def _group(self, stretches: list[Stretch], kv: LayerKV, window: int | None) -> Group:
        """Few tensor operations: there may be many groups, and the step waits for them."""
        table, size = self.metadata.block_table, self.metadata.block_size
        stretches = sorted(stretches, key=lambda s: s.first)  # then the tokens of equal requests follow one another
        n, width = stretches[0].n, max(s.keys for s in stretches)
        count = -(-width // size)
        masks = {s.keys: additive_mask(n, s.keys, width, window, kv.k.dtype) for s in stretches}
        mask = torch.stack([masks[s.keys] for s in stretches]) if len(masks) > 1 else masks[width][None]
        padding = [i * count * size + row for i, s in enumerate(stretches) for row in range(s.keys, width)]
        k_room, v_room = self._room("k", kv.k, len(stretches) * count), self._room("v", kv.v, len(stretches) * count)
        k, v = (
            room.view(len(stretches), count * size, *rows.shape[1:])[:, :width].transpose(1, 2)
            for room, rows in ((k_room, kv.k), (v_room, kv.v))
        )
        return Group(
            tokens=indices([s.first + i for s in stretches for i in range(n)], table.device),
            blocks=table[indices([s.request for s in stretches], table.device), :count].reshape(-1),
            padding=torch.tensor(padding, dtype=torch.int64, device=table.device),
            k_room=k_room,
            v_room=v_room,
            k=k,
            v=v,
            mask=mask[:, None].to(table.device) if mask.any() else None,
        )

    def _room(self, name: str, rows: Tensor, count: int) -> Tensor:
        """Workspace for ``count`` blocks of such rows: [count, numbers of a block]."""
        numbers = self.metadata.block_size * rows[0].numel()
        space = self.workspace.get(name)
        if space is None or space.dtype != rows.dtype or space.numel() < count * numbers:
            space = self.workspace[name] = rows.new_empty((count + count // 4) * numbers)  # sequences grow
        return space[: count * numbers].view(count, numbers)


def attend_group(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [B · n, Hq, D], k and v [B, Hkv, S, D], mask [B or 1, 1, n, S] or None -> o [B · n, Hq, D]."""
    size, kv_heads, _, d = k.shape
    n = len(q) // size
    # Of one query, the heads of a group are rows that share a K head: nothing is repeated, which is far faster.
    rows = q.view(size, kv_heads, -1, d) if n == 1 else q.view(size, n, -1, d).transpose(1, 2)
    o = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale, enable_gqa=n > 1)
    return o.view_as(q) if n == 1 else o.transpose(1, 2).reshape(q.shape)


def additive_mask(n: int, keys: int, width: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """[n, width]: the queries are the last of ``keys`` rows; 0 where query i sees a key, else −∞."""
    mask = torch.full((n, width), float("-inf"), dtype=dtype).triu_(keys - n + 1)
    if window is not None:
        mask += torch.full_like(mask, float("-inf")).tril_(keys - n - window)
    return mask


def indices(numbers: list[int], device: torch.device) -> Tensor | slice:
    """As an index: a slice, which copies nothing, if each number is one more than that before it."""
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return slice(numbers[0], numbers[-1] + 1)
    return torch.tensor(numbers, device=device)
