"""Random checkpoints of every family, and a forward pass through the KV cache for the tests to compare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from minillm.compute.attention.base import AttentionMetadata, StepAttention
from minillm.compute.attention.naive import NaiveAttention
from minillm.memory.kv_cache import KVCache
from minillm.memory.kv_manager import KVGeometry, group_layers

LENGTH = 40  # tokens of a parity sequence: past every window and every original context below
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# name -> (family, what differs from BASE). Between them: every family, 1, 2, 4 and all query heads to a KV head, head
# dims 16 to 96, hidden sizes that aren't heads · head_dim, tied and untied, every bias, every rope type, windows in all
# or some layers.
BASE = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
CASES: dict[str, tuple[str, dict]] = {
    "llama-sharded": ("Llama", {"num_key_value_heads": 4, "head_dim": 64}),
    "llama-biases-linear-tied": (
        "Llama",
        {
            "head_dim": 40,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "llama-mqa-llama3": (
        "Llama",
        {
            "num_key_value_heads": 1,
            "head_dim": 80,
            "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16},
        },
    ),
    "mistral-window": (
        "Mistral",
        {"num_attention_heads": 8, "head_dim": 96, "sliding_window": 8, "max_position_embeddings": 128},
    ),
    "mistral-no-window": ("Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2-some-windows-yarn-tied": (
        "Qwen2",
        {
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "qwen2-max-window-layers": (
        "Qwen2",
        {"num_attention_heads": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3-biases": ("Qwen3", {"hidden_size": 48, "head_dim": 80, "attention_bias": True}),
    "qwen3-some-windows-yarn": (
        "Qwen3",
        {
            "num_key_value_heads": 1,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "attention_factor": 0.8,
            },
        },
    ),
}


@dataclass
class Reference:
    """One case: the folder transformers saved, and its logits of one sequence."""

    folder: Path
    token_ids: Tensor  # int64 [LENGTH]
    logits: Tensor  # float32 [LENGTH, vocab]


def redraw(model: nn.Module, seed: int = 0) -> None:
    """Draw every parameter anew, norm weights and biases too: transformers leaves those at 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(generator=generator)
            if "norm" in name:
                parameter.mul_(0.3).add_(1.0)
            elif "embed_tokens" in name:
                parameter.mul_(0.5)
            elif parameter.dim() == 2:
                parameter.mul_(1.5 * parameter.shape[1] ** -0.5)
            else:
                parameter.mul_(0.5)


def run(model: nn.Module, sequences: list[Tensor], steps: list[list[int]]) -> list[Tensor]:
    """Logits of ``sequences``, int64 [N_i] each, through a contiguous KV cache; steps[s][i]: new tokens of i in step s.

    Every step runs all its sequences' new tokens as one flat batch.
    """
    rows = max(map(len, sequences))
    geometry = KVGeometry(group_layers(model.kv_cache_spec()), rows, len(sequences), null_rows=1)
    cache = KVCache(geometry)
    backend = NaiveAttention()
    done = [0] * len(sequences)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    for step in steps:
        live = [i for i, new in enumerate(step) if new]
        lens = [step[i] for i in live]
        positions = [torch.arange(done[i], done[i] + step[i]) for i in live]
        first_rows = [geometry.first_row(i + 1) for i in live]
        metadata = AttentionMetadata(
            query_lens=lens,
            seq_lens=[done[i] + step[i] for i in live],
            query_start_loc=torch.tensor([0, *lens]).cumsum(0).int(),
            slot_mapping=torch.cat([p + first for p, first in zip(positions, first_rows, strict=True)]),
            block_table=torch.tensor([[i + 1] for i in live], dtype=torch.int32),
            first_rows=first_rows,
        )
        input_ids = torch.cat([sequences[i][done[i] : done[i] + step[i]] for i in live])
        hidden = model(input_ids, torch.cat(positions), StepAttention(backend, cache, metadata))
        for i, part in zip(live, model.compute_logits(hidden).split(lens), strict=True):
            logits[i].append(part)
            done[i] += len(part)
    assert done == [len(s) for s in sequences]
    return [torch.cat(parts) for parts in logits]
