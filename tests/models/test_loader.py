"""Checkpoint folders that are broken in one place each, and the error that names the place."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm.core.model_config import CheckpointError
from minillm.models.loader import load_model, save_model, work_folder
from minillm.models.tokenizer import Tokenizer

WEIGHTS = "model.safetensors"
Q = "model.layers.0.self_attn.q_proj.weight"


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_tensors(folder, change):
    state = load_file(folder / WEIGHTS)
    change(state)
    save_file(state, folder / WEIGHTS)


def shard(folder):
    """Into two files, with an index."""
    state = load_file(folder / WEIGHTS)
    names = sorted(state)
    files = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, part in files.items():
        save_file({name: state[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / WEIGHTS).unlink()


def shard_and(change):
    def fault(folder):
        shard(folder)
        change(folder)

    return fault


def edit_index(change):
    def fault(folder):
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        change(content)
        index.write_text(json.dumps(content))

    return shard_and(fault)


def truncate(file, keep):
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:keep])


FAULTS = {
    "no config.json": (lambda f: (f / "config.json").unlink(), ["config.json", "no such file"]),
    "config.json is not JSON": (truncate("config.json", 40), ["config.json", "JSON"]),
    "config.json is a list": (lambda f: (f / "config.json").write_text("[]"), ["config.json", "list"]),
    "unknown architecture": (
        lambda f: edit_config(f, architectures=["MambaForCausalLM"]),
        ["config.json", "architectures", "MambaForCausalLM", "LlamaForCausalLM, MistralForCausalLM"],
    ),
    "missing field": (lambda f: edit_config(f, vocab_size=...), ["config.json", "vocab_size", "missing"]),
    "field of a wrong type": (lambda f: edit_config(f, hidden_size="64"), ["config.json", "hidden_size", "'64'"]),
    "dynamic rope": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        ["config.json", "rope_parameters.rope_type", "'dynamic'", "default, linear, llama3, yarn"],
    ),
    "generation_config.json is not JSON": (truncate("generation_config.json", 5), ["generation_config.json", "JSON"]),
    "missing shard": (
        shard_and(lambda f: (f / "model-00002-of-00002.safetensors").unlink()),
        ["model-00002-of-00002.safetensors", "no such file", "index"],
    ),
    "index without weight_map": (edit_index(lambda c: c.pop("weight_map")), ["index.json", "weight_map"]),
    "index that leaves the folder": (
        edit_index(lambda c: c["weight_map"].update({Q: "../elsewhere.safetensors"})),
        ["index.json", Q, "../elsewhere.safetensors"],
    ),
    "index with a number": (edit_index(lambda c: c["weight_map"].update({Q: 3})), ["index.json", Q]),
    "truncated weights": (truncate(WEIGHTS, 5000), [WEIGHTS, "whole"]),
    "truncated header": (truncate(WEIGHTS, 100), [WEIGHTS, "whole"]),
    "empty weights": (truncate(WEIGHTS, 0), [WEIGHTS, "whole"]),
    "tensor of a wrong shape": (
        lambda f: edit_tensors(f, lambda s: s.update({Q: s[Q][:-1].clone()})),
        [WEIGHTS, Q, "[63, 64]", "[64, 64]"],
    ),
    "norm of a wrong shape": (
        lambda f: edit_tensors(f, lambda s: s.update({"model.norm.weight": torch.ones(63)})),
        [WEIGHTS, "model.norm.weight", "[63]", "[64]"],
    ),
    "tensor of whole numbers": (
        lambda f: edit_tensors(f, lambda s: s.update({Q: s[Q].to(torch.int8)})),
        [WEIGHTS, Q, "int8", "bfloat16"],
    ),
    "tensor left over": (
        lambda f: edit_tensors(f, lambda s: s.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)})),
        [WEIGHTS, "model.layers.0.self_attn.q_norm.weight", "LlamaForCausalLM"],
    ),
    "bias left over": (
        lambda f: edit_tensors(f, lambda s: s.update({"model.layers.0.mlp.up_proj.bias": torch.ones(80)})),
        [WEIGHTS, "model.layers.0.mlp.up_proj.bias"],
    ),
    "tensor missing": (lambda f: edit_tensors(f, lambda s: s.pop(Q)), [WEIGHTS, "missing", Q]),
    "one layer too many in config.json": (lambda f: edit_config(f, num_hidden_layers=3), [WEIGHTS, "layers.2."]),
    "only pickled weights": (
        lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"),
        [WEIGHTS, "no such file", "only safetensors"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name, small_folder):
    fault, says = FAULTS[name]
    fault(small_folder)
    with pytest.raises(CheckpointError) as refusal:
        load_model(small_folder)
    for words in [str(small_folder), *says]:
        assert words in str(refusal.value)


def test_no_folder(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        load_model(tmp_path / "nothing")


def test_unknown_dtype(small_folder):
    with pytest.raises(ValueError, match=r"'float8'.*bfloat16"):
        load_model(small_folder, "float8")


def test_what_may_be_ignored_is(small_folder):
    """An old checkpoint's rotary table, and a tied head that is stored all the same."""
    edit_config(small_folder, tie_word_embeddings=True)
    before = load_file(small_folder / WEIGHTS)
    edit_tensors(small_folder, lambda s: s.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    model = load_model(small_folder)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, before["model.embed_tokens.weight"])


def test_shards_and_one_file_are_alike(small_folder):
    whole = load_model(small_folder)
    shard(small_folder)
    for (name, a), b in zip(whole.named_parameters(), load_model(small_folder).parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), ["tokenizer.json", "no such file"]),
        (truncate("tokenizer.json", 100), ["tokenizer.json", "not a tokenizer"]),
        (lambda f: (f / "tokenizer.json").write_text('{"model": {"type": "BPE"}}'), ["tokenizer.json"]),
        (lambda f: (f / "tokenizer.json").write_bytes(b"\xff\xfe"), ["tokenizer.json"]),
        (truncate("tokenizer_config.json", 3), ["tokenizer_config.json", "JSON"]),
        (
            lambda f: (f / "tokenizer_config.json").write_text('{"chat_template": 3}'),
            ["tokenizer_config.json", "chat_template"],
        ),
    ],
)
def test_a_fault_of_the_tokenizer_is_named(fault, says, small_folder):
    Tokenizer(small_folder)
    fault(small_folder)
    with pytest.raises(CheckpointError) as refusal:
        Tokenizer(small_folder)
    for words in [str(small_folder), *says]:
        assert words in str(refusal.value)


def test_packed_weights_are_not_saved(small_folder, tmp_path):
    model = load_model(small_folder, "bfloat16")
    if model.lm_head.packed is None:
        pytest.skip("this build of torch packs no weights")
    with pytest.raises(ValueError, match="packed"):
        save_model(model, tmp_path, torch.bfloat16)
    assert not (tmp_path / WEIGHTS).exists()


def test_work_folder_leaves_nothing(tmp_path):
    path = tmp_path / "work"
    path.mkdir()
    (path / "of a killed run").touch()
    with pytest.raises(KeyboardInterrupt), work_folder(path) as work:
        assert list(work.iterdir()) == []
        (work / "half a file").touch()
        raise KeyboardInterrupt
    assert not path.exists()
