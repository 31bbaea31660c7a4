"""GGUF files written here, converted, and compared with transformers on the weights they were written from."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import pre_tokenizers

from minillm.core.model_config import CheckpointError
from minillm.models.gguf import convert_gguf
from minillm.models.loader import load_model
from minillm.models.tokenizer import Tokenizer
from tests.models.checkpoints import redraw, run

# Rows must be multiples of 32 for Q8_0's blocks.
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
SPECIAL = ["<unk>", "<start>", "<end>", "<tool>"]
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "Ġ"), ("i", "n")]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
TYPES = [CONTROL, CONTROL, CONTROL, USER_DEFINED, *[NORMAL] * (len(TOKENS) - 4)]
METADATA = {
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 128,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5000.0,
    "llama.rope.dimension_count": 16,
    "general.name": "random",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}<end>{% endfor %}",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, parameter = name.rpartition(".")
    if stem in names:
        return f"{names[stem]}.{parameter}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{parameter}"


def llama_cpp_rows(name: str, value: np.ndarray) -> np.ndarray:
    """q and k as llama.cpp keeps them: rows i and i + d/2 of a head side by side."""
    if ".q_proj." not in name and ".k_proj." not in name:
        return value
    d = SHAPE["head_dim"]
    order = [head + half * d // 2 + i for head in range(0, len(value), d) for i in range(d // 2) for half in (0, 1)]
    return value[order]


def quantise(value: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
    kind = GGMLQuantizationType.Q8_0 if value.ndim == 2 else GGMLQuantizationType.F32
    return gguf.quants.quantize(value, kind), kind


@pytest.fixture(scope="module")
def source_model():
    """f(tied, biases) -> a random transformers model whose matrices Q8_0 holds exactly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def build(tied: bool, biases: bool):
        config = LlamaConfig(
            **{**SHAPE, "rope_parameters": dict(SHAPE["rope_parameters"])},
            vocab_size=len(TOKENS),
            tie_word_embeddings=tied,
            attention_bias=biases,
            mlp_bias=biases,
        )
        model = LlamaForCausalLM(config).eval()
        redraw(model)
        with torch.no_grad():
            for parameter in model.parameters():
                packed, kind = quantise(parameter.numpy())
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kind)))
        return model

    return build


@pytest.fixture
def write_gguf(tmp_path, source_model):
    """f(model=None, change_state=None, **metadata changes) -> path; a value of ``...`` leaves the key out."""

    def write(model=None, change_state=None, architecture="llama", **changes):
        model = model or source_model(tied=True, biases=False)
        file = tmp_path / "model.gguf"
        writer = GGUFWriter(file, architecture)
        for key, value in {**METADATA, **changes}.items():
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            if value is not ...:
                add.get(type(value), writer.add_array)(key, value)
        state = {}
        for name, parameter in model.named_parameters():  # a tied head is not listed again
            state[gguf_name(name)] = llama_cpp_rows(name, parameter.detach().numpy())
        if change_state:
            change_state(state)
        for name, value in state.items():
            packed, kind = quantise(value)
            writer.add_tensor(name, packed, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    return write


@pytest.mark.parametrize(("tied", "biases"), [(True, False), (False, True)])
def test_logits_are_those_of_the_source(tied, biases, source_model, write_gguf, tmp_path):
    model = source_model(tied, biases)
    convert_gguf(write_gguf(model), tmp_path / "converted")
    ours = load_model(tmp_path / "converted", "float32")
    assert (ours.config.tie_word_embeddings, ours.config.qkv_bias, ours.config.mlp_bias) == (tied, biases, biases)
    token_ids = torch.randint(len(TOKENS), (30,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in model.parameters():  # not model.bfloat16(), which would round the rotary frequencies too
            parameter.copy_(parameter.bfloat16())
        want = model(token_ids[None]).logits[0]
    assert want.std() >= 1
    assert (run(ours, [token_ids], [[30]])[0] - want).abs().max() < 1e-4


def test_the_order_of_rows_matters(source_model, write_gguf, tmp_path, monkeypatch):
    """With q and k left in llama.cpp's order the comparison above would fail."""
    monkeypatch.setattr("minillm.models.gguf._half_split", lambda weight, heads, head_dim: weight)
    model = source_model(tied=True, biases=False)
    convert_gguf(write_gguf(model), tmp_path / "converted")
    token_ids = torch.arange(30)
    with torch.no_grad():
        want = model(token_ids[None]).logits[0]
    assert (run(load_model(tmp_path / "converted", "float32"), [token_ids], [[30]])[0] - want).abs().max() > 1


def test_the_folder(write_gguf, tmp_path):
    folder = tmp_path / "converted"
    convert_gguf(write_gguf(), folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5  # not the float32's 9.999999747378752e-06
    assert (config["eos_token_id"], config["bos_token_id"]) == (2, 1)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["pad_token"], settings["bos_token"]) == ("<end>", "<end>", "<start>")
    assert settings["clean_up_tokenization_spaces"] is False
    assert {tensor.dtype for tensor in load_model(folder).parameters()} == {torch.bfloat16}
    assert {file.name for file in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }


TEXTS = ["in the  theatre", "Grüße, 日本 \t\n x", "a<end>b<start>", "it's the\n\n\n  end"]


def test_tokenizer_is_transformers_own(write_gguf, tmp_path):
    """The same ids as transformers' own reading of the GGUF file, with a split that it knows."""
    from transformers import AutoTokenizer

    file = write_gguf()
    convert_gguf(file, tmp_path / "converted")
    ours = Tokenizer(tmp_path / "converted")
    from_gguf = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    from_folder = AutoTokenizer.from_pretrained(tmp_path / "converted")
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == from_gguf.encode(text) == from_folder.encode(text)
        assert from_folder.decode(ids) == text
    # Control tokens are no text; user-defined ones are, and stay whole (transformers takes them apart).
    assert ours.encode("<tool>") == [3]
    assert ours.decode(ours.encode("a<end>b<tool>c")) == "ab<tool>c"
    assert from_folder.eos_token == "<end>"
    assert ours.encode_chat([{"role": "user", "content": "the"}]) == ours.encode("the<end>")


def test_smollm_splits_digits_off_first(write_gguf, tmp_path):
    """Digits stand alone and the spaces before one stay together; GPT-2's split gives the last space to the digit."""
    ids = {}
    for pre in ("smollm", "gpt-2"):
        convert_gguf(write_gguf(**{"tokenizer.ggml.pre": pre}), tmp_path / pre)
        ids[pre] = [TOKENS[i] for i in Tokenizer(tmp_path / pre).encode("in  42")]
    assert ids == {"smollm": ["in", "ĠĠ", "4", "2"], "gpt-2": ["in", "Ġ", "Ġ", "4", "2"]}


def test_begin_token_if_the_file_asks_for_it(write_gguf, tmp_path):
    convert_gguf(write_gguf(**{"tokenizer.ggml.add_bos_token": True}), tmp_path / "converted")
    tokenizer = Tokenizer(tmp_path / "converted")
    assert tokenizer.encode("in")[0] == 1
    assert 1 not in tokenizer.encode("in", add_special_tokens=False)


def replace_in_layer(name, value):
    return lambda state: state.update({f"blk.0.{name}": value})


BAD_METADATA = {
    "another architecture": ({"architecture": "mamba"}, ["general.architecture", "'mamba'", "known are llama"]),
    "experts": ({"llama.expert_count": 8}, ["llama.expert_count"]),
    "rope scaling": ({"llama.rope.scaling.factor": 4.0}, ["llama.rope.scaling.factor"]),
    "half a head rotated": ({"llama.rope.dimension_count": 8}, ["llama.rope.dimension_count", "8"]),
    "KV heads by layer": ({"llama.attention.head_count_kv": [2, 2]}, ["llama.attention.head_count_kv", "[2, 2]"]),
    "a string for a number": ({"llama.block_count": "2"}, ["llama.block_count", "int"]),
    "heads that do not divide": ({"llama.attention.head_count_kv": 3}, ["num_key_value_heads"]),
    "another tokenizer": ({"tokenizer.ggml.model": "llama"}, ["tokenizer.ggml.model", "'llama'", "gpt2"]),
    "another split": ({"tokenizer.ggml.pre": "llama-bpe"}, ["tokenizer.ggml.pre", "'llama-bpe'", "gpt-2, smollm"]),
    "merges of no tokens": ({"tokenizer.ggml.merges": ["q z"]}, ["tokenizer.ggml.merges"]),
    "a merge of three": ({"tokenizer.ggml.merges": ["t h e"]}, ["tokenizer.ggml.merges"]),
    "types of other tokens": ({"tokenizer.ggml.token_type": [1, 1]}, ["tokenizer.ggml.token_type", "2 entries"]),
    "end outside": ({"tokenizer.ggml.eos_token_id": 9999}, ["tokenizer.ggml.eos_token_id", "9999"]),
    "begin asked for and not named": (
        {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": ...},
        ["tokenizer.ggml.bos_token_id"],
    ),
    "a tensor missing": (
        {"change_state": lambda s: s.pop("blk.1.attn_v.weight")},
        ["layers.1.self_attn.v_proj.weight"],
    ),
    "a tensor left over": (
        {"change_state": replace_in_layer("ffn_gate_exps.weight", np.zeros((64, 64), np.float32))},
        ["blk.0.ffn_gate_exps.weight"],
    ),
    "frequencies of another rope": (
        {"change_state": lambda s: s.update({"rope_freqs.weight": np.ones(8, np.float32)})},
        ["rope_freqs.weight"],
    ),
    "a wrong shape": (
        {"change_state": replace_in_layer("attn_q.weight", np.zeros((32, 64), np.float32))},
        ["layers.0.self_attn.q_proj.weight", "[32, 64]", "[64, 64]"],
    ),
    **{
        f"no {key}": ({key: ...}, [key, "missing"])
        for key in (
            "llama.embedding_length",
            "llama.feed_forward_length",
            "llama.block_count",
            "llama.attention.head_count",
            "llama.context_length",
            "llama.attention.layer_norm_rms_epsilon",
            "tokenizer.ggml.model",
            "tokenizer.ggml.tokens",
            "tokenizer.ggml.token_type",
            "tokenizer.ggml.merges",
        )
    },
}


@pytest.mark.parametrize("name", BAD_METADATA)
def test_a_fault_is_named(name, write_gguf, tmp_path):
    changes, says = BAD_METADATA[name]
    file = write_gguf(**changes)
    with pytest.raises(CheckpointError) as refusal:
        convert_gguf(file, tmp_path / "converted")
    for words in [str(file), *says]:
        assert words in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("part", [0.0, 0.001, 0.05, 0.1, 0.3, 0.6, 0.9, 0.999])
def test_a_truncated_file(part, write_gguf, tmp_path):
    file = write_gguf()
    whole = file.read_bytes()
    file.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(CheckpointError, match="not a whole GGUF file") as refusal:
        convert_gguf(file, tmp_path / "converted")
    assert str(file) in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("content", [b"GGML" + bytes(100), b"GGUF\x09\x00\x00\x00" + bytes(100)])
def test_not_a_gguf_file(content, tmp_path):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.gguf: is not a whole GGUF file"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "converted")


def test_no_file(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "converted")


def test_a_folder_that_is_there_is_kept(write_gguf, tmp_path):
    (tmp_path / "converted").mkdir()
    with pytest.raises(FileExistsError, match="converted"):
        convert_gguf(write_gguf(), tmp_path / "converted")
