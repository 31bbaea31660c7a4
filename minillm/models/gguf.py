"""GGUF files of the llama architecture (what llama.cpp runs), turned once into a Hugging Face folder.

Quantised weights are dequantised to bfloat16: the engine reads one format, and a GGUF file is a way to get a model
where only that can be had.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from torch import Tensor

from minillm.core.model_config import CheckpointError, ModelConfig
from minillm.models.loader import fill, save_model, work_folder, write_json
from minillm.models.registry import model_class

ARCHITECTURES = ("llama",)
TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# tokenizer.ggml.pre -> what splits a text before byte-pair merging; another split gives other token ids.
PRE_TOKENIZERS = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type


def convert_gguf(file: str | Path, folder: str | Path) -> None:
    """Write the model in ``file`` as a new Hugging Face folder, weights in bfloat16.

    Raises CheckpointError, naming the file and the field or tensor, for a file that isn't whole, isn't a model of a
    known architecture or says what a config.json can't; FileExistsError if ``folder`` is there.
    """
    folder = Path(folder).absolute()
    if folder.exists():
        raise FileExistsError(f"{folder}: is there already; delete it or name another folder")
    source = _Metadata(Path(file))
    settings = _config(source)
    config = ModelConfig.from_dict(settings, source=str(file))
    tokenizer, tokenizer_settings = _tokenizer(source)
    model = model_class(config.architecture)(config, torch.bfloat16)
    fill(model, _tensors(source, config))
    with work_folder(folder.with_name(f".{folder.name}.partial")) as part:
        save_model(model, part, torch.bfloat16)
        write_json(part / "config.json", settings)
        ends = ("bos_token_id", "eos_token_id", "pad_token_id")
        write_json(part / "generation_config.json", {name: settings[name] for name in ends if name in settings})
        tokenizer.save(str(part / "tokenizer.json"))
        write_json(part / "tokenizer_config.json", tokenizer_settings)
        template = source.get("tokenizer.chat_template", str, None)
        if template is not None:
            (part / "chat_template.jinja").write_text(template, encoding="utf-8")
        part.rename(folder)


class _Metadata:
    """Typed access to a GGUF file's key-value pairs; errors name the file and the key."""

    def __init__(self, file: Path):
        self.file = file
        try:
            self.reader = GGUFReader(file)
        except FileNotFoundError:
            raise CheckpointError(f"{file}: no such file") from None
        except Exception as error:  # the reader checks little: numpy's errors show that bytes are lacking
            raise CheckpointError(f"{file}: is not a whole GGUF file ({error})") from None
        architecture = self.get("general.architecture", str)
        if architecture not in ARCHITECTURES:
            self.fail("general.architecture", f"is {architecture!r}; known are {', '.join(ARCHITECTURES)}")

    def fail(self, key: str, what: str) -> NoReturn:
        raise CheckpointError(f"{self.file}: {key} {what}")

    def get(self, key: str, kind: type, *default):
        """The value of ``key``; ``default``, if one is given, where the file has none."""
        field = self.reader.get_field(key)
        if field is None:
            if default:
                return default[0]
            self.fail(key, "is missing")
        value = field.contents()
        if type(value) is not kind:
            self.fail(key, f"is {str(value)[:80]!r}; it must be of type {kind.__name__}")
        return value

    def real(self, key: str, *default: float) -> float:
        """A float32 as its shortest decimal: 1e-05, not 9.999999747378752e-06."""
        return float(str(np.float32(self.get(key, float, *default))))

    def names(self) -> set[str]:
        return {tensor.name for tensor in self.reader.tensors}


def _config(source: _Metadata) -> dict:
    """The config.json that says what the metadata says."""
    for key in ("llama.expert_count", "llama.rope.scaling.factor"):
        if source.reader.get_field(key) is not None:
            source.fail(key, "is there; neither experts nor rope scaling are converted")
    hidden, heads = source.get("llama.embedding_length", int), source.get("llama.attention.head_count", int)
    head_dim = source.get("llama.attention.key_length", int, hidden // heads)
    rotated = source.get("llama.rope.dimension_count", int, head_dim)
    if rotated != head_dim:
        source.fail("llama.rope.dimension_count", f"is {rotated}; only rotation of whole heads ({head_dim}) is known")
    names = source.names()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": len(source.get("tokenizer.ggml.tokens", list)),
        "hidden_size": hidden,
        "intermediate_size": source.get("llama.feed_forward_length", int),
        "num_hidden_layers": source.get("llama.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": source.get("llama.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": source.get("llama.context_length", int),
        "rms_norm_eps": source.real("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": source.real("llama.rope.freq_base", 10000.0)},
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = source.get(f"tokenizer.ggml.{key}_token_id", int, None)
        if token is not None:
            config[f"{name}_token_id"] = token
    return config


def _tensors(source: _Metadata, config: ModelConfig) -> Iterator[tuple[str, Tensor, str]]:
    """(Hugging Face name, float32 tensor, file) of every tensor; a name that is unknown stays as it is."""
    for tensor in source.reader.tensors:
        try:
            # Copied, since the reader's arrays may be read-only views of the file.
            weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        except (NotImplementedError, ValueError) as error:
            source.fail(f"tensor {tensor.name}", f"of type {tensor.tensor_type.name} cannot be dequantised ({error})")
        stem, _, parameter = tensor.name.rpartition(".")
        name = TENSORS.get(stem)
        if stem.startswith("blk.") and stem.count(".") == 2:
            _, layer, part = stem.split(".")
            name = f"model.layers.{layer}.{LAYER_TENSORS[part]}" if part in LAYER_TENSORS else None
            if part in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
                weight = _half_split(weight, heads, config.head_dim)
        yield f"{name}.{parameter}" if name else tensor.name, weight, str(source.file)


def _half_split(weight: Tensor, heads: int, head_dim: int) -> Tensor:
    """Rows [heads · head_dim, …] of q or k from llama.cpp's order back to Hugging Face's.

    Rotary embedding turns pairs of rows. llama.cpp lays the two of a pair side by side, Hugging Face half a head apart.
    """
    if weight.shape[0] != heads * head_dim:
        return weight  # of a wrong shape, which ``fill`` reports
    return weight.view(heads, head_dim // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _tokenizer(source: _Metadata) -> tuple[Tokenizer, dict]:
    """The byte-level BPE tokenizer that the metadata describes, and its tokenizer_config.json.

    Built here rather than by transformers' converter, which takes the end token from the wrong key and splits every
    text as GPT-2 does.
    """
    kind = source.get("tokenizer.ggml.model", str)
    if kind != "gpt2":
        source.fail("tokenizer.ggml.model", f"is {kind!r}; known is 'gpt2' (byte-level BPE)")
    pre = source.get("tokenizer.ggml.pre", str, "gpt-2")
    if pre not in PRE_TOKENIZERS:
        source.fail("tokenizer.ggml.pre", f"is {pre!r}; known are {', '.join(PRE_TOKENIZERS)}")
    tokens = source.get("tokenizer.ggml.tokens", list)
    types = source.get("tokenizer.ggml.token_type", list)
    if len(types) != len(tokens):
        source.fail("tokenizer.ggml.token_type", f"has {len(types)} entries; there are {len(tokens)} tokens")
    merges = [tuple(merge.split(" ")) for merge in source.get("tokenizer.ggml.merges", list)]

    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = source.get(f"tokenizer.ggml.{key}_token_id", int, None)
        if token is not None:
            if token >= len(tokens):
                source.fail(f"tokenizer.ggml.{key}_token_id", f"is {token}; there are {len(tokens)} tokens")
            special[f"{name}_token"] = tokens[token]
    # A batch's shorter rows need something to be filled with, and what stands after the end is never read.
    if "eos_token" in special:
        special.setdefault("pad_token", special["eos_token"])

    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token=special.get("unk_token")))
    except Exception as error:  # the library raises bare Exception
        source.fail("tokenizer.ggml.merges", f"does not fit the tokens ({error})")
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    typed = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, of in typed if of == CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, of in typed if of == USER_DEFINED])
    if source.get("tokenizer.ggml.add_bos_token", bool, False):
        bos = special.get("bos_token")
        if bos is None:
            source.fail("tokenizer.ggml.bos_token_id", "is missing; add_bos_token asks for it")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
        )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        # transformers would otherwise take spaces out of decoded text, before full stops for one.
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.get("llama.context_length", int),
    }
    return tokenizer, settings
