"""LinearMethods: merged partitions, and bfloat16 weights packed for a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minillm.models.layers import linear
from minillm.models.layers.linear import Linear, LinearMethod, PackedLinearMethod, linear_method_for
from minillm.models.loader import load_model
from tests.models.checkpoints import run

CPU = torch.device("cpu")


def random_linear(method, dtype, bias=True) -> tuple[Linear, list[torch.Tensor], list[torch.Tensor]]:
    """A merged Linear of 96 -> 64 + 32 + 32, loaded shard by shard, and its shards."""
    generator = torch.Generator().manual_seed(0)
    layer = Linear(96, (64, 32, 32), bias=bias, method=method, dtype=dtype, device=CPU)
    weights = [torch.randn(n, 96, generator=generator).to(dtype) * 0.1 for n in layer.out_partitions]
    biases = [torch.randn(n, generator=generator).to(dtype) for n in layer.out_partitions] if bias else []
    for shard, weight in enumerate(weights):
        method.load_shard(layer, "weight", shard, weight)
    for shard, value in enumerate(biases):
        method.load_shard(layer, "bias", shard, value)
    method.process_after_loading(layer)
    return layer, weights, biases


def test_a_merged_linear_is_its_parts_side_by_side():
    layer, weights, biases = random_linear(LinearMethod(), torch.float64)
    x = torch.randn(5, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], dim=-1)
    torch.testing.assert_close(layer(x), want)


def test_a_shard_of_a_wrong_shape():
    layer, weights, _ = random_linear(LinearMethod(), torch.float32)
    with pytest.raises(ValueError, match=r"\[32, 96\], wanted \[64, 96\]"):
        layer.method.load_shard(layer, "weight", 0, weights[1])


def test_which_method():
    assert isinstance(linear_method_for(torch.bfloat16, CPU), PackedLinearMethod)
    for dtype, device in [(torch.float32, CPU), (torch.float16, CPU), (torch.bfloat16, torch.device("cuda"))]:
        assert type(linear_method_for(dtype, device)) is LinearMethod


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 3, 64])
def test_packed_is_the_same_product(bias, rows):
    if not linear.packing_available():
        pytest.skip("this build of torch packs no weights")
    layer, weights, biases = random_linear(PackedLinearMethod(), torch.bfloat16, bias)
    assert layer.weight is None
    assert not any("weight" in name for name, _ in layer.named_parameters())
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    got = layer(x)
    want = F.linear(x.double(), torch.cat(weights).double(), torch.cat(biases).double() if bias else None)
    assert got.dtype == torch.bfloat16
    assert got.shape == want.shape
    # One rounding to bfloat16, 8 bits, of a float32 sum.
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-4)


def test_packed_takes_rows_of_a_larger_tensor():
    layer, *_ = random_linear(PackedLinearMethod(), torch.bfloat16)
    x = torch.randn(6, 192, generator=torch.Generator().manual_seed(1)).bfloat16()
    torch.testing.assert_close(layer(x[1:4, 96:]), layer(x[1:4, 96:].contiguous()))


def test_without_packing_the_weight_stays(monkeypatch):
    monkeypatch.setattr(linear, "packing_available", lambda: False)
    layer, weights, biases = random_linear(PackedLinearMethod(), torch.bfloat16)
    assert layer.packed is None
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(layer(x), F.linear(x, torch.cat(weights), torch.cat(biases)))


def test_a_model_in_bfloat16(references):
    """Packed and plain agree with float32 as far as bfloat16 goes, on a checkpoint with biases and tied embeddings."""
    reference = references("llama-biases-linear-tied")
    logits = run(load_model(reference.folder, "bfloat16"), [reference.token_ids], [[len(reference.token_ids)]])[0]
    assert logits.dtype == torch.bfloat16
    error = (logits.float() - reference.logits).norm() / reference.logits.norm()
    assert error < 0.03
