"""Modelled traffic and arithmetic of a forward pass, from a model's shape and the lengths in the batch alone.

Bytes are those that must cross device memory (HBM) at least once; activations of one layer are taken to stay on chip.
"""

from __future__ import annotations

from dataclasses import dataclass

from minillm.core.kv_spec import ITEMSIZE
from minillm.core.model_config import ModelConfig
from minillm.core.presets import Device


@dataclass(frozen=True)
class StepCost:
    """One forward pass. Bytes, and floating-point operations (a multiply and an add are two)."""

    weight_bytes: int
    kv_bytes: int
    scratch_bytes: int
    flops: int

    @property
    def hbm_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.scratch_bytes

    @property
    def intensity(self) -> float:
        """Operations for each byte moved."""
        return self.flops / self.hbm_bytes

    def seconds(self, device: Device) -> float:
        """The roofline's time: as long as the slower of arithmetic and memory takes, each at its data-sheet rate."""
        return max(self.flops / device.flops, self.hbm_bytes / device.bandwidth)

    def arithmetic_share(self, device: Device) -> float:
        """Share of the device's arithmetic in use, at most 1."""
        return self.flops / device.flops / self.seconds(device)


def kv_bytes_per_token(model: ModelConfig, dtype: str) -> int:
    """2 · layers · KV heads · head dim · bytes per element."""
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * ITEMSIZE[dtype]


def step_cost(model: ModelConfig, lengths: list[tuple[int, int]], attention: str, dtype: str) -> StepCost:
    """Cost of one pass over requests of (new tokens, rows attended to), with weights and KV in ``dtype``.

    Weights are read once whatever the batch (the embedding table counts as the head's matrix; looking up rows is
    free beside it). Every request reads all its KV and writes its new rows. ``naive`` attention computes all scores,
    masked ones too, and moves their matrix four times: written and read as scores, written and read as probabilities,
    the 4N² of FlashAttention's analysis, in at least float32. Others compute the scores that are seen.
    """
    tokens = sum(new for new, _ in lengths)
    pairs = sum(new * rows for new, rows in lengths)
    if attention != "naive":
        pairs -= sum(new * (new - 1) // 2 for new, _ in lengths)
    layers, heads, head_dim = model.num_hidden_layers, model.num_attention_heads, model.head_dim
    lookup = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    matrices = model.num_parameters - lookup
    kv_rows = sum(new + rows for new, rows in lengths)
    scratch = 4 * heads * pairs * max(4, ITEMSIZE[dtype]) * layers if attention == "naive" else 0
    head = model.vocab_size * model.hidden_size
    return StepCost(
        weight_bytes=matrices * ITEMSIZE[dtype],
        kv_bytes=kv_rows * kv_bytes_per_token(model, dtype),
        scratch_bytes=scratch,
        flops=2 * (matrices - head) * tokens + 2 * head * len(lengths) + 4 * heads * head_dim * pairs * layers,
    )


def attention_traffic(order: str, n: int, d: int, block: int = 64, heads: int = 1, itemsize: int = 1) -> int:
    """Bytes of Q, K, V, O and, if naive, of scores and weights, that cross HBM; elements if ``itemsize`` is 1.

    naive 4Nd + 4N²; "K/V outside" (3⌈N/block⌉ + 2)Nd, FlashAttention's Algorithm 1; "Q outside" (2⌈N/block⌉ + 2)Nd.
    """
    tiles = -(-n // block)
    elements = {
        "naive": 4 * n * d + 4 * n * n,
        "K/V outside": (3 * tiles + 2) * n * d,
        "Q outside": (2 * tiles + 2) * n * d,
    }[order]
    return elements * heads * itemsize
