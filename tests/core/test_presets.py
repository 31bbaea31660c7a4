"""Shapes and roofline of well-known models and GPUs."""

import pytest

from minillm.core.cost import kv_bytes_per_token, step_cost
from minillm.core.model_config import ModelConfig
from minillm.core.presets import DEVICES, MODELS
from minillm.models.fetch import resolve


@pytest.mark.parametrize(
    ("name", "parameters"),  # as published, in millions
    [
        ("SmolLM2-135M", 134.5),
        ("Qwen3-0.6B", 596.0),
        ("Llama-2-7B", 6738.4),
        ("Llama-3-8B", 8030.3),
        ("Llama-3-70B", 70553.7),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name, parameters):
    assert MODELS[name].num_parameters / 1e6 == pytest.approx(parameters, abs=0.06)


@pytest.mark.parametrize(
    ("name", "kib"),
    [("tiny", 2), ("SmolLM2-135M", 22.5), ("Llama-2-7B", 512), ("Llama-3-8B", 128), ("Llama-3-70B", 320)],
)
def test_kv_bytes_per_token(name, kib):
    assert kv_bytes_per_token(MODELS[name], "bfloat16") == kib * 1024


def test_preset_of_the_embedded_model_is_its_own_config():
    config, preset = ModelConfig.from_folder(resolve("tiny")), MODELS["tiny"]
    assert config.num_parameters == preset.num_parameters
    for name in ("num_hidden_layers", "num_key_value_heads", "head_dim", "max_position_embeddings", "dtype"):
        assert getattr(config, name) == getattr(preset, name)


def test_decode_alone_is_starved_and_prefill_is_not():
    gpu, model = DEVICES["A100 80GB"], MODELS["Llama-2-7B"]
    assert gpu.ridge == pytest.approx(153, abs=0.1)
    alone = step_cost(model, [(1, 1024)], "flash", "bfloat16")
    assert alone.arithmetic_share(gpu) < 0.01
    # Every weight is read for one multiply and one add: about one operation a byte in two-byte weights.
    assert alone.intensity == pytest.approx(1, abs=0.1)
    assert alone.seconds(gpu) == pytest.approx(alone.hbm_bytes / gpu.bandwidth)
    prompt = step_cost(model, [(1024, 1024)], "flash", "bfloat16")
    assert prompt.intensity > gpu.ridge and prompt.arithmetic_share(gpu) == 1
