"""The PagedAttention kernel, interpreted and watched, and its twin, over caches whose other rows are NaN."""

import functools
import importlib.util
import inspect
import math
import random
from contextlib import nullcontext

import pytest
import torch

from minillm.kernels import HAS_TRITON
from minillm.kernels import paged_attention as module
from minillm.kernels.paged_attention import launch_settings, paged_attention, paged_attention_torch
from tests.compute.attention.reference import assert_as_good, draw, low_precision, reference
from tests.kernels.support import compiled, needs_triton

if HAS_TRITON:
    from minillm.kernels.interpreter import OutOfBounds, watch

KERNELS = [
    pytest.param(paged_attention, marks=[needs_triton, compiled], id="triton"),
    pytest.param(paged_attention_torch, id="torch"),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
both = pytest.mark.parametrize("kernel", KERNELS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

# (n_q, n_k): decodes, one of them of one row; a prompt, an append, a request that waits, queries without keys.
MIXED = [(1, 37), (9, 9), (1, 1), (0, 5), (3, 20), (5, 3), (1, 16), (2, 0)]


@functools.cache
def problem(n_q, n_k, heads, kv_heads, d, dtype, window, seed):
    """(q, k, v), what they give and what low precision makes of it; plain Python is slow, so once for all that ask."""
    qkv = draw(n_q, n_k, heads, kv_heads, d, dtype, seed)
    return qkv, reference(*qkv, d**-0.5, window), low_precision(*qkv, d**-0.5, window)


def paged_cache(keys_and_values, block_size, null_rows=None, unused=2):
    """Caches of keys and values, sequence by sequence, and the table: blocks shuffled, NaN in what is nobody's."""
    null_rows = block_size if null_rows is None else null_rows
    counts = [-(-len(k) // block_size) for k, _ in keys_and_values]
    ids = list(range(1, 1 + sum(counts) + unused))
    random.Random(0).shuffle(ids)
    rows = null_rows + len(ids) * block_size
    caches = [torch.full((rows, *x.shape[1:]), math.nan, dtype=x.dtype) for x in keys_and_values[0]]
    table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
    for r, (count, pair) in enumerate(zip(counts, keys_and_values, strict=True)):
        own, ids = ids[:count], ids[count:]
        table[r, :count] = torch.tensor(own)
        slots = [null_rows + (own[i // block_size] - 1) * block_size + i % block_size for i in range(len(pair[0]))]
        for cache, new in zip(caches, pair, strict=True):
            cache[slots] = new
    return *caches, table


def arguments(sequences, block_size, null_rows=None):
    """q, caches, and what a kernel is told of them."""
    k_cache, v_cache, table = paged_cache([(k, v) for _, k, v in sequences], block_size, null_rows)
    starts = torch.tensor([0] + [len(q) for q, _, _ in sequences]).cumsum(0, dtype=torch.int32)
    lens = torch.tensor([len(k) for _, k, _ in sequences], dtype=torch.int32)
    q = torch.cat([q for q, _, _ in sequences])
    return q, k_cache, v_cache, starts, lens, table, block_size, max(len(q) for q, _, _ in sequences)


def watched(kernel):
    return watch() if kernel.__name__ == "paged_attention" else nullcontext()  # by name: wrong versions have it too


def check(
    kernel, shapes, heads=4, kv_heads=2, d=16, dtype=torch.float32, window=None, size=4, null_rows=None, tile=(16, 16)
):
    problems = [problem(*shape, heads, kv_heads, d, dtype, window, seed) for seed, shape in enumerate(shapes)]
    args = arguments([qkv for qkv, _, _ in problems], size, null_rows)
    with watched(kernel):
        got = kernel(*args, d**-0.5, window, *tile)
    assert got[0].dtype == dtype and got[1].dtype == torch.promote_types(dtype, torch.float32)
    for i in (0, 1):
        want, low = (torch.cat([problem[of][i] for problem in problems]) for of in (1, 2))
        assert_as_good(got[i], low, want)
        if i:
            assert not got[0][want == -math.inf].any(), "a query that sees nothing attends to nothing"


# -- shapes ---------------------------------------------------------------------------------------------------------


def test_kernel_and_twin_have_one_signature():
    assert inspect.signature(paged_attention) == inspect.signature(paged_attention_torch)


@both
@dtypes
@pytest.mark.parametrize("window", [None, 5])
def test_a_mixed_batch(kernel, window, dtype):
    check(kernel, MIXED, dtype=dtype, window=window)


@both
@pytest.mark.parametrize("null_rows", ["whole", 1], ids="null block {}".format)
@pytest.mark.parametrize("size", [1, 2, 4, 16, 7, 64])
def test_block_sizes(kernel, size, null_rows):
    check(kernel, MIXED, heads=2, kv_heads=1, size=size, null_rows=size if null_rows == "whole" else null_rows)


@both
@dtypes
@pytest.mark.parametrize("d", [1, 40, 59, 80, 128, 256])
def test_head_dims(kernel, d, dtype):
    check(kernel, [(1, 18), (5, 7)], d=d, dtype=dtype, heads=2, kv_heads=1, tile=(None, None))


@both
@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 4), (9, 3), (8, 2), (7, 1), (20, 1)])
def test_grouped_queries(kernel, heads, kv_heads):
    """Also groups that are no power of 2 and one that needs two tiles for one token."""
    check(kernel, [(1, 19), (7, 11), (6, 5)], heads, kv_heads)


@both
@pytest.mark.parametrize("window", [1, 2, 7, 16, 30, 1000])
def test_windows(kernel, window):
    check(kernel, [(1, 41), (20, 41), (41, 41)], heads=2, kv_heads=1, window=window)


@both
@pytest.mark.parametrize("tile", [(16, 64), (64, 16), (128, 128), (None, None)], ids=str)
@pytest.mark.parametrize("size", [4, 16, 128])
def test_tiles_and_blocks_of_any_two_sizes(kernel, tile, size):
    check(kernel, [(37, 70), (1, 66)], heads=2, kv_heads=1, size=size, tile=tile)


def test_a_decode_has_the_smallest_tile():
    for dtype in DTYPES:
        for head_dim in (64, 128, 256):
            assert launch_settings(dtype, head_dim, 8)[0] == 16
    assert launch_settings(torch.bfloat16, 64, 17)[0] == 128


def test_twin_in_float64():
    sequences = [draw(*shape, 4, 2, 24, seed=seed) for seed, shape in enumerate(MIXED)]
    for window in (None, 6):
        o, lse = paged_attention_torch(*arguments(sequences, 4), 0.2, window)
        assert o.dtype == lse.dtype == torch.float64
        want = [reference(*sequence, 0.2, window) for sequence in sequences]
        torch.testing.assert_close(o, torch.cat([x[0] for x in want]), rtol=0, atol=1e-12)
        torch.testing.assert_close(lse, torch.cat([x[1] for x in want]), rtol=0, atol=1e-12)


@both
def test_large_scores_do_not_overflow(kernel):
    (q, k, v) = draw(6, 6, 2, 1, 16, torch.float32)
    with watched(kernel):
        o, lse = kernel(*arguments([(q * 1e4, k, v)], 4), 1.0)
    want_o, want_lse = reference(q * 1e4, k, v, 1.0)
    torch.testing.assert_close(o.double(), want_o, rtol=0, atol=0.02)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=0)


# -- batches and layouts --------------------------------------------------------------------------------------------


@both
def test_what_the_table_says_past_a_request_is_never_followed(kernel):
    sequences = [draw(1, 9, 2, 1, 16, torch.float32), draw(3, 17, 2, 1, 16, torch.float32)]
    args = arguments(sequences, 4)
    with watched(kernel):
        want = kernel(*args, 0.25)
        table = args[5]
        assert not table[0, 3:].any() and table.shape == (2, 6)
        table[0, 3:] = table[1, 5:] = 2**30
        for got, w in zip(kernel(*args, 0.25), want, strict=True):
            assert torch.equal(got, w)


@both
def test_one_block_in_two_tables(kernel):
    """Two requests share the block that both begin with."""
    (q_a, k, v), (q_b, k_b, v_b) = draw(1, 7, 2, 1, 16, torch.float32), draw(2, 6, 2, 1, 16, torch.float32, seed=1)
    k_b[:4], v_b[:4] = k[:4], v[:4]
    args = arguments([(q_a, k, v), (q_b, k_b, v_b)], 4)
    with watched(kernel):
        want = kernel(*args, 0.25)
        args[5][1, 0] = args[5][0, 0]
        for got, w in zip(kernel(*args, 0.25), want, strict=True):
            assert torch.equal(got, w)


@both
def test_a_batch_without_requests_or_without_queries(kernel):
    cache = torch.zeros(8, 1, 16)
    for starts, lens in (([0], []), ([0, 0], [0]), ([0, 0, 0], [0, 3])):
        numbers = torch.tensor(starts, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)
        with watched(kernel):
            o, lse = kernel(
                torch.empty(0, 2, 16), cache, cache, *numbers, torch.ones(len(lens), 1, dtype=torch.int32), 4, 0, 0.25
            )
        assert o.shape == (0, 2, 16) and lse.shape == (0, 2)


@both
def test_views_of_other_tensors(kernel):
    """Slices of one product, caches with heads outermost, some columns of a wider table, a table column by column."""
    q, k_cache, v_cache, starts, lens, table, *more = arguments(
        [draw(3, 9, 4, 2, 16, torch.float32), draw(1, 6, 4, 2, 16, torch.float32, seed=1)], 4
    )
    with watched(kernel):
        want = kernel(q, k_cache, v_cache, starts, lens, table, *more, 0.25)
        part = torch.cat((q, q), dim=1)[:, :4]
        heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k_cache, v_cache)]
        wide = torch.cat((table, torch.full((2, 5), 2**30, dtype=torch.int32)), dim=1)
        for view in (wide[:, : table.shape[1]], table.T.contiguous().T):
            assert not (part.is_contiguous() or heads_first[0].is_contiguous() or view.is_contiguous())
            for got, w in zip(kernel(part, *heads_first, starts, lens, view, *more, 0.25), want, strict=True):
                torch.testing.assert_close(got, w)


@needs_triton
@compiled
def test_offsets_are_64_bit(tmp_path):
    """Rows of the cache 2²⁸ numbers apart, in a file with holes: from the eighth on past what 32 bits can say."""
    args = arguments([draw(2, 9, 1, 1, 16, torch.float16)], 4)
    rows, stride = len(args[1]), 2**28
    space = torch.from_file(str(tmp_path / "holes"), shared=True, size=rows * stride, dtype=torch.float16)
    far = space.as_strided((rows, 1, 16), (stride, 16, 1))
    used = args[5][0, :3].long()[:, None] * 4 + torch.arange(4)
    assert used.max() > 8
    for slot in used.flatten().tolist():
        far[slot] = args[1][slot]
    for got, want in zip(
        paged_attention(args[0], far, far, *args[3:], 0.25),
        paged_attention(args[0], args[1], args[1], *args[3:], 0.25),
        strict=True,
    ):
        assert torch.equal(got, want)


# -- refusals -------------------------------------------------------------------------------------------------------


@both
def test_what_does_not_fit_together_is_refused(kernel):
    q, k_cache, v_cache, *more = arguments([draw(3, 5, 4, 2, 16, torch.float32)], 4)
    for args, window, message in (
        ((q[:, :3], k_cache, v_cache), None, r"Hq a multiple of Hkv: not \[3, 3, 16\]"),
        ((q, k_cache.half(), v_cache.half()), None, "of one dtype, not torch.float32, torch.float16"),
        ((q, k_cache, v_cache), 0, "at least 1: not 0"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel(*args, *more, 0.25, window)


@needs_triton
@pytest.mark.parametrize("d, dtype", [(257, torch.float32), (16, torch.float64)])
def test_what_the_kernel_cannot_do_the_twin_can(d, dtype):
    with pytest.raises(ValueError, match=f"not {dtype} and {d}; paged_attention_torch takes any"):
        paged_attention(*arguments([draw(1, 3, 2, 1, d, dtype)], 4), 1.0)
    check(paged_attention_torch, [(1, 3)], 2, 1, d=d, dtype=dtype)


# -- traffic --------------------------------------------------------------------------------------------------------


def decode_traffic(kernel, size=4, window=None):
    """Two decodes, 40 and 9 keys, 6 query and 2 KV heads of 16, float16."""
    sequences = [draw(1, 40, 6, 2, 16, torch.float16), draw(1, 9, 6, 2, 16, torch.float16, seed=1)]
    with watch() as seen:
        kernel(*arguments(sequences, size), 0.25, window, 16, 16)
    return seen


@needs_triton
@compiled
@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_decode_reads_each_key_once(size):
    """Not once for each head of a group, and no row of a block that is not the request's."""
    seen = decode_traffic(paged_attention, size)
    assert seen.loads["k_ptr"] == seen.loads["v_ptr"] == (40 + 9) * 2 * 16 * 2
    assert seen.loads["q_ptr"] == seen.stores["o_ptr"] == 2 * 6 * 16 * 2
    assert seen.stores["lse_ptr"] == 2 * 6 * 4
    assert seen.loads["table_ptr"] == (40 + 9) * 2 * 4  # looked up key by key; on a GPU a block's are one access


@needs_triton
@compiled
def test_traffic_of_a_window_is_the_tiles_it_touches():
    assert decode_traffic(paged_attention, window=3).loads["k_ptr"] == (8 + 9) * 2 * 16 * 2


# -- wrong versions -------------------------------------------------------------------------------------------------


def compact(kernel):
    """Small, and each wrong version below fails some line of it."""
    check(kernel, [(20, 37), (1, 19), (0, 4), (5, 3)], heads=6, kv_heads=2, null_rows=2)
    check(kernel, [(30, 41)], d=12, heads=2, kv_heads=1, window=7, size=16)
    if kernel.__name__ == "paged_attention":
        seen = decode_traffic(kernel)
        assert seen.loads["k_ptr"] == (40 + 9) * 2 * 16 * 2 and seen.loads["table_ptr"] == (40 + 9) * 2 * 4
        sequences = [draw(32, 32, 3, 1, 16, torch.float32)]
        with watch() as seen:  # six tiles of 16 rows, whose last queries see 6, 11, 16, 22, 27 and 32 keys
            kernel(*arguments(sequences, 4), 0.25, None, 16, 16)
        assert seen.loads["k_ptr"] == 3 * (16 + 32) * 16 * 4


WRONG = {
    "triton": {
        "blocks of another size": ("table_ptr + keys // BLOCK_SIZE", "table_ptr + keys // BLOCK_N"),
        "block's place forgotten": ("(block.to(tl.int64) - keys // BLOCK_SIZE)", "block.to(tl.int64)"),
        "null block always whole": ("* BLOCK_SIZE - short", "* BLOCK_SIZE"),
        "table of the first request": ("request.to(tl.int64) * stride_br", "0"),
        "table followed past the keys": ("mask=keys < n_k, other=0)", "mask=keys < n_k + 16, other=0)"),
        "heads of a group in a row": ("rows % GROUP", "rows // BLOCK_M"),
        "heads of the first group": ("heads = kv_head * GROUP", "heads = 0 * GROUP"),
        "tokens by row": ("(query_start + rows // GROUP)", "(query_start + rows)"),
        "KV head of the first": ("k_ptr += kv_head * stride_kh", "k_ptr += 0 * kv_head * stride_kh"),
        "values of the first head": ("v_ptr += kv_head * stride_vh", "v_ptr += 0 * kv_head * stride_vh"),
        "mask aligned top left": ("row_limit = rows // GROUP + n_k - n_q", "row_limit = rows // GROUP"),
        "mask by row": ("row_limit = rows // GROUP +", "row_limit = rows +"),
        "whole tiles that are not": ("minimum(first_limit + 1, end)", "minimum(first_limit + BLOCK_N, end)"),
        "first limit by row": ("first_limit = first // GROUP +", "first_limit = first +"),
        "no causal skip": ("tl.minimum(n_k, (first + BLOCK_M - 1) // GROUP + n_k - n_q + 1)", "n_k"),
        "last keys left out": ("// GROUP + n_k - n_q + 1), 0)", "// GROUP + n_k - n_q - 1), 0)"),
        "window begins a tile late": ("first_limit - window + 1, 0)", "first_limit - window + BLOCK_N, 0)"),
        "whole loop left out": (
            "for start in range(begin, whole, BLOCK_N)",
            "for start in range(whole, whole, BLOCK_N)",
        ),
        "diagonal left out": ("for start in range(whole, end, BLOCK_N)", "for start in range(end, end, BLOCK_N)"),
        "tiles end early": ("if first >= n_q * GROUP", "if first >= n_q"),
        "tail of rows": ("mask=rows < n_q * GROUP)", "mask=rows < n_q * GROUP + 1)"),
        "tail of dims": ("& (dims[None, :] < HEAD_DIM)", ""),
        "division by nothing": ("o = acc / tl.where(l == 0, 1.0, l)[:, None]", "o = acc / l[:, None]"),
        "logsumexp without m": ("m + tl.log(", "tl.log("),
        "grid by tokens": ("triton.cdiv(rows, block_m)", "triton.cdiv(max_query_len, block_m)"),
    },
    "torch": {
        "blocks of another size": ("block_table[request, key // block_size]", "block_table[request, key // 2]"),
        "null block always whole": ("* block_size - short", "* block_size"),
        "place in the block forgotten": ("+ key % block_size", "+ 0 * key"),
        "table of the first request": ("block_table[request,", "block_table[0 * request,"),
        "keys counted from the batch": ("- (ends - seq_lens)[request]", ""),
        "window forgotten": ("scale, True, window, block_m, block_n)", "scale, True, None, block_m, block_n)"),
    },
}


def variant(folder, change: tuple[str, str] | None, which: str):
    """The kernel or its twin out of a copy of its file with one piece of text replaced."""
    text = inspect.getsource(module)
    if change:
        assert text.count(change[0]) == 1, f"{change[0]!r} is there {text.count(change[0])} times"
        text = text.replace(*change)
    path = folder / "variant_of_paged_attention.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("variant_of_paged_attention", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded.paged_attention if which == "triton" else loaded.paged_attention_torch


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
    errors = (AssertionError, IndexError, OutOfBounds) if HAS_TRITON else (AssertionError, IndexError)
    with pytest.raises(errors):
        compact(wrong)
