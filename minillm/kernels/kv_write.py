"""New tokens' K and V into their rows of the cache: vLLM's ``reshape_and_cache``, both in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels import HAS_TRITON
from minillm.kernels.ahead_of_time import CompileCase

if HAS_TRITON:
    import triton
    import triton.language as tl

    from minillm.kernels import interpreter

    interpreter.install()

    @triton.jit
    def kv_write_kernel(
        k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, stride_kt, stride_kh, stride_kd, stride_vt, stride_vh,
        stride_vd, stride_kr, stride_kg, stride_ke, stride_vr, stride_vg, stride_ve,
        NUMBERS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Grid: (tokens, parts of a row of NUMBERS = Hkv · D)."""
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slot_ptr + token)  # int64, and so is all that it is multiplied with
        if slot < 0:
            return
        number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        head, dim = (number // HEAD_DIM).to(tl.int64), number % HEAD_DIM
        inside = number < NUMBERS
        k = tl.load(k_ptr + token * stride_kt + head * stride_kh + dim * stride_kd, mask=inside)
        tl.store(k_cache_ptr + slot * stride_kr + head * stride_kg + dim * stride_ke, k, mask=inside)
        v = tl.load(v_ptr + token * stride_vt + head * stride_vh + dim * stride_vd, mask=inside)
        tl.store(v_cache_ptr + slot * stride_vr + head * stride_vg + dim * stride_ve, v, mask=inside)


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store k and v [T, Hkv, D] in rows ``slot_mapping`` int64 [T] of the caches [num_rows, Hkv, D], in Triton.

    A token of slot −1 is padding and stored nowhere. No two tokens may have one slot.
    """
    _check(k, v, k_cache, v_cache, slot_mapping)
    numbers = k[0].numel() if len(k) else 0
    block = min(1024, triton.next_power_of_2(numbers))
    kv_write_kernel[(len(k), triton.cdiv(numbers, block) if numbers else 0)](
        k, v, k_cache, v_cache, slot_mapping, *k.stride(), *v.stride(), *k_cache.stride(), *v_cache.stride(),
        NUMBERS=numbers, HEAD_DIM=k.shape[2], BLOCK=block,
    )  # fmt: skip


def kv_write_torch(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """The twin."""
    _check(k, v, k_cache, v_cache, slot_mapping)
    stored = slot_mapping >= 0
    k_cache[slot_mapping[stored]] = k[stored]
    v_cache[slot_mapping[stored]] = v[stored]


def _check(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    same = k.shape == v.shape and k_cache.shape == v_cache.shape and k.shape[1:] == k_cache.shape[1:]
    if not same or slot_mapping.shape != k.shape[:1]:
        raise ValueError(
            f"k and v [T, Hkv, D], caches [rows, Hkv, D], slots [T]: not {list(k.shape)}, {list(v.shape)}, "
            f"{list(k_cache.shape)}, {list(v_cache.shape)}, {list(slot_mapping.shape)}"
        )
    if not k.dtype == v.dtype == k_cache.dtype == v_cache.dtype or slot_mapping.dtype != torch.int64:
        raise ValueError(
            f"k, v and caches must be of one dtype and slots int64, not {k.dtype}, {v.dtype}, "
            f"{k_cache.dtype}, {v_cache.dtype} and {slot_mapping.dtype}"
        )


def _compile_case(dtype: torch.dtype, heads: int, head_dim: int) -> CompileCase:
    def launch() -> None:
        k = torch.empty(4, heads, head_dim, dtype=dtype)
        kv_write(k, k, k, k, torch.zeros(4, dtype=torch.int64))

    return CompileCase(f"{str(dtype).removeprefix('torch.')} {heads} heads of {head_dim}", launch, max_shared=0)


# It copies: no shared memory.
COMPILE_CASES = [
    _compile_case(torch.bfloat16, 8, 128),
    _compile_case(torch.float16, 4, 80),
    _compile_case(torch.float32, 32, 128),
]
