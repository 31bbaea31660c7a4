"""Well-known models and GPUs, for the cost model: shapes and data-sheet figures, not measurements."""

from __future__ import annotations

from dataclasses import dataclass

from minillm.core.model_config import ModelConfig


@dataclass(frozen=True)
class Device:
    """An accelerator by its data sheet."""

    name: str
    flops: float  # dense bfloat16 operations a second
    bandwidth: float  # bytes of device memory a second
    memory: float  # bytes

    @property
    def ridge(self) -> float:
        """Operations per byte above which arithmetic, not memory, sets the time (Williams et al. 2009)."""
        return self.flops / self.bandwidth


DEVICES = {
    device.name: device
    for device in (
        Device("RTX 4090", 165e12, 1.008e12, 24e9),
        Device("A100 80GB", 312e12, 2.039e12, 80e9),
        Device("H100 SXM", 989e12, 3.35e12, 80e9),
        Device("H200", 989e12, 4.8e12, 141e9),
    )
}


def _shape(vocab, hidden, mlp, layers, heads, kv_heads, head_dim, context, tied=False, qk_norm=False) -> ModelConfig:
    return ModelConfig(
        architecture="Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        qk_norm=qk_norm,
        sliding_windows=(None,) * layers,
        dtype="bfloat16",
    )


MODELS = {
    "tiny": _shape(2048, 256, 768, 4, 8, 4, 32, 1024, tied=True),
    "SmolLM2-135M": _shape(49152, 576, 1536, 30, 9, 3, 64, 8192, tied=True),
    "Qwen3-0.6B": _shape(151936, 1024, 3072, 28, 16, 8, 128, 40960, tied=True, qk_norm=True),
    "Llama-2-7B": _shape(32000, 4096, 11008, 32, 32, 32, 128, 4096),
    "Llama-3-8B": _shape(128256, 4096, 14336, 32, 32, 8, 128, 8192),
    "Llama-3-70B": _shape(128256, 8192, 28672, 80, 64, 8, 128, 8192),
}
