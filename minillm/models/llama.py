"""The Llama family: Llama 1 to 3, SmolLM2, Mistral, Qwen2 and Qwen3 differ only in biases, q/k norm and windows."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from minillm.compute.attention.base import Attention
from minillm.core.kv_spec import FullAttentionSpec
from minillm.core.model_config import ModelConfig
from minillm.kernels.cpp import use_cpp
from minillm.models.layers.activation import silu_mul
from minillm.models.layers.linear import Linear, linear_method_for
from minillm.models.layers.norm import RMSNorm
from minillm.models.layers.rotary import RotaryEmbedding, apply_rotary


class LlamaAttention(nn.Module):
    """Grouped-query attention: every ``Hq / Hkv`` query heads share one head of K and V (Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig, layer: int, factory: dict, cpp: bool):
        super().__init__()
        self.layer, self.cpp = layer, cpp
        self.head_dim = config.head_dim
        self.heads = (config.num_attention_heads, config.num_key_value_heads)
        self.window = config.sliding_windows[layer]
        self.scale = config.head_dim**-0.5
        q, kv = (n * config.head_dim for n in self.heads)
        self.qkv_proj = Linear(config.hidden_size, (q, kv, kv), bias=config.qkv_bias, **factory)
        self.o_proj = Linear(q, (config.hidden_size,), bias=config.o_bias, **factory)
        place = {"dtype": factory["dtype"], "device": factory["device"], "cpp": cpp}
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, **place) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, **place) if config.qk_norm else None

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        hq, hkv = self.heads
        qkv = self.qkv_proj(x).view(-1, hq + 2 * hkv, self.head_dim)
        qk, v = qkv.split((hq + hkv, hkv), dim=1)
        if self.q_norm is not None:
            q, k = qk.split((hq, hkv), dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        q, k = apply_rotary(qk, *rotary, self.cpp).split((hq, hkv), dim=1)
        o = attention.attend(self.layer, q, k, v, self.scale, self.window)
        return self.o_proj(o.reshape(-1, hq * self.head_dim))


class LlamaMLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig, factory: dict, cpp: bool):
        super().__init__()
        self.cpp = cpp
        wide, hidden = config.intermediate_size, config.hidden_size
        self.gate_up_proj = Linear(hidden, (wide, wide), bias=config.mlp_bias, **factory)
        self.down_proj = Linear(wide, (hidden,), bias=config.mlp_bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_mul(self.gate_up_proj(x), self.cpp))


class LlamaDecoderLayer(nn.Module):
    """Pre-norm residual block: attention, then MLP, and each is added when the next norm reads it."""

    def __init__(self, config: ModelConfig, layer: int, factory: dict, cpp: bool):
        super().__init__()
        place = {"dtype": factory["dtype"], "device": factory["device"], "cpp": cpp}
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **place)
        self.self_attn = LlamaAttention(config, layer, factory, cpp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **place)
        self.mlp = LlamaMLP(config, factory, cpp)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotary: tuple[Tensor, Tensor], attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """What is to be added, and to what; the first layer has nothing to add to."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, rotary, attention)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class LlamaForCausalLM(nn.Module):
    """Token ids in, hidden states out; logits only for the rows that are asked for.

    ``forward`` takes T tokens laid flat, of any number of requests: which token belongs to which request is the
    business of ``attention`` alone, so the same module serves prefill, decode, mixed batches and training.
    ``kernel_backend`` says, as in EngineConfig, whether C++ operators may serve; where gradients are on, they don't.
    """

    # Our merged parameter -> the checkpoint's names of its partitions, in order.
    packed_modules: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        kernel_backend: str = "torch",
    ):
        super().__init__()
        self.config, self.dtype, device = config, dtype, torch.device(device)
        place = {"dtype": dtype, "device": device}
        factory = {"method": linear_method_for(dtype, device), **place}
        cpp = use_cpp(kernel_backend, dtype, device)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, **place).requires_grad_(False)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, device=device)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i, factory, cpp) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, cpp=cpp, **place)
        self.lm_head = Linear(config.hidden_size, (config.vocab_size,), **factory)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def kv_cache_spec(self) -> list[FullAttentionSpec]:
        """What each layer keeps per token. A window is still a full spec: it masks rows but frees none."""
        config = self.config
        spec = FullAttentionSpec(config.num_key_value_heads, config.head_dim, str(self.dtype).removeprefix("torch."))
        return [spec] * config.num_hidden_layers

    def process_after_loading(self) -> None:
        """Let every LinearMethod prepare its weight, once all shards are loaded."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.method.process_after_loading(module)

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """input_ids and positions int64 [T] -> hidden states [T, hidden_size] in the model's dtype."""
        x = self.embed_tokens(input_ids)
        residual = None
        rotary = self.rotary.tables(positions, x.dtype)
        for layer in self.layers:
            x, residual = layer(x, residual, rotary, attention)
        return self.norm(x, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden_size] -> logits [R, vocab_size] in the model's dtype."""
        return self.lm_head(hidden)
