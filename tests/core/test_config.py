import json
import math
from dataclasses import fields

import pytest

from minillm.core.config import CHAPTER_SWITCHES, CHOICES, LAST_BUILT, EngineConfig
from minillm.core.model_config import ModelConfig


def model(max_position_embeddings=8192, **changes) -> ModelConfig:
    shape = dict(
        architecture="LlamaForCausalLM",
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    return ModelConfig(max_position_embeddings=max_position_embeddings, **(shape | changes))


@pytest.mark.parametrize("chapter", [-1, LAST_BUILT + 1, 16, True, False, 0.0, "0", None, math.nan])
def test_a_chapter_that_is_not_built(chapter):
    with pytest.raises(ValueError, match=f"chapter {chapter!r} is not built; built are 0 to {LAST_BUILT}"):
        EngineConfig.at_chapter(chapter)


def test_chapter_0_is_naive_attention_contiguous_kv_static_batching():
    config = EngineConfig.at_chapter(0)
    assert (config.attention_backend, config.kv_layout, config.batching) == ("naive", "contiguous", "static")


@pytest.mark.parametrize("chapter", range(LAST_BUILT + 1))
def test_each_chapter_adds_its_switches_to_those_before(chapter):
    expected = {}
    for n in range(chapter + 1):
        expected |= CHAPTER_SWITCHES.get(n, {})
    config = EngineConfig.at_chapter(chapter)
    assert {name: getattr(config, name) for name in expected} == expected
    assert config == EngineConfig().override(**expected), "a chapter changes nothing but its switches"


def test_the_latest_is_the_last_built():
    assert EngineConfig.latest(seed=3) == EngineConfig.at_chapter(LAST_BUILT, seed=3)


def test_overrides_win_over_the_chapter():
    config = EngineConfig.at_chapter(0, dtype="float64", max_num_seqs=3)
    assert (config.dtype, config.max_num_seqs, config.batching) == ("float64", 3, "static")
    assert config.override(max_num_seqs=4).max_num_seqs == 4
    assert config.max_num_seqs == 3, "override gives a copy"


@pytest.mark.parametrize("make", [EngineConfig.at_chapter, lambda _, **names: EngineConfig().override(**names)])
def test_an_unknown_name_is_refused_with_the_known_ones(make):
    with pytest.raises(ValueError, match="'max_seqs' is no engine argument") as error:
        make(0, max_seqs=3)
    assert all(f.name in str(error.value) for f in fields(EngineConfig))


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("value", ["", "no such", None, 0, True, ["naive"]])
def test_a_bad_choice_is_refused_with_the_known_ones(name, value):
    with pytest.raises(ValueError) as error:
        EngineConfig(**{name: value})
    assert f"{name} is {value!r}" in str(error.value)
    assert all(repr(choice) in str(error.value) for choice in CHOICES[name])


OPTIONAL = ("max_num_batched_tokens", "max_model_len", "kv_cache_memory_bytes", "num_gpu_blocks_override")


@pytest.mark.parametrize("name", ("max_num_seqs", "block_size", *OPTIONAL))
@pytest.mark.parametrize("value", [0, -1, True, 1.0, math.nan, "8", [8]])
def test_a_bad_size_is_refused(name, value):
    with pytest.raises(ValueError) as error:
        EngineConfig(**{name: value})
    assert f"{name} is {value!r}" in str(error.value)


@pytest.mark.parametrize("name", ["max_num_seqs", "block_size", "seed", "device"])
def test_these_cannot_be_left_out(name):
    with pytest.raises(ValueError, match=f"{name} is None"):
        EngineConfig(**{name: None})


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", value) for value in (-1, True, 1.0, "1")]
    + [("gpu_memory_utilization", value) for value in (0, -0.1, 1.01, math.nan, math.inf, True, "0.9", None)]
    + [("device", value) for value in ("", 0)],
)
def test_other_bad_values(name, value):
    with pytest.raises(ValueError) as error:
        EngineConfig(**{name: value})
    assert f"{name} is {value!r}" in str(error.value)


def test_what_vllm_calls_them_and_defaults_to():
    config = EngineConfig()
    assert (config.block_size, config.gpu_memory_utilization, config.seed) == (16, 0.9, 0)


# -- resolve --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "given", "length", "budget"),
    [
        (8192, {}, 2048, 2048),  # contiguous KV reserves max_model_len for each request, so not all of 8,192
        (512, {}, 512, 2048),
        (8192, {"max_model_len": 4096}, 4096, 4096),
        (8192, {"max_model_len": 8192}, 8192, 8192),
        (8192, {"max_model_len": 100}, 100, 2048),
        (8192, {"max_num_batched_tokens": 5000}, 2048, 5000),
        (8192, {"max_num_batched_tokens": 7}, 2048, 7),  # too small for this engine, but as told
    ],
)
def test_lengths_and_budget_of_contiguous_kv(positions, given, length, budget):
    config = EngineConfig.at_chapter(0, **given).resolve(model(positions))
    assert (config.max_model_len, config.max_num_batched_tokens) == (length, budget)


def test_a_length_above_the_models():
    with pytest.raises(ValueError, match=r"max_model_len is 8193; .* 8192"):
        EngineConfig(max_model_len=8193).resolve(model(8192))


@pytest.mark.parametrize("own", ["float32", "bfloat16"])
def test_dtype_is_the_models_unless_told(own):
    assert EngineConfig().resolve(model(dtype=own)).dtype == own
    assert EngineConfig(dtype="float64").resolve(model(dtype=own)).dtype == "float64"


def test_resolve_changes_nothing_else_and_settles():
    before = EngineConfig(max_num_seqs=5, seed=9, num_gpu_blocks_override=3)
    after = before.resolve(model())
    changed = {f.name for f in fields(before) if getattr(before, f.name) != getattr(after, f.name)}
    assert changed == {"max_model_len", "max_num_batched_tokens", "dtype"}
    assert after.resolve(model()) == after
    assert EngineConfig(**json.loads(json.dumps(after.to_dict()))) == after


# -- chunked prefill and prefix caches --------------------------------------------------------------------------------

PAGED = dict(kv_layout="paged", batching="iteration")


def test_vllms_switch_for_prefix_caching():
    base = EngineConfig(**PAGED)
    assert base.override(enable_prefix_caching=True).prefix_cache == "radix"
    assert base.override(enable_prefix_caching=False).prefix_cache == "none"
    hashed = base.override(prefix_cache="block_hash")
    assert hashed.override(enable_prefix_caching=True).prefix_cache == "block_hash", "there is one already"
    assert hashed.override(enable_prefix_caching=False).prefix_cache == "none"
    assert base.override(enable_prefix_caching=True, prefix_cache="block_hash").prefix_cache == "block_hash"
    for given, enabled in [("none", True), ("radix", False)]:
        with pytest.raises(
            ValueError, match=f"enable_prefix_caching is {enabled} and prefix_cache '{given}'; give one"
        ):
            base.override(enable_prefix_caching=enabled, prefix_cache=given)
    with pytest.raises(ValueError, match="enable_prefix_caching is 1; it must be True or False"):
        base.override(enable_prefix_caching=1)


@pytest.mark.parametrize(
    "choices, message",
    [
        (dict(prefix_cache="radix"), "prefix_cache is 'radix' with kv_layout 'contiguous'; it needs 'paged'"),
        (
            dict(enable_chunked_prefill=True),
            "enable_chunked_prefill is True with batching 'static'; it needs 'iteration'",
        ),
        (dict(enable_chunked_prefill=1), "enable_chunked_prefill is 1; it must be True or False"),
        (PAGED | dict(scheduling_policy="lpm"), "scheduling_policy is 'lpm' and prefix_cache 'none'"),
    ],
)
def test_what_does_not_go_together(choices, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**choices)


@pytest.mark.parametrize("chunked, device, budget", [(True, "cpu", 256), (True, "cuda", 8192), (False, "cpu", 8192)])
def test_a_pass_is_short_where_prompts_may_be_cut_and_a_pass_takes_long(chunked, device, budget):
    config = EngineConfig(**PAGED, enable_chunked_prefill=chunked)
    assert config.resolve(model(), device).max_num_batched_tokens == budget
    assert config.override(max_num_batched_tokens=77).resolve(model(), device).max_num_batched_tokens == 77
