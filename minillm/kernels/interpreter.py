"""Triton's CPU interpreter, made to tell the truth: bfloat16 that computes, bounds that are checked, bytes counted.

Three things are mended (seen with Triton 3.6 and 3.9):

bfloat16   the interpreter keeps it as 16-bit patterns and does arithmetic on the patterns: no error, only garbage. Here
           every operation is done in float32 and rounded to the nearest bfloat16, ties to even.
loops      with numpy from 2.4 on, ``range`` over a loaded number fails in Triton 3.6.
bounds     a load or store past its tensor reads a neighbour, or kills the process. Here it raises OutOfBounds with
           the tensor's name, the offset and the program.

``install`` mends the first two; inside ``watch`` every launch is checked and its traffic counted as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle


class OutOfBounds(RuntimeError):
    """An active lane of a load or store lies outside every tensor argument of the kernel."""


@dataclass
class Traffic:
    """Bytes that a kernel's active lanes loaded and stored, by the name of the tensor argument."""

    loads: Counter[str] = field(default_factory=Counter)
    stores: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.loads.total() + self.stores.total()


@dataclass(frozen=True)
class _Region:
    """Where a tensor argument lies: from its first element to the end of its last, strides and all."""

    name: str
    start: int
    end: int


_regions: list[_Region] = []  # of the launch that runs
_watchers: list[Traffic] = []


@contextmanager
def watch() -> Iterator[Traffic]:
    """Check the bounds of every launch inside, and count its bytes. May be nested: each counts what runs within it."""
    install()
    traffic = Traffic()
    _watchers.append(traffic)
    try:
        yield traffic
    finally:
        _watchers.remove(traffic)


def install() -> None:
    """Mend the interpreter of this process. Doing it again does nothing."""
    if getattr(InterpreterBuilder, "minillm_mended", False):
        return
    InterpreterBuilder.minillm_mended = True
    _mend_bfloat16()
    _mend_loops()
    _hook_memory()


def _mend_loops() -> None:
    original = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


# -- bfloat16 -------------------------------------------------------------------------------------------------------


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """uint16 patterns of bfloat16 -> float32, exactly: bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 -> uint16 patterns of the nearest bfloat16, ties to even; NaN stays NaN."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    # Half of the last kept bit, less one where that bit is 0: exactly a tie then rounds down to the even pattern.
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _is_bfloat16(value) -> bool:
    return isinstance(value, TensorHandle) and value.dtype.scalar == tl.bfloat16


def _wide(value):
    return TensorHandle(bfloat16_to_float32(value.data), tl.float32) if _is_bfloat16(value) else value


def _narrow(value: TensorHandle) -> TensorHandle:
    return TensorHandle(float32_to_bfloat16(value.data), tl.bfloat16)


def _mend_bfloat16() -> None:
    builder = InterpreterBuilder

    def in_float32(original):
        def operation(self, *args):
            if not any(_is_bfloat16(arg) for arg in args):
                return original(self, *args)
            result = original(self, *(_wide(arg) for arg in args))
            return result if result.data.dtype == np.bool_ else _narrow(result)  # a comparison has no bfloat16

        return operation

    for name in ("binary_op", "unary_op", "create_fma", "create_erf", "create_rsqrt", "create_clampf"):
        setattr(builder, name, in_float32(getattr(builder, name)))

    dot, cast = builder.create_dot, builder.cast_impl
    builder.create_dot = lambda self, a, b, d, *more: dot(self, _wide(a), _wide(b), d, *more)

    def mended_cast(self, source, target, *_):
        if target.scalar == tl.bfloat16 and not _is_bfloat16(source):
            return _narrow(source)
        if _is_bfloat16(source) and target.scalar != tl.bfloat16:
            wide = _wide(source)
            return wide if target.scalar == tl.float32 else cast(self, wide, target)
        return cast(self, source, target)

    builder.cast_impl = mended_cast
    to_float = builder.create_fp_to_fp

    def mended_fp_to_fp(self, source, target, rounding):
        if _is_bfloat16(source) or target.scalar == tl.bfloat16:
            return mended_cast(self, source, target)
        return to_float(self, source, target, rounding)

    builder.create_fp_to_fp = mended_fp_to_fp

    check = interpreter.ReduceScanOpInterface.check_tensor

    def mended_check(self, inputs):
        check(self, inputs)
        if any(x.dtype == tl.bfloat16 for x in inputs):
            raise TypeError("the interpreter cannot reduce bfloat16; cast it to float32 first, as a kernel should")

    interpreter.ReduceScanOpInterface.check_tensor = mended_check


# -- bounds and bytes -----------------------------------------------------------------------------------------------


def _hook_memory() -> None:
    builder = InterpreterBuilder
    load, store, launch = builder.create_masked_load, builder.create_masked_store, GridExecutor.__call__

    def watched_load(self, ptrs, mask, *more):
        _account(ptrs, mask, "load")
        return load(self, ptrs, mask, *more)

    def watched_store(self, ptrs, value, mask, *more):
        _account(ptrs, mask, "store")
        return store(self, ptrs, value, mask, *more)

    def watched_launch(self, *args, **kwargs):
        if not _watchers:
            return launch(self, *args, **kwargs)
        outer = _regions[:]
        named = [*zip(self.arg_names, args, strict=False), *kwargs.items()]
        _regions[:] = [_region(name, arg) for name, arg in named if isinstance(arg, torch.Tensor)]
        try:
            return launch(self, *args, **kwargs)
        finally:
            _regions[:] = outer

    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    GridExecutor.__call__ = watched_launch


def _region(name: str, tensor: torch.Tensor) -> _Region:
    span = 0
    if tensor.numel():
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        span = (last + 1) * tensor.element_size()
    return _Region(name, tensor.data_ptr(), tensor.data_ptr() + span)


def _account(ptrs: TensorHandle, mask: TensorHandle, kind: str) -> None:
    if not _watchers or not _regions:
        return
    active = np.asarray(ptrs.data)[np.broadcast_to(mask.data.astype(bool), ptrs.data.shape)].astype(np.int64).ravel()
    size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
    left = np.ones(active.shape, dtype=bool)
    for region in _regions:
        inside = left & (active >= region.start) & (active + size <= region.end)
        count = int(inside.sum())
        if count:
            for traffic in _watchers:
                (traffic.loads if kind == "load" else traffic.stores)[region.name] += count * size
            left &= ~inside
    if left.any():
        address = int(active[left][0])
        nearest = min(_regions, key=lambda r: min(abs(address - r.start), abs(address - r.end)))
        raise OutOfBounds(
            f"{kind}: {int(left.sum())} of {active.size} active lanes lie outside every tensor; the first is "
            f"{address - nearest.start} bytes from the start of {nearest.name!r}, which has "
            f"{nearest.end - nearest.start}; program {interpreter.interpreter_builder.grid_idx}"
        )
