"""The kernel that stores new K and V in their rows of the cache, interpreted and watched, and its twin."""

import importlib.util
import inspect
from contextlib import nullcontext

import pytest
import torch

from minillm.core.kv_spec import FullAttentionSpec
from minillm.kernels import HAS_TRITON
from minillm.kernels import kv_write as module
from minillm.kernels.kv_write import kv_write, kv_write_torch
from minillm.memory.kv_cache import KVCache
from minillm.memory.kv_manager import KVGeometry, group_layers
from tests.kernels.support import compiled, needs_triton

if HAS_TRITON:
    from minillm.kernels.interpreter import OutOfBounds, watch

both = pytest.mark.parametrize(
    "write",
    [pytest.param(kv_write, marks=[needs_triton, compiled], id="triton"), pytest.param(kv_write_torch, id="torch")],
)


def watched(write):
    return watch() if write.__name__ == "kv_write" else nullcontext()


def check(write, slots, heads=2, d=16, dtype=torch.float32, rows=20):
    """Every row of both caches is what it was, but for those that a token has the slot of."""
    generator = torch.Generator().manual_seed(0)
    k, v, k_cache, v_cache = (
        torch.randn(n, heads, d, generator=generator).to(dtype) for n in (len(slots), len(slots), rows, rows)
    )
    want = [cache.clone() for cache in (k_cache, v_cache)]
    for cache, new in zip(want, (k, v), strict=True):
        for token, slot in enumerate(slots):
            if slot >= 0:
                cache[slot] = new[token]
    with watched(write):
        assert write(k, v, k_cache, v_cache, torch.tensor(slots, dtype=torch.int64)) is None
    assert torch.equal(k_cache, want[0]) and torch.equal(v_cache, want[1])


def test_kernel_and_twin_have_one_signature():
    assert inspect.signature(kv_write) == inspect.signature(kv_write_torch)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("slots", [[], [3], [19, 0, 7], [5, -1, 4, -1], [-1, -1]], ids=str)
def test_slots(write, slots, dtype):
    check(write, slots, dtype=dtype)


@both
@pytest.mark.parametrize("heads, d", [(1, 1), (3, 59), (1, 256), (8, 128), (5, 257)])
def test_shapes(write, heads, d):
    """The last two take more than one program for a row."""
    check(write, [4, 9, -1, 0], heads, d)


@both
def test_views_of_other_tensors(write):
    """k and v as the model hands them over, slices of one product; caches with heads outermost."""
    qkv = torch.randn(3, 8, 16)
    k, v = qkv[:, 4:6], qkv[:, 6:]
    caches = [torch.zeros(2, 9, 16).transpose(0, 1) for _ in range(2)]
    slots = torch.tensor([8, -1, 2])
    with watched(write):
        write(k, v, *caches, slots)
    for cache, new in zip(caches, (k, v), strict=True):
        assert torch.equal(cache[[8, 2]], new[[0, 2]])
        assert not cache[[0, 1, 3, 4, 5, 6, 7]].any()


@needs_triton
@compiled
def test_offsets_are_64_bit(tmp_path):
    """Rows 2²⁸ numbers apart, in a file with holes."""
    space = torch.from_file(str(tmp_path / "holes"), shared=True, size=10 * 2**28, dtype=torch.float16)
    far = space.as_strided((10, 1, 16), (2**28, 16, 1))
    k = torch.randn(1, 1, 16).half()
    kv_write(k, k, far, far, torch.tensor([9]))
    assert torch.equal(far[9], k[0])


@needs_triton
@compiled
def test_traffic_is_one_reading_and_one_writing():
    k, cache = torch.randn(3, 2, 16), torch.zeros(8, 2, 16)
    with watch() as seen:
        kv_write(k, k.clone(), cache, cache.clone(), torch.tensor([1, -1, 5]))
    for name in ("k", "v"):
        assert seen.loads[f"{name}_ptr"] == seen.stores[f"{name}_cache_ptr"] == 2 * 2 * 16 * 4


@both
def test_what_does_not_fit_together_is_refused(write):
    k, cache, slots = torch.zeros(3, 2, 16), torch.zeros(8, 2, 16), torch.arange(3)
    for args, message in (
        ((k, k[:2], cache, cache, slots), r"not \[3, 2, 16\], \[2, 2, 16\]"),
        ((k, k, cache[:, :1], cache[:, :1], slots), r"\[8, 1, 16\], \[8, 1, 16\], \[3\]"),
        ((k, k, cache, cache, slots[:2]), r"\[2\]"),
        ((k, k, cache.half(), cache.half(), slots), "of one dtype"),
        ((k, k, cache, cache, slots.int()), "slots int64, not .* torch.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            write(*args)


@both
def test_a_cache_writes_with_it(write):
    spec = FullAttentionSpec(2, 16, "bfloat16")
    geometry = KVGeometry(group_layers([spec] * 2), 4, 3, null_rows=4)
    new = {name: torch.randn(3, 2, 16).bfloat16() for name in ("k", "v")}
    arenas = []
    for cache in (KVCache(geometry), KVCache(geometry, kv_write=write)):
        with watched(write):
            cache.layer(1).write(torch.tensor([9, 4, 15]), **new)
        arenas.append(cache.arena)
    assert torch.equal(*arenas) and arenas[0].any()


# -- wrong versions -------------------------------------------------------------------------------------------------


def compact(write):
    check(write, [4, -1, 9], heads=3, d=400, rows=10)


WRONG = {
    "padding is stored": ("if slot < 0", "if slot < -1"),
    "keys twice": ("tl.load(v_ptr + token * stride_vt", "tl.load(k_ptr + token * stride_vt"),
    "values where keys are": ("tl.store(v_cache_ptr", "tl.store(k_cache_ptr"),
    "rows by token": ("k_cache_ptr + slot * stride_kr", "k_cache_ptr + token * stride_kr"),
    "first head only": ("number // HEAD_DIM", "number // NUMBERS"),
    "first part of a row only": ("tl.program_id(1) * BLOCK +", "0 * BLOCK +"),
    "no tail": ("inside = number < NUMBERS", "inside = number < NUMBERS + 1"),
}


def variant(folder, change: tuple[str, str] | None):
    text = inspect.getsource(module)
    if change:
        assert text.count(change[0]) == 1, f"{change[0]!r} is there {text.count(change[0])} times"
        text = text.replace(*change)
    path = folder / "variant_of_kv_write.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("variant_of_kv_write", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded.kv_write


@needs_triton
@compiled
def test_the_compact_check_passes_what_is_right(tmp_path):
    compact(variant(tmp_path, None))


@needs_triton
@compiled
@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_wrong_version_fails(change, tmp_path):
    with pytest.raises((AssertionError, OutOfBounds)):
        compact(variant(tmp_path, change))
