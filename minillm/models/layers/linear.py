"""Linear layers. Every matrix product of a model goes through a LinearMethod.

Tensor parallelism, LoRA, quantization and CPU weight packing all hang on the four calls of LinearMethod, so a model
file never learns which of them is in use. Projections that read the same input are merged into one matrix
(q, k, v; gate, up): one call and one pass over the input.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LinearMethod:
    """How a Linear stores its weight and multiplies by it. This one: as loaded, ``x @ W.T + b``."""

    def create(self, layer: Linear, dtype: torch.dtype, device: torch.device) -> None:
        """Register the parameters that a checkpoint fills: weight [out, in], bias [out] if the layer has one."""
        out, inp = layer.out_features, layer.in_features
        layer.weight = _parameter(out, inp, dtype=dtype, device=device)
        layer.bias = _parameter(out, dtype=dtype, device=device) if layer.has_bias else None

    def load_shard(self, layer: Linear, name: str, shard: int, tensor: Tensor) -> None:
        """Copy checkpoint tensor ``name`` ("weight" or "bias") into partition ``shard`` of the merged parameter."""
        target = layer.partition(getattr(layer, name), shard)
        if target.shape != tensor.shape:
            raise ValueError(f"shape {list(tensor.shape)}, wanted {list(target.shape)}")
        target.copy_(tensor)

    def process_after_loading(self, layer: Linear) -> None:
        """Called once when every shard is in place."""

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return F.linear(x, layer.weight, layer.bias)


class PackedLinearMethod(LinearMethod):
    """bfloat16 on a CPU: the weight re-ordered once into oneDNN's blocked layout, which every call would else redo.

    Falls back to the plain product where this build of torch has no such operator or it disagrees with F.linear.
    """

    def process_after_loading(self, layer: Linear) -> None:
        if packing_available():
            # The plain weight is dropped: two copies of every matrix would double the model's memory.
            layer.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), 16)
            layer.weight = None

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        if layer.packed is None:
            return super().apply(layer, x)
        return torch.ops.mkldnn._linear_pointwise(x, layer.packed, layer.bias, "none", [], "")


def linear_method_for(dtype: torch.dtype, device: torch.device) -> LinearMethod:
    """The method for unquantized weights of this dtype on this device."""
    if dtype == torch.bfloat16 and device.type == "cpu":
        return PackedLinearMethod()
    return LinearMethod()


@cache
def packing_available() -> bool:
    """Whether oneDNN's packed linear works here: private operators, so they are tried before they are trusted."""
    try:
        if not torch.backends.mkldnn.is_available():
            return False
        generator = torch.Generator().manual_seed(0)
        w = torch.randn(48, 32, generator=generator).bfloat16()
        x = torch.randn(3, 32, generator=generator).bfloat16()
        packed = torch.ops.mkldnn._reorder_linear_weight(w, 16)
        got = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return torch.allclose(got.float(), F.linear(x, w).float(), rtol=2e-2, atol=2e-2)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


class Linear(nn.Module):
    """x [..., in_features] -> [..., sum(out_partitions)]; the partitions are projections merged into one matrix."""

    def __init__(self, in_features, out_partitions, *, bias=False, method, dtype, device):
        super().__init__()
        self.in_features = in_features
        self.out_partitions = tuple(out_partitions)
        self.out_features = sum(self.out_partitions)
        self.has_bias = bias
        self.packed: Tensor | None = None
        self.method: LinearMethod = method
        method.create(self, dtype, device)

    def partition(self, merged: Tensor, shard: int) -> Tensor:
        """The rows of a merged parameter [out, ...] that belong to one projection, as a view."""
        return merged.split(self.out_partitions, dim=0)[shard]

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(self, x)


def _parameter(*shape, dtype, device) -> nn.Parameter:
    # Serving needs no gradients; training asks for them with model.requires_grad_().
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
