"""Our models against transformers', float32, on random checkpoints of every family."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from minillm.core.model_config import ModelConfig, RopeConfig
from minillm.models.layers.rotary import RotaryEmbedding, inverse_frequencies
from minillm.models.loader import load_model, save_model, tensors
from tests.models.checkpoints import CASES, run

TOLERANCE = 1e-4
every_case = pytest.mark.parametrize("case", CASES, indirect=True)


def difference(logits, reference) -> float:
    return (logits - reference).abs().max().item()


def whole(model, reference):
    return run(model, [reference.token_ids], [[len(reference.token_ids)]])[0]


@every_case
def test_whole_prompt(case):
    model, reference = case
    assert difference(whole(model, reference), reference.logits) < TOLERANCE


@every_case
def test_prefill_in_parts_then_decode(case):
    model, reference = case
    steps = [[13], [7]] + [[1]] * (len(reference.token_ids) - 20)
    (logits,) = run(model, [reference.token_ids], steps)
    assert difference(logits, reference.logits) < TOLERANCE


@every_case
def test_sequences_in_one_batch_do_not_touch(case):
    model, reference = case
    short = reference.token_ids[:9]  # causal: its logits are the first of the whole sequence's
    steps = [[10, 0], [10, 7], [1, 1], [len(reference.token_ids) - 21, 1]]
    long_logits, short_logits = run(model, [reference.token_ids, short], steps)
    assert difference(long_logits, reference.logits) < TOLERANCE
    assert difference(short_logits, reference.logits[:9]) < TOLERANCE


@every_case
def test_every_bias_and_norm_weight_matters(case):
    """Without any one of them parity fails: so the parity tests would notice it missing."""
    model, reference = case
    unnoticed, tried = [], []
    for name, parameter in model.named_parameters():
        neutral = 1.0 if name.endswith("norm.weight") else 0.0
        if not name.endswith(("norm.weight", ".bias")):
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        for part in range(len(getattr(module, "out_partitions", (0,)))):
            values = module.partition(parameter, part) if name.endswith(".bias") else parameter
            kept = values.clone()
            values.fill_(neutral)
            tried.append(f"{name}[{part}]")
            if difference(whole(model, reference), reference.logits) < 10 * TOLERANCE:
                unnoticed.append(tried[-1])
            values.copy_(kept)
    config = model.config
    per_layer = 2 + 2 * config.qk_norm + 3 * config.qkv_bias + config.o_bias + 3 * config.mlp_bias
    assert len(tried) == config.num_hidden_layers * per_layer + 1
    assert unnoticed == []


@every_case
def test_rope_scaling_and_windows_matter(case):
    model, reference = case
    config = model.config
    if config.rope.type != "default":
        kept = model.rotary
        model.rotary = RotaryEmbedding(RopeConfig(theta=config.rope.theta), config.head_dim, device="cpu")
        assert difference(whole(model, reference), reference.logits) > 10 * TOLERANCE
        model.rotary = kept
    for layer, window in enumerate(config.sliding_windows):
        attention = model.layers[layer].self_attn
        # One key more or less is noticed, and a window in a layer that has none.
        for wrong in [None, window - 1, window + 1] if window else [20]:
            attention.window = wrong
            assert difference(whole(model, reference), reference.logits) > 10 * TOLERANCE, (layer, wrong)
        attention.window = window


def test_cases_cover_what_they_claim(references):
    configs = [ModelConfig.from_folder(references(name).folder) for name in CASES]
    assert {c.architecture for c in configs} == {f"{f}ForCausalLM" for f in ("Llama", "Mistral", "Qwen2", "Qwen3")}
    assert {c.num_attention_heads // c.num_key_value_heads for c in configs} == {1, 2, 4}
    assert any(c.num_key_value_heads == 1 for c in configs)
    assert {c.head_dim for c in configs} >= {40, 64, 80, 96}
    assert {c.rope.type for c in configs} == {"default", "linear", "llama3", "yarn"}
    assert {c.tie_word_embeddings for c in configs} == {True, False}
    assert any(None in c.sliding_windows and set(c.sliding_windows) != {None} for c in configs)
    assert len(list(references("llama-sharded").folder.glob("model-*.safetensors"))) > 1


@every_case
def test_number_of_parameters(case):
    model, _ = case
    assert model.config.num_parameters == sum(p.numel() for p in model.parameters())  # a tied head is listed once


@every_case
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_and_load_keep_every_bit(case, dtype, tmp_path):
    """What we save equals what transformers saved, tensor for tensor, and loads to the same parameters."""
    model, reference = case
    save_model(model, tmp_path, getattr(torch, dtype))
    ours = load_file(tmp_path / "model.safetensors")
    theirs = {name: tensor.to(getattr(torch, dtype)) for name, tensor, _ in tensors(reference.folder)}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    (tmp_path / "config.json").write_text((reference.folder / "config.json").read_text())
    again = load_model(tmp_path, "float32")
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a.to(getattr(torch, dtype)).float(), b), name


ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "yarn-no-truncation": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10000.0), (80, 500.0), (6, 1e6)])
def test_rope_tables(name, head_dim, theta, small_config):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = small_config | {"head_dim": head_dim, "max_position_embeddings": 256}
    settings["rope_parameters"] = ROPES[name] | {"rope_theta": theta}
    ours = ModelConfig.from_dict(settings).rope
    theirs = LlamaRotaryEmbedding(LlamaConfig(**{**settings, "rope_parameters": dict(settings["rope_parameters"])}))

    inv_freq, factor = inverse_frequencies(ours, head_dim)
    torch.testing.assert_close(inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-9)
    positions = torch.arange(256)
    cos, sin = RotaryEmbedding(ours, head_dim, device="cpu").tables(positions, torch.float32)
    want_cos, want_sin = theirs(torch.zeros(1), positions[None])
    torch.testing.assert_close(cos[:, 0], want_cos[0], rtol=0, atol=1e-4)
    half = head_dim // 2
    torch.testing.assert_close(sin[:, 0, half:], want_sin[0, :, half:], rtol=0, atol=1e-4)
    assert torch.equal(sin[:, 0, :half], -sin[:, 0, half:])  # the rotation's minus sign is in the table
