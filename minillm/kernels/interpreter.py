"""Triton's CPU interpreter, made to tell the truth: bfloat16 that computes, bounds that are checked, bytes counted.

Three things are mended (seen with Triton 3.6 and 3.9):

bfloat16   the interpreter keeps it as 16-bit patterns and does arithmetic on the patterns: no error, only garbage. Here
           every operation is done in float32 and rounded to the nearest bfloat16, ties to even.
loops      with numpy from 2.4 on, ``range`` over a loaded number fails in Triton 3.6.
bounds     a load or store past its tensor reads a neighbour, or kills the process. Here it raises OutOfBounds with
           the tensor's name, the offset and the program.

``install`` mends the first two, and the file of every kernel calls it; inside ``watch`` every launch is checked and its
traffic counted as well. Pointers that reach a kernel as numbers, inside another tensor, are unknown to ``watch``.
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
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.tools.tensor_descriptor import TensorDescriptor


class OutOfBounds(RuntimeError):
    """An active lane of a load, store or atomic lies outside every tensor argument of the kernel."""


@dataclass(eq=False)  # two watches that have counted the same are still two
class Traffic:
    """Bytes that a kernel's active lanes loaded and stored, by the name of the tensor argument.

    Where arguments overlap, the first one that holds the address is charged. An atomic is a load and a store.
    """

    loads: Counter[str] = field(default_factory=Counter)
    stores: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.loads.total() + self.stores.total()


_regions: list[_Region] = []  # of the launch that runs
_watchers: list[Traffic] = []


@contextmanager
def watch() -> Iterator[Traffic]:
    """Check the bounds of every launch inside, and count its bytes. May be nested: each counts what runs within it."""
    if not interpreting():
        raise RuntimeError("kernels are compiled in this process; set TRITON_INTERPRET=1 before Triton's first import")
    install()
    traffic = Traffic()
    _watchers.append(traffic)
    try:
        yield traffic
    finally:
        _watchers.remove(traffic)


def interpreting() -> bool:
    """Whether kernels are interpreted in this process. Triton decides it at its first import, for its own ones too."""
    return isinstance(tl.cdiv, InterpretedFunction)


def install() -> None:
    """Mend the interpreter of this process. Done again, or where kernels are compiled, it does nothing."""
    if not interpreting() or getattr(InterpreterBuilder, "minillm_mended", False):
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

    # A constant; the interpreter has them of every type but this.
    builder.get_bf16 = lambda self, value: _narrow(TensorHandle(np.array([value], dtype=np.float32), tl.float32))

    dot, cast, to_float = builder.create_dot, builder.cast_impl, builder.create_fp_to_fp
    builder.create_dot = lambda self, a, b, d, *more: dot(self, _wide(a), _wide(b), d, *more)

    def mended_cast(self, source, target, *_):
        if target.scalar == tl.bfloat16 and not _is_bfloat16(source):
            return _narrow(source)
        if _is_bfloat16(source) and target.scalar != tl.bfloat16:
            wide = _wide(source)
            return wide if target.scalar == tl.float32 else cast(self, wide, target)
        return cast(self, source, target)

    def mended_fp_to_fp(self, source, target, rounding):  # between formats of which one has no type in numpy
        if target.scalar == tl.bfloat16 and source.dtype.scalar.is_fp8():
            return _narrow(to_float(self, source, tl.float32, rounding))
        if target.scalar.is_fp8():
            return to_float(self, _wide(source), target, rounding)
        if _is_bfloat16(source) or target.scalar == tl.bfloat16:
            return mended_cast(self, source, target)
        return to_float(self, source, target, rounding)

    builder.cast_impl, builder.create_fp_to_fp = mended_cast, mended_fp_to_fp

    check = interpreter.ReduceScanOpInterface.check_tensor

    def mended_check(self, inputs):
        check(self, inputs)
        if any(x.dtype == tl.bfloat16 for x in inputs):
            raise TypeError("the interpreter cannot reduce bfloat16; cast it to float32 first, as a kernel should")

    interpreter.ReduceScanOpInterface.check_tensor = mended_check
    atomic = builder.create_atomic_rmw

    def mended_atomic(self, operation, ptr, value, *more):
        if _is_bfloat16(value):
            raise TypeError("the interpreter has no atomics on bfloat16; accumulate in float32, as a kernel should")
        return atomic(self, operation, ptr, value, *more)

    builder.create_atomic_rmw = mended_atomic


# -- bounds and bytes -----------------------------------------------------------------------------------------------


class _Region:
    """The bytes of one tensor argument, exactly: a strided view holds its own elements, not what lies between them."""

    def __init__(self, name: str, tensor: torch.Tensor):
        self.name = name
        self.itemsize = tensor.element_size()
        dims = [(s * self.itemsize, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1 and s > 0]
        last = sum(stride * (n - 1) for stride, n in dims)
        self.start = tensor.data_ptr()
        self.end = self.start + (last + self.itemsize if tensor.numel() else 0)
        dense = self.end - self.start == tensor.numel() * self.itemsize
        self.dims = [] if dense else sorted(dims, reverse=True)

    def holds(self, addresses: np.ndarray) -> np.ndarray:
        inside = (addresses >= self.start) & (addresses < self.end)
        if self.dims and inside.any():
            rest = addresses - self.start
            for stride, n in self.dims:  # the index in each dimension, largest stride first
                rest -= np.minimum(rest // stride, n - 1) * stride
            inside &= rest < self.itemsize
        return inside

    def distance(self, address: int) -> int:
        return max(self.start - address, address - self.end, 0)


def _regions_of(name: str, arg) -> Iterator[_Region]:
    """Of a tensor, a tensor descriptor, or a tuple of such."""
    if isinstance(arg, tuple):
        for i, part in enumerate(arg):
            yield from _regions_of(f"{name}[{i}]", part)
    elif isinstance(arg, TensorDescriptor):
        yield from _regions_of(name, arg.base)
    elif hasattr(arg, "data_ptr"):
        yield _Region(name, getattr(arg, "base", arg))  # triton.reinterpret wraps a tensor as .base


def _hook_memory() -> None:
    builder = InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    update, swap = builder.create_atomic_rmw, builder.create_atomic_cas
    prepare, launch = GridExecutor._init_args_hst, GridExecutor.__call__

    def watched_load(self, ptrs, mask, *more, **named):
        _account(ptrs, mask, "load")
        return load(self, ptrs, mask, *more, **named)

    def watched_store(self, ptrs, value, mask, *more, **named):
        _account(ptrs, mask, "store")
        return store(self, ptrs, value, mask, *more, **named)

    def watched_update(self, operation, ptr, value, mask, *more):
        _account(ptr, mask, "load")
        _account(ptr, mask, "store")
        return update(self, operation, ptr, value, mask, *more)

    def watched_swap(self, ptr, *more):
        _account(ptr, True, "load")
        _account(ptr, True, "store")
        return swap(self, ptr, *more)

    def watched_prepare(self, args, kwargs):
        # The arguments as the kernel sees them: those of a GPU have been copied to the host by now.
        args, kwargs = prepare(self, args, kwargs)
        if _watchers:
            named = [*zip(self.arg_names, args, strict=False), *kwargs.items()]
            _regions[:] = [region for name, arg in named for region in _regions_of(name, arg)]
        return args, kwargs

    def watched_launch(self, *args, **kwargs):
        if not _watchers:
            return launch(self, *args, **kwargs)
        outer = _regions[:]
        try:
            return launch(self, *args, **kwargs)
        except InterpreterError as error:  # of which the interpreter makes one at each level of calls
            cause = error
            while cause is not None and not isinstance(cause, OutOfBounds):
                cause = cause.__cause__
            if cause is None:
                raise
            raise cause from None
        finally:
            _regions[:] = outer

    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    builder.create_atomic_rmw, builder.create_atomic_cas = watched_update, watched_swap
    GridExecutor._init_args_hst, GridExecutor.__call__ = watched_prepare, watched_launch


def _account(ptrs: TensorHandle, mask, kind: str) -> None:
    """``mask``: a handle, or the bare booleans that a tensor descriptor gives."""
    if not _watchers:
        return
    mask = np.asarray(mask.data if isinstance(mask, TensorHandle) else mask, dtype=bool)
    active = ptrs.data[np.broadcast_to(mask, ptrs.data.shape)].astype(np.int64)
    size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
    left = active
    for region in _regions:
        if not left.size:
            return
        inside = region.holds(left) & region.holds(left + (size - 1))
        if count := int(inside.sum()):
            for traffic in _watchers:
                (traffic.loads if kind == "load" else traffic.stores)[region.name] += count * size
            left = left[~inside]
    if left.size:
        address = int(left[0])
        message = f"{kind}: {left.size} of {active.size} active lanes lie outside every tensor"
        if _regions:
            nearest = min(_regions, key=lambda region: region.distance(address))
            message += f"; the first is {address - nearest.start} bytes from the start of {nearest.name!r}, "
            message += f"which spans {nearest.end - nearest.start} bytes"
        raise OutOfBounds(f"{message}; program {interpreter.interpreter_builder.grid_idx}")
