"""The cost model against numbers worked out by hand."""

import pytest

from minillm.core.cost import StepCost, kv_bytes_per_token, step_cost
from minillm.core.kv_spec import FullAttentionSpec
from minillm.core.model_config import ModelConfig


def shape(layers, heads, kv_heads, head_dim, hidden, intermediate, vocab, **more) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
        **more,
    )


LLAMA2_7B = shape(32, 32, 32, 128, 4096, 11008, 32000)
LLAMA2_70B = shape(80, 64, 8, 128, 8192, 28672, 32000)
LLAMA3_8B = shape(32, 32, 8, 128, 4096, 14336, 128256)
SMOLLM2_135M = shape(30, 9, 3, 64, 576, 1536, 49152, tie_word_embeddings=True)
QWEN3_06B = shape(28, 16, 8, 128, 1024, 3072, 151936, tie_word_embeddings=True, qk_norm=True)
QWEN2_05B = shape(24, 14, 2, 64, 896, 4864, 151936, tie_word_embeddings=True, qkv_bias=True)
TINY = shape(4, 8, 4, 32, 256, 768, 2048, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("model", "dtype", "kib"),
    [
        (LLAMA2_7B, "float16", 512),  # half a MiB: a 2,048-token request holds 1 GiB
        (LLAMA2_7B, "float32", 1024),
        (LLAMA2_70B, "float16", 320),
        (LLAMA3_8B, "bfloat16", 128),
        (SMOLLM2_135M, "bfloat16", 22.5),
        (SMOLLM2_135M, "float64", 90),
        (QWEN3_06B, "bfloat16", 112),
        (TINY, "float32", 4),
    ],
)
def test_kv_bytes_per_token(model, dtype, kib):
    assert kv_bytes_per_token(model, dtype) == kib * 1024
    layer = FullAttentionSpec(model.num_key_value_heads, model.head_dim, dtype)
    assert layer.bytes_per_token * model.num_hidden_layers == kib * 1024


def test_a_spec_says_what_a_token_stores():
    spec = FullAttentionSpec(num_kv_heads=3, head_dim=64, dtype="bfloat16")
    assert spec.rows == {"k": ((3, 64), "bfloat16"), "v": ((3, 64), "bfloat16")}
    assert spec.bytes_per_token == 2 * 3 * 64 * 2
    assert spec == FullAttentionSpec(3, 64, "bfloat16"), "layers of equal spec form a group"
    assert len({spec, FullAttentionSpec(3, 64, "bfloat16"), FullAttentionSpec(3, 64, "float32")}) == 2


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (LLAMA2_7B, 6_738_415_616),
        (LLAMA2_70B, 68_976_648_192),
        (LLAMA3_8B, 8_030_261_248),
        (SMOLLM2_135M, 134_515_008),
        (QWEN3_06B, 596_049_920),
        (QWEN2_05B, 494_032_768),
    ],
)
def test_parameter_counts_as_published(model, parameters):
    assert model.num_parameters == parameters


# Small enough for paper. Projections: q 6×8, k and v 6×4, o 8×6, so 144; MLP 3·6·10 = 180; two norms of 6.
# Two layers of 336, final norm 6: 678. Embedding 20·6 = 120.
TIED = shape(2, 2, 1, 4, 6, 10, 20, tie_word_embeddings=True)
UNTIED = shape(2, 2, 1, 4, 6, 10, 20)
KV = 2 * 2 * 1 * 4  # elements per token: K and V, layers, KV heads, head dim


@pytest.mark.parametrize("model", [TIED, UNTIED])
def test_the_embedding_table_is_read_once_as_the_heads_matrix(model):
    assert model.num_parameters == 678 + (120 if model is TIED else 240)
    cost = step_cost(model, [(1, 1)], "flash", "float16")
    assert cost.weight_bytes == (678 + 120) * 2


def test_one_token_of_one_request():
    cost = step_cost(TIED, [(1, 5)], "naive", "float32")
    assert cost == StepCost(
        weight_bytes=798 * 4,
        kv_bytes=(5 + 1) * KV * 4,  # five rows read, one written
        scratch_bytes=4 * 2 * 5 * 4 * 2,  # four moves, heads, scores, bytes, layers
        flops=2 * 678 + 2 * 120 + 4 * 2 * 4 * 5 * 2,  # layers and norms, head, QK and PV
    )
    assert cost.hbm_bytes == 3192 + 384 + 320


def test_a_batch_of_a_prompt_and_a_decode():
    cost = step_cost(TIED, [(4, 4), (1, 7)], "naive", "float16")
    assert cost.weight_bytes == 798 * 2, "read once, whatever the batch"
    assert cost.kv_bytes == (4 + 4 + 7 + 1) * KV * 2
    assert cost.scratch_bytes == 4 * 2 * (4 * 4 + 1 * 7) * 4 * 2, "scores are float32 even for float16"
    # Only the last token of each request needs the head.
    assert cost.flops == 2 * 678 * 5 + 2 * 120 * 2 + 4 * 2 * 4 * (4 * 4 + 1 * 7) * 2


def test_scores_of_float64_are_float64():
    assert step_cost(TIED, [(1, 5)], "naive", "float64").scratch_bytes == 4 * 2 * 5 * 8 * 2


def test_other_attention_keeps_scores_on_chip():
    naive, flash = (step_cost(TIED, [(16, 64)], name, "float32") for name in ("naive", "flash"))
    assert flash.scratch_bytes == 0 < naive.scratch_bytes
    assert (flash.weight_bytes, flash.kv_bytes) == (naive.weight_bytes, naive.kv_bytes)


def test_only_naive_attention_computes_masked_scores():
    """So a prompt costs the same operations whole and in chunks."""
    naive, flash = (step_cost(TIED, [(16, 64)], name, "float32") for name in ("naive", "flash"))
    per_pair = 4 * 2 * 4 * 2  # QK and PV, heads, head dim, layers
    assert naive.flops - flash.flops == per_pair * 16 * 15 // 2
    chunks = [step_cost(TIED, [(16, 16 * i)], "flash", "float32").flops for i in (1, 2, 3, 4)]
    head = 2 * 120  # of the last row of each pass
    assert sum(chunks) - 3 * head == step_cost(TIED, [(64, 64)], "flash", "float32").flops


def test_batching_decodes_saves_weights_and_nothing_else():
    """What every batching paper rests on."""
    alone = step_cost(LLAMA2_7B, [(1, 100)], "flash", "float16")
    together = step_cost(LLAMA2_7B, [(1, 100)] * 8, "flash", "float16")
    assert together.weight_bytes == alone.weight_bytes
    assert together.kv_bytes == 8 * alone.kv_bytes
    assert together.flops == 8 * alone.flops
