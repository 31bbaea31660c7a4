"""The FlashAttention kernel, interpreted and watched, and its twin, against attention written down plainly."""

import functools
import importlib.util
import inspect
import math
from contextlib import nullcontext

import pytest
import torch

from minillm.kernels import HAS_TRITON
from minillm.kernels import flash_attention as module
from minillm.kernels.flash_attention import flash_attention, flash_attention_torch
from tests.compute.attention.reference import assert_as_good, draw, low_precision, reference
from tests.kernels.support import compiled, needs_triton

if HAS_TRITON:
    from minillm.kernels.interpreter import OutOfBounds, watch

KERNELS = [
    pytest.param(flash_attention, marks=[needs_triton, compiled], id="triton"),
    pytest.param(flash_attention_torch, id="torch"),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
both = pytest.mark.parametrize("kernel", KERNELS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def indices(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def watched(kernel):
    return watch() if kernel.__name__ == "flash_attention" else nullcontext()  # by name: wrong versions have it too


def run(kernel, q, k, v, causal=True, window=None, block=(32, 32), scale=None):
    """One sequence."""
    scale = q.shape[2] ** -0.5 if scale is None else scale
    with watched(kernel):
        return kernel(
            q, k, v, indices(0, len(q)), indices(0), indices(len(k)), len(q), scale, causal, window, *block
        )  # fmt: skip


def attention(of, q, k, v, causal=True, window=None, scale=None):
    """``reference`` or ``low_precision``; not causal is every query by itself, after all the keys."""
    scale = q.shape[2] ** -0.5 if scale is None else scale
    if causal:
        return of(q, k, v, scale, window)
    rows = [of(q[i : i + 1], k, v, scale) for i in range(len(q))]
    return torch.cat([o for o, _ in rows]), torch.cat([lse for _, lse in rows])


@functools.cache
def problem(n_q, n_k, heads, kv_heads, d, dtype, causal=True, window=None, seed=0):
    """(q, k, v), what they give and what low precision makes of it; plain Python is slow, so once for all that ask."""
    qkv = draw(n_q, n_k, heads, kv_heads, d, dtype, seed)
    return qkv, attention(reference, *qkv, causal, window), attention(low_precision, *qkv, causal, window)


def check(kernel, n_q, n_k, heads=2, kv_heads=1, d=16, dtype=torch.float32, causal=True, window=None, block=(32, 32)):
    qkv, want, low = problem(n_q, n_k, heads, kv_heads, d, dtype, causal, window)
    o, lse = run(kernel, *qkv, causal, window, block)
    assert o.dtype == dtype and lse.dtype == torch.promote_types(dtype, torch.float32)
    assert_as_good(o, low[0], want[0])
    assert_as_good(lse, low[1], want[1])
    blind = want[1] == -math.inf
    assert not o[blind].any(), "a query that sees nothing attends to nothing"


# -- shapes ---------------------------------------------------------------------------------------------------------


def test_kernel_and_twin_have_one_signature():
    assert inspect.signature(flash_attention) == inspect.signature(flash_attention_torch)


@both
@dtypes
@pytest.mark.parametrize("d", [1, 40, 59, 80, 96, 128, 256])
def test_head_dims(kernel, d, dtype):
    check(kernel, 13, 13, d=d, dtype=dtype)


@both
@dtypes
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("n_q, n_k", [(1, 1), (1, 37), (2, 3), (7, 7), (33, 65), (32, 32)])
def test_lengths(kernel, n_q, n_k, causal, dtype):
    check(kernel, n_q, n_k, dtype=dtype, causal=causal)


@both
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_grouped_queries(kernel, group):
    check(kernel, 5, 19, heads=8, kv_heads=8 // group)
    check(kernel, 5, 19, heads=3 * group, kv_heads=3, dtype=torch.bfloat16)


@both
@pytest.mark.parametrize("window", [1, 2, 7, 16, 30, 41, 1000])
@pytest.mark.parametrize("n_q", [1, 20, 41])
def test_windows(kernel, n_q, window):
    check(kernel, n_q, 41, window=window, block=(16, 16))


@both
@dtypes
def test_windows_in_every_dtype(kernel, dtype):
    check(kernel, 33, 41, dtype=dtype, window=10)


@both
@pytest.mark.parametrize("block", [(16, 16), (16, 64), (64, 16), (128, 128), (None, None)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_tile_sizes(kernel, block, causal):
    check(kernel, 37, 70, heads=1, causal=causal, block=block)


@both
@dtypes
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("n_q, n_k", [(5, 3), (4, 0), (1, 0), (40, 3)])
def test_queries_that_see_nothing(kernel, n_q, n_k, causal, dtype):
    q, k, v = draw(n_q, n_k, 2, 1, 16, dtype)
    o, lse = run(kernel, q, k, v, causal)
    blind = n_q - n_k if causal else n_q * (n_k == 0)
    assert not o[:blind].any() and (lse[:blind] == -math.inf).all()
    assert lse[blind:].isfinite().all()
    check(kernel, n_q, n_k, dtype=dtype, causal=causal)


@both
def test_large_scores_do_not_overflow(kernel):
    q, k, v = draw(6, 6, 2, 1, 16, torch.float32)
    o, lse = run(kernel, q * 1e4, k, v, scale=1.0)
    want_o, want_lse = reference(q * 1e4, k, v, 1.0)
    torch.testing.assert_close(o.double(), want_o, rtol=0, atol=0.02)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=0)


def test_twin_in_float64():
    for n_q, n_k, causal, window in [
        (33, 65, True, None),
        (33, 65, False, None),
        (20, 13, True, None),
        (40, 40, True, 7),
    ]:
        q, k, v = draw(n_q, n_k, 4, 2, 24)
        o, lse = run(flash_attention_torch, q, k, v, causal, window, (16, 16))
        assert o.dtype == lse.dtype == torch.float64
        want_o, want_lse = attention(reference, q, k, v, causal, window)
        torch.testing.assert_close(o, want_o, rtol=0, atol=1e-12)
        torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-12)


# -- batches and layouts --------------------------------------------------------------------------------------------


def ragged(kernel, shapes, dtype=torch.float32, heads=2, kv_heads=1, d=16, window=None):
    """``shapes``: (n_q, n_k, rows of nobody before its keys) of each request, in a cache that is NaN elsewhere."""
    problems = [
        problem(n_q, n_k, heads, kv_heads, d, dtype, window=window, seed=i) for i, (n_q, n_k, _) in enumerate(shapes)
    ]
    starts, firsts, row = [0], [], 0
    cache = torch.full((2, sum(n_k + gap for _, n_k, gap in shapes) + 3, kv_heads, d), math.nan, dtype=dtype)
    for (n_q, n_k, gap), ((_, k, v), _, _) in zip(shapes, problems, strict=True):
        starts.append(starts[-1] + n_q)
        firsts.append(row + gap)
        row += gap + n_k
        cache[0, firsts[-1] : row], cache[1, firsts[-1] : row] = k, v
    q = torch.cat([q for (q, _, _), _, _ in problems])
    where = indices(*starts), indices(*firsts), indices(*(n_k for _, n_k, _ in shapes)), max(n for n, _, _ in shapes)
    with watched(kernel):
        o, lse = kernel(q, cache[0], cache[1], *where, d**-0.5, True, window, 16, 16)
    for got, i in ((o, 0), (lse, 1)):
        want, low = (torch.cat([problem[of][i] for problem in problems]) for of in (1, 2))
        assert_as_good(got, low, want)


@both
@dtypes
@pytest.mark.parametrize("window", [None, 5])
def test_a_ragged_batch(kernel, window, dtype):
    """Prompts, a decode, an append, requests without queries, without keys, and without either."""
    ragged(
        kernel, [(9, 9, 2), (1, 17, 0), (0, 6, 1), (18, 40, 3), (0, 0, 0), (2, 0, 0), (1, 1, 4)], dtype, window=window
    )


@both
def test_many_requests(kernel):
    shapes = [(i % 3, 1 + (7 * i) % 5, i % 2) for i in range(24)]
    ragged(kernel, [*shapes, (17, 20, 0)], heads=1)


@both
def test_a_batch_without_requests_or_without_queries(kernel):
    q, k, v = draw(0, 5, 2, 1, 16, torch.float32)
    for starts, rows in (([0], []), ([0, 0], [0]), ([0, 0, 0], [0, 3])):
        lens = [2] * len(rows)
        with watched(kernel):
            o, lse = kernel(q, k, v, indices(*starts), indices(*rows), indices(*lens), 0, 0.25)
        assert o.shape == (0, 2, 16) and lse.shape == (0, 2)


@both
@dtypes
def test_slices_of_one_product(kernel, dtype):
    """The model hands over q, k and v as parts of one tensor; the bounds are those of each part."""
    q, k, v = draw(20, 20, 4, 2, 16, dtype)
    parts = torch.cat((q, k, v), dim=1).split((4, 2, 2), dim=1)
    assert not parts[0].is_contiguous()
    for got, want in zip(run(kernel, *parts), run(kernel, q, k, v), strict=True):
        torch.testing.assert_close(got, want)


@both
def test_heads_outermost_and_dims_apart(kernel):
    q, k, v = draw(20, 33, 4, 2, 16, torch.float32)
    want = run(kernel, q, k, v)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    every_second = [torch.stack((x, x), dim=-1)[..., 0] for x in (q, k, v)]
    for views in (heads_first, every_second):
        assert not any(x.is_contiguous() for x in views)
        for got, w in zip(run(kernel, *views), want, strict=True):
            torch.testing.assert_close(got, w)


@needs_triton
@compiled
def test_offsets_are_64_bit(tmp_path):
    """Three KV heads, 2³⁰ numbers apart, in a file with holes: the third lies past what 32 bits can say."""
    q, k, _ = draw(16, 16, 3, 3, 16, torch.float16)
    stride = 2**30 + 8
    space = torch.from_file(str(tmp_path / "holes"), shared=True, size=2 * stride + 256, dtype=torch.float16)
    far = space.as_strided((16, 3, 16), (16, stride, 1))
    far.copy_(k)
    for got, want in zip(run(flash_attention, q, far, far), run(flash_attention, q, k, k), strict=True):
        assert torch.equal(got, want)


@both
@dtypes
@pytest.mark.parametrize("cut", [0, 1, 16, 31])
def test_two_halves_of_the_keys_merge_to_the_whole(kernel, cut, dtype):
    """By logsumexp. All queries see all of the first half."""
    q, k, v = draw(10, 40, 2, 1, 16, dtype)
    o_a, lse_a = run(kernel, q, k[:cut], v[:cut], causal=False)
    o_b, lse_b = run(kernel, q, k[cut:], v[cut:])
    lse = torch.logaddexp(lse_a, lse_b)
    o = o_a * (lse_a - lse).exp()[..., None] + o_b * (lse_b - lse).exp()[..., None]
    want, low = (attention(of, q, k, v) for of in (reference, low_precision))
    assert_as_good(o.to(dtype), low[0], want[0])
    assert_as_good(lse, low[1], want[1])


# -- refusals -------------------------------------------------------------------------------------------------------


@both
def test_what_does_not_fit_together_is_refused(kernel):
    q, k, v = draw(3, 5, 4, 2, 16, torch.float32)
    for args, message in (
        ((q[:, :3], k, v), r"Hq a multiple of Hkv: not \[3, 3, 16\]"),
        ((q, k, v[1:]), r"\[5, 2, 16\] and \[4, 2, 16\]"),
        ((q[..., :8], k, v), r"\[3, 4, 8\]"),
        ((q, k.half(), v.half()), "of one dtype, not torch.float32, torch.float16"),
        ((q, k, v, False, 3), "a window is of causal attention and at least 1: not 3 with causal=False"),
        ((q, k, v, True, 0), "at least 1: not 0"),
    ):
        with pytest.raises(ValueError, match=message):
            run(kernel, *args)


@needs_triton
@pytest.mark.parametrize("d, dtype", [(257, torch.float32), (16, torch.float64)])
def test_what_the_kernel_cannot_do_the_twin_can(d, dtype):
    q, k, v = draw(2, 2, 2, 1, d, dtype)
    with pytest.raises(ValueError, match=f"not {dtype} and {d}; flash_attention_torch takes any"):
        flash_attention(q, k, v, indices(0, 2), indices(0), indices(2), 2, 1.0)
    check(flash_attention_torch, 2, 2, d=d, dtype=dtype)


# -- traffic --------------------------------------------------------------------------------------------------------

N, D, HEADS = 1024, 64, 1024  # one head is run; the setting of the paper has 16 heads in a batch of 64


def traffic(kernel, n, block, causal) -> tuple[int, int]:
    """Elements of Q, K, V and O moved for one head in float16, and bytes of logsumexp."""
    q, k, v = draw(n, n, 1, 1, D, torch.float16)
    with watch() as seen:
        kernel(q, k, v, indices(0, n), indices(0), indices(n), n, D**-0.5, causal, None, block, block)
    assert seen.loads["q_ptr"] == seen.stores["o_ptr"] == n * D * 2
    assert seen.loads["k_ptr"] == seen.loads["v_ptr"]
    moved = sum(seen.loads[name] for name in ("q_ptr", "k_ptr", "v_ptr")) + seen.stores["o_ptr"]
    return moved // 2, seen.stores["lse_ptr"]


@needs_triton
@compiled
@pytest.mark.parametrize("block, gigabytes", [(64, 4.56), (128, 2.42)])
def test_traffic(block, gigabytes):
    moved, lse = traffic(flash_attention, N, block, causal=False)
    assert moved == (2 + 2 * math.ceil(N / block)) * N * D
    assert round(HEADS * moved * 2 / 1e9, 2) == gigabytes
    assert lse == 4 * N


@needs_triton
@compiled
@pytest.mark.parametrize("n, block", [(1024, 128), (256, 64)])
def test_traffic_of_causal_tiles(n, block):
    moved, lse = traffic(flash_attention, n, block, causal=True)
    assert moved == (math.ceil(n / block) + 3) * n * D
    assert lse == 4 * n


@needs_triton
@compiled
def test_traffic_of_a_window_is_the_tiles_it_touches():
    q, k, v = draw(256, 256, 1, 1, D, torch.float16)
    with watch() as seen:
        flash_attention(q, k, v, indices(0, 256), indices(0), indices(256), 256, 0.125, True, 32, 64, 64)
    assert seen.loads["k_ptr"] == (1 + 2 + 2 + 2) * 64 * D * 2


# -- wrong versions -------------------------------------------------------------------------------------------------


def compact(kernel):
    """Small, and each wrong version below fails some line of it."""
    check(kernel, 20, 37, heads=4, kv_heads=2, block=(16, 16))
    check(kernel, 37, 37, d=12, causal=False, block=(16, 16))
    check(kernel, 20, 13, block=(16, 16))
    check(kernel, 30, 41, window=7, block=(16, 16))
    ragged(kernel, [(3, 20, 2), (0, 4, 1), (17, 17, 0)])
    if kernel.__name__ == "flash_attention":
        assert traffic(kernel, 128, 64, causal=True)[0] == (2 + 3) * 128 * D


WRONG = {
    "triton": {
        "no rescale of acc": ("acc * rescale[:, None] +", "acc +"),
        "no rescale of l": ("l * rescale + tl.sum", "l + tl.sum"),
        "inverse rescale": ("rescale = tl.exp(m - base)", "rescale = tl.where(m == m_new, 1.0, tl.exp(base - m))"),
        "NaN where nothing is seen": ('base = tl.where(m_new == float("-inf"), 0.0, m_new)', "base = m_new"),
        "division by nothing": ("o = acc / tl.where(l == 0, 1.0, l)[:, None]", "o = acc / l[:, None]"),
        "mask aligned top left": ("row_limit = rows + n_k - n_q", "row_limit = rows"),
        "mask one too narrow": ("columns[None, :] <= row_limit", "columns[None, :] < row_limit"),
        "no mask for the tail": ("row_limit = rows * 0 + n_k - 1", "row_limit = rows * 0 + n_k"),
        "window one too wide": ("row_limit[:, None] - window)", "row_limit[:, None] - window - 1)"),
        "window begins a tile late": ("first_limit - window + 1, 0)", "first_limit - window + BLOCK_N, 0)"),
        "whole tiles that are not": ("minimum(first_limit + 1, end)", "minimum(first_limit + BLOCK_N, end)"),
        "no causal skip": ("tl.minimum(n_k, first_limit + BLOCK_M)", "n_k"),
        "heads dealt out in turn": ("k_ptr += (head // GROUP)", "k_ptr += (head % (tl.num_programs(2) // GROUP))"),
        "rows of the cache from 0": ("rows = (first_row + columns)", "rows = columns"),
        "tail of dims": ("(rows[:, None] < n_q) & (dims[None, :] < HEAD_DIM)", "(rows[:, None] < n_q)"),
        "tail of rows": ("mask=rows < n_q", "mask=rows < n_q + 1"),
        "logsumexp without m": ("m + tl.log(", "tl.log("),
    },
    "torch": {
        "no rescale of acc": ("acc * rescale[..., None] +", "acc +"),
        "no rescale of l": ("l * rescale + p.sum", "l + p.sum"),
        "NaN where nothing is seen": ('base = torch.where(m_new == float("-inf"), 0.0, m_new)', "base = m_new"),
        "mask aligned top left": ("device=q.device) + n_k - n_q", "device=q.device)"),
        "mask one too narrow": ("blind = columns > limits[:, None]", "blind = columns >= limits[:, None]"),
        "window one too wide": ("columns <= limits[:, None] - window", "columns < limits[:, None] - window"),
        "window begins a tile late": ("lowest - window + 1)", "lowest - window + block_n)"),
        "mask left out on the edge": ("if end > lowest + 1 or", "if end > lowest + block_n or"),
        "rows of the cache from 0": ("k[first : first + n_k].to(wide), v[first", "k[:n_k].to(wide), v[first"),
        "logsumexp without m": ("m + torch.log(l)", "torch.log(l)"),
    },
}


def variant(folder, change: tuple[str, str] | None, which: str):
    """The kernel or its twin out of a copy of its file with one piece of text replaced."""
    text = inspect.getsource(module)
    if change:
        assert text.count(change[0]) == 1, f"{change[0]!r} is there {text.count(change[0])} times"
        text = text.replace(*change)
    path = folder / "variant_of_flash_attention.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("variant_of_flash_attention", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded.flash_attention if which == "triton" else loaded.flash_attention_torch


WHICH = [pytest.param("triton", marks=[needs_triton, compiled]), "torch"]


@pytest.mark.parametrize("which", WHICH)
def test_the_compact_check_passes_what_is_right(which, tmp_path):
    compact(variant(tmp_path, None, which))


@pytest.mark.parametrize(
    "which, change",
    [
        pytest.param(which, change, id=f"{which}: {name}", marks=[needs_triton, compiled] if which == "triton" else [])
        for which, changes in WRONG.items()
        for name, change in changes.items()
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of what goes wrong
def test_a_wrong_version_fails(which, change, tmp_path):
    wrong = variant(tmp_path, change, which)
    with pytest.raises((AssertionError, OutOfBounds) if HAS_TRITON else AssertionError):
        compact(wrong)
