"""What paging costs: ``python -m minillm.bench.paging`` times a decode step over paged and over contiguous KV.

One model of SmolLM2's shape with random weights, one batch, the same attention; contiguous, it reads each request's
rows where they lie, padded to the longest, and gathers nothing. The two alternate: a ratio of medians.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from minillm.compute.attention.base import AttentionBackend, AttentionMetadata, LayerKV, StepAttention
from minillm.compute.attention.paged import PagedAttention, additive_mask, attend_group
from minillm.core.presets import MODELS
from minillm.memory.kv_cache import KVCache
from minillm.memory.kv_manager import KVGeometry, group_layers
from minillm.models.layers.linear import Linear
from minillm.models.llama import LlamaForCausalLM

BATCHES = {"equal": [512] * 16, "skewed 8:1": [512, 64] * 8}


class ContiguousDecode(AttentionBackend):
    """One query a request; request r has block r + 1, as long as the longest of all."""

    def plan(self, metadata: AttentionMetadata) -> None:
        super().plan(metadata)
        self.masks = {
            dtype: torch.stack([additive_mask(1, n, max(metadata.seq_lens), None, dtype) for n in metadata.seq_lens])
            for dtype in (torch.float32, torch.bfloat16)
        }

    def forward(self, q: Tensor, kv: LayerKV, scale: float, window: int | None = None, return_lse: bool = False):
        k, v = (rows[1:].view(len(q), -1, *rows.shape[1:]).transpose(1, 2) for rows in (kv.k, kv.v))
        return attend_group(q, k, v, self.masks[q.dtype][:, None], scale), None


def random_model(name: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """A preset's shape, weights drawn."""
    model = LlamaForCausalLM(MODELS[name], dtype)
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    model.process_after_loading()
    return model


def decode_step(model: LlamaForCausalLM, lens: list[int], paged: bool) -> Callable[[], tuple[float, list[int]]]:
    """f() -> (seconds, tokens) of one step; ``lens``: cache rows of each request, the new token's included."""
    specs, generator = model.kv_cache_spec(), torch.Generator().manual_seed(0)
    block_size, null_rows = (16, 16) if paged else (max(lens), 1)
    backend = PagedAttention() if paged else ContiguousDecode()
    counts = [-(-n // block_size) for n in lens]
    blocks = list(range(1, sum(counts) + 1))
    if paged:  # in no order
        random.Random(0).shuffle(blocks)
    tables = [[blocks.pop(0) for _ in range(count)] for count in counts]
    cache = KVCache(KVGeometry(group_layers(specs), block_size, sum(counts), null_rows))
    first_row = cache.geometry.first_row
    slots = [
        [first_row(table[i // block_size]) + i % block_size for i in range(n)]
        for table, n in zip(tables, lens, strict=True)
    ]
    for layer, spec in enumerate(specs):
        k, v = torch.randn(2, sum(lens), spec.num_kv_heads, spec.head_dim, generator=generator).to(cache.layer(layer).k)
        cache.layer(layer).write(torch.tensor([slot for own in slots for slot in own]), k=k, v=v)
    metadata = AttentionMetadata(
        query_lens=[1] * len(lens),
        seq_lens=lens,
        query_start_loc=torch.arange(len(lens) + 1, dtype=torch.int32),
        slot_mapping=torch.tensor([own[-1] for own in slots]),
        block_table=torch.tensor([table + [0] * (max(counts) - len(table)) for table in tables], dtype=torch.int32),
        first_rows=[own[0] for own in slots],
        block_size=block_size,
    )
    ids, positions = torch.arange(len(lens)), torch.tensor(lens) - 1

    @torch.inference_mode()
    def step() -> tuple[float, list[int]]:
        started = time.perf_counter()
        hidden = model(ids, positions, StepAttention(backend, cache, metadata))
        tokens = model.compute_logits(hidden).max(-1).indices.tolist()
        return time.perf_counter() - started, tokens

    return step


def paging_row(model: LlamaForCausalLM, lens: list[int], repeats: int = 15) -> dict[str, float]:
    """Milliseconds of a step, medians, and their ratio."""
    steps = {
        "contiguous_ms": decode_step(model, lens, paged=False),
        "paged_ms": decode_step(model, lens, paged=True),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 2):
        for name, step in steps.items():
            seconds, _ = step()
            if repeat >= 2:  # the first two warm up
                times[name].append(1e3 * seconds)
    row = {name: statistics.median(of) for name, of in times.items()}
    return {**row, "ratio": row["paged_ms"] / row["contiguous_ms"]}


if __name__ == "__main__":
    for dtype in (torch.bfloat16, torch.float32):
        model = random_model("SmolLM2-135M", dtype)
        for name, lens in BATCHES.items():
            row = {key: round(value, 2) for key, value in paging_row(model, lens).items()}
            print(str(dtype).removeprefix("torch."), name, row)
