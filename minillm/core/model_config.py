"""The shape of a model, read once from a Hugging Face ``config.json``.

Plain data and no torch: the cost model and the simulator need a model's shape as much as the model itself does.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

# architecture name in config.json -> family, which settles what the config leaves open: biases, q/k norm, windows
FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# What an absent field means, where transformers' classes disagree or no value can be derived; null is another matter.
DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
DEFAULT_HEAD_DIM = {"qwen3": 128}
DEFAULT_WINDOW = 4096


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded. The message names the file and the field."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters (Su et al. 2021; YaRN: Peng et al. 2023; llama3: Llama 3.1's own scaling)."""

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer's shape. Sizes are counts of elements, never bytes."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    # One entry a layer: the number of most recent rows a query sees (itself included), or None for all of them.
    sliding_windows: tuple[int | None, ...] = ()
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def num_parameters(self) -> int:
        """Number of distinct parameters (a tied head counts once)."""
        h, d = self.hidden_size, self.head_dim
        q, kv = self.num_attention_heads * d, self.num_key_value_heads * d
        attention = h * (q + 2 * kv) + q * h + (q + 2 * kv) * self.qkv_bias + h * self.o_bias
        attention += 2 * d * self.qk_norm
        mlp = 3 * h * self.intermediate_size + (2 * self.intermediate_size + h) * self.mlp_bias
        embeddings = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * (attention + mlp + 2 * h) + h

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read ``config.json`` (and ``generation_config.json`` for its end tokens) of a checkpoint folder."""
        folder = Path(folder)
        config = cls.from_dict(read_json(folder / "config.json"), source=str(folder / "config.json"))
        generation = folder / "generation_config.json"
        if generation.exists():
            eos = _read_token_ids(_Reader(read_json(generation), str(generation)), "eos_token_id")
            if eos:
                config = replace(config, eos_token_ids=eos)
        return config

    @classmethod
    def from_dict(cls, config: dict, source: str = "config.json") -> ModelConfig:
        """Build from a Hugging Face config dict, old names (rope_scaling, torch_dtype) or new ones.

        Raises CheckpointError, naming ``source`` and the field, for anything missing, of a wrong type or unknown.
        """
        read = _Reader(config, source)
        names = config.get("architectures")
        if not isinstance(names, list) or not names:
            read.fail("architectures", f"is {names!r}; it must be a list with one of {', '.join(FAMILIES)}")
        architecture = names[0]
        family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
        if family is None:
            read.fail("architectures", f"names {architecture!r}; known are {', '.join(FAMILIES)}")
        if config.get("quantization_config") is not None:
            read.fail("quantization_config", "is there; only unquantized weights are read")
        if config.get("hidden_act", "silu") != "silu":
            read.fail("hidden_act", f"is {config['hidden_act']!r}; only 'silu' is known")

        hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
        layers = read.count("num_hidden_layers")
        silent = "num_key_value_heads" not in config
        kv_heads = read.count("num_key_value_heads", DEFAULT_KV_HEADS.get(family, heads) if silent else heads)
        if heads % kv_heads:
            read.fail("num_key_value_heads", f"is {kv_heads}; it must divide num_attention_heads ({heads})")
        default_dim = DEFAULT_HEAD_DIM.get(family)
        if config.get("head_dim") is None and default_dim is None and hidden % heads:
            read.fail("hidden_size", f"is {hidden}; without head_dim it must be a multiple of {heads} heads")
        head_dim = read.count("head_dim", default_dim or hidden // heads)
        if head_dim % 2:
            read.fail("head_dim", f"is {head_dim}; rotary embedding needs an even number")
        max_position = read.count("max_position_embeddings")
        bias = read.flag("attention_bias", False)
        return cls(
            architecture=architecture,
            vocab_size=read.count("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.count("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position,
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            rope=_read_rope(read, max_position),
            tie_word_embeddings=read.flag("tie_word_embeddings", False),
            qkv_bias=bias if family in ("llama", "qwen3") else family == "qwen2",
            o_bias=bias if family in ("llama", "qwen3") else False,
            mlp_bias=read.flag("mlp_bias", False) if family == "llama" else False,
            qk_norm=family == "qwen3",
            sliding_windows=_read_windows(read, family, layers),
            dtype=_read_dtype(read),
            eos_token_ids=_read_token_ids(read, "eos_token_id"),
            bos_token_id=next(iter(_read_token_ids(read, "bos_token_id")), None),
        )


class _Reader:
    """Typed access to a config dict whose errors name the file and the field."""

    def __init__(self, config: dict, source: str):
        self.config, self.source = config, source

    def fail(self, name: str, what: str):
        raise CheckpointError(f"{self.source}: {name} {what}")

    def _get(self, name, default, kinds, words):
        value = self.config.get(name)
        if value is None:
            if default is None:
                self.fail(name, f"is missing; it must be {words}")
            return default
        if isinstance(value, bool) != (kinds is bool) or not isinstance(value, kinds):
            self.fail(name, f"is {value!r}; it must be {words}")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default, int, "a positive whole number")
        if value < 1:
            self.fail(name, f"is {value}; it must be a positive whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = float(self._get(name, default, (int, float), "a positive number"))
        if not (math.isfinite(value) and value > 0):
            self.fail(name, f"is {value}; it must be a positive number")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return self._get(name, default, bool, "true or false")


def _read_rope(read: _Reader, max_position: int) -> RopeConfig:
    raw = read.config.get("rope_parameters")
    name = "rope_parameters"
    if raw is None:  # checkpoints written before transformers 5
        raw, name = read.config.get("rope_scaling") or {}, "rope_scaling"
    if not isinstance(raw, dict):
        read.fail(name, f"is {raw!r}; it must be an object")
    for key, value in raw.items():
        if isinstance(value, dict):
            read.fail(f"{name}.{key}", "is an object; only one rotary embedding for all layers is known")
    if raw.get("partial_rotary_factor", read.config.get("partial_rotary_factor")) not in (None, 1):
        read.fail("partial_rotary_factor", "is not 1; only rotation of the whole head is known")
    rope = _Reader({k: v for k, v in raw.items() if v is not None}, f"{read.source}: {name}")
    theta = rope.number("rope_theta", read.number("rope_theta", 10000.0))
    if theta <= 1:
        read.fail("rope_theta", f"is {theta}; it must be above 1")
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind not in ROPE_TYPES:
        read.fail(f"{name}.rope_type", f"is {kind!r}; known are {', '.join(ROPE_TYPES)}")
    if kind == "default":
        return RopeConfig(theta=theta)
    original = rope.count("original_max_position_embeddings", max_position)
    if kind == "linear":
        return RopeConfig(theta, kind, rope.number("factor"))
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if not low < high:
            rope.fail("high_freq_factor", f"is {high}; it must be above low_freq_factor ({low})")
        return RopeConfig(theta, kind, rope.number("factor"), original, low, high)
    optional = {key: rope.number(key) for key in ("attention_factor", "mscale", "mscale_all_dim") if key in rope.config}
    return RopeConfig(
        theta,
        kind,
        rope.number("factor", max_position / original),
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        **optional,
    )


def _read_windows(read: _Reader, family: str, layers: int) -> tuple[int | None, ...]:
    config = read.config
    used = {"llama": False, "mistral": True}.get(family)
    if used is None:
        used = read.flag("use_sliding_window", False)
    if not used or config.get("sliding_window", DEFAULT_WINDOW) is None:
        return (None,) * layers
    window = read.count("sliding_window", DEFAULT_WINDOW)
    if family == "mistral":
        return (window,) * layers
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)  # transformers' default for Qwen2 and Qwen3
        if isinstance(first, bool) or not isinstance(first, int):
            read.fail("max_window_layers", f"is {first!r}; it must be a whole number")
        return tuple(window if i >= first else None for i in range(layers))
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != layers or any(t not in tuple(known) for t in types):
        read.fail("layer_types", f"is {types!r}; it must list {layers} of {', '.join(known)}")
    return tuple(known[t] for t in types)


def _read_dtype(read: _Reader) -> str:
    dtype = read.config.get("dtype", read.config.get("torch_dtype")) or "float32"
    known = ("float32", "float16", "bfloat16", "float64")
    if dtype not in known:
        read.fail("dtype", f"is {dtype!r}; known are {', '.join(known)}")
    return dtype


def _read_token_ids(read: _Reader, name: str) -> tuple[int, ...]:
    value = read.config.get(name)
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        read.fail(name, f"is {value!r}; it must be a token id or a list of them")
    return ids


def read_json(path: Path) -> dict:
    """Read a JSON object from a checkpoint file; CheckpointError names the file."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a checkpoint folder must have it") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: is not readable JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}; it must be a JSON object")
    return value
