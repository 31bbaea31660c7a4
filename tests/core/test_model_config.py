"""config.json: old and new style, defaults as in transformers, and refusals that name file and field."""

from __future__ import annotations

import json

import pytest

from minillm.core.model_config import CheckpointError, ModelConfig, RopeConfig
from tests.models.checkpoints import BASE

LLAMA = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **BASE}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def parse(**changes) -> ModelConfig:
    """LLAMA with some fields changed; a value of ``...`` takes the field out."""
    settings = {name: value for name, value in {**LLAMA, **changes}.items() if value is not ...}
    return ModelConfig.from_dict(json.loads(json.dumps(settings)), source="some/config.json")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"])
@pytest.mark.parametrize(
    ("kind", "scaling"), [("default", {}), ("linear", {"factor": 2.0}), ("llama3", LLAMA3), ("yarn", YARN)]
)
@pytest.mark.parametrize("type_name", ["type", "rope_type"])
def test_old_and_new_style_are_one(architecture, kind, scaling, type_name):
    new = parse(
        architectures=[architecture], rope_parameters={"rope_type": kind, "rope_theta": 5e5, **scaling}, dtype="float16"
    )
    old = parse(
        architectures=[architecture],
        rope_parameters=...,
        rope_theta=5e5,
        rope_scaling={type_name: kind, **scaling} if scaling else None,
        dtype=...,
        torch_dtype="float16",
    )
    assert old == new
    assert (new.rope.theta, new.rope.type, new.dtype) == (5e5, kind, "float16")


def test_rope_defaults():
    assert parse(rope_parameters=...).rope == RopeConfig(theta=10000.0)
    assert parse(rope_parameters=..., rope_theta=1000000).rope == RopeConfig(theta=1e6)  # a whole number is one too
    # Without factor or original length yarn derives them from max_position_embeddings, 64 in BASE.
    yarn = parse(rope_parameters={"rope_type": "yarn", "original_max_position_embeddings": 16}).rope
    assert (yarn.factor, yarn.original_max_position_embeddings) == (4.0, 16)


FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "fields", [(), ("head_dim",), ("num_key_value_heads",), ("rms_norm_eps", "tie_word_embeddings")]
)
def test_absent_fields_mean_what_they_mean_to_transformers(family, fields):
    import transformers

    settings = {**BASE, "num_attention_heads": 32, "num_key_value_heads": 4, "hidden_size": 256}
    for field in fields:
        del settings[field]
    theirs = getattr(transformers, f"{family}Config")(**json.loads(json.dumps(settings)))
    ours = ModelConfig.from_dict({**settings, "architectures": [f"{family}ForCausalLM"]})
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.sliding_windows == ((theirs.sliding_window,) * 2 if family == "Mistral" else (None, None))


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 8},
        {"sliding_window": 8, "use_sliding_window": True},  # from layer 28 on: none here
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": 1},
        {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0},
        {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
    ],
)
def test_windows_of_qwen(family, changes):
    import transformers

    theirs = getattr(transformers, f"{family}Config")(**json.loads(json.dumps({**BASE, **changes})))
    want = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types)
    assert ModelConfig.from_dict({**BASE, **changes, "architectures": [f"{family}ForCausalLM"]}).sliding_windows == want


def test_null_is_absent_but_for_windows():
    assert parse(num_key_value_heads=None).num_key_value_heads == 4
    assert parse(architectures=["MistralForCausalLM"], num_key_value_heads=None).num_key_value_heads == 4
    assert parse(architectures=["MistralForCausalLM"], sliding_window=None).sliding_windows == (None, None)


@pytest.mark.parametrize(
    ("config", "generation", "want"),
    [
        ({"eos_token_id": 3}, None, (3,)),
        ({"eos_token_id": [3, 5]}, None, (3, 5)),
        ({"eos_token_id": 3}, {"eos_token_id": [7, 9]}, (7, 9)),
        ({"eos_token_id": 3}, {"eos_token_id": 4}, (4,)),
        ({"eos_token_id": 3}, {"temperature": 0.6}, (3,)),
        ({"eos_token_id": None}, {"eos_token_id": None}, ()),
        ({}, None, ()),
    ],
)
def test_end_tokens_come_from_generation_config(tmp_path, config, generation, want):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == want


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["BertModel"]}, ["architectures", "'BertModel'", "Llama", "Mistral", "Qwen2", "Qwen3"]),
        ({"architectures": ...}, ["architectures", "Qwen3ForCausalLM"]),
        ({"architectures": [["LlamaForCausalLM"]]}, ["architectures"]),
        ({"vocab_size": ...}, ["vocab_size", "missing"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'", "whole number"]),
        ({"hidden_size": 64.0}, ["hidden_size", "64.0"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "divide"]),
        ({"hidden_size": 66, "head_dim": ...}, ["hidden_size", "multiple of 4"]),
        ({"head_dim": 15}, ["head_dim", "even"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "true or false"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config"]),
        ({"dtype": "int8"}, ["dtype", "'int8'", "bfloat16"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id"]),
        ({"eos_token_id": [1, -1]}, ["eos_token_id"]),
        ({"bos_token_id": 1.5}, ["bos_token_id"]),
        ({"rope_parameters": "linear"}, ["rope_parameters"]),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["rope_type", "'dynamic'", "llama3, yarn"]),
        ({"rope_parameters": ..., "rope_scaling": {"type": "longrope"}}, ["rope_scaling.rope_type", "'longrope'"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["rope_parameters: factor", "missing"]),
        ({"rope_parameters": {"rope_theta": 1.0}}, ["rope_theta"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}}, ["low_freq_factor"]),
        ({"rope_parameters": {**LLAMA3, "rope_type": "llama3", "low_freq_factor": 4.0}}, ["high_freq_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["rope_parameters.full_attention"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, ["sliding_window"]),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
            ["layer_types", "list 2"],
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": "1"},
            ["max_window_layers"],
        ),
    ],
)
def test_refusals_name_file_and_field(changes, says):
    with pytest.raises(CheckpointError) as refusal:
        parse(**changes)
    for words in ["some/config.json", *says]:
        assert words in str(refusal.value)


def test_a_wrong_generation_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        ModelConfig.from_folder(tmp_path)
