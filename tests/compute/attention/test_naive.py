import math

import pytest
import torch

from minillm.compute.attention.naive import attend_one, visible
from tests.compute.attention.reference import DTYPES, assert_as_good, draw, low_precision, reference


def check(n_q, n_k, heads=4, kv_heads=2, d=16, dtype=torch.float64, window=None):
    q, k, v = draw(n_q, n_k, heads, kv_heads, d, dtype)
    scale = d**-0.5
    o, lse = attend_one(q, k, v, scale, window, return_lse=True)
    assert o.dtype == dtype
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    want_o, want_lse = reference(q, k, v, scale, window)
    low_o, low_lse = low_precision(q, k, v, scale, window)
    assert_as_good(o, low_o, want_o)
    assert_as_good(lse, low_lse, want_lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [40, 59, 80, 1])
def test_odd_head_dims(d, dtype):
    check(13, 13, d=d, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_q, n_k", [(1, 1), (1, 37), (2, 3), (7, 7), (5, 61), (33, 65)])
def test_lengths(n_q, n_k, dtype):
    check(n_q, n_k, dtype=dtype)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("n_q", [1, 9])
def test_grouped_queries(group, n_q):
    check(n_q, 19, heads=8, kv_heads=8 // group)
    check(n_q, 19, heads=3 * group, kv_heads=3, dtype=torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 2, 7, 30, 31, 100])
@pytest.mark.parametrize("n_q", [1, 5, 31])
def test_window(n_q, window, dtype):
    check(n_q, 31, window=window, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_q, n_k", [(5, 3), (4, 0), (1, 0), (9, 1)])
def test_queries_that_see_nothing(n_q, n_k, dtype):
    q, k, v = draw(n_q, n_k, 4, 2, 16, dtype)
    o, lse = attend_one(q, k, v, 0.25, return_lse=True)
    blind = n_q - n_k
    assert not o[:blind].any()
    assert (lse[:blind] == -math.inf).all()
    assert lse[blind:].isfinite().all()
    check(n_q, n_k, dtype=dtype)


def test_logsumexp_only_on_request():
    q, k, v = draw(3, 5, 4, 2, 16)
    o, lse = attend_one(q, k, v, 0.25)
    assert lse is None
    assert torch.equal(o, attend_one(q, k, v, 0.25, return_lse=True)[0])


def test_partial_results_over_disjoint_keys_merge():
    q, k, v = draw(1, 50, 4, 2, 16)
    whole, lse = attend_one(q, k, v, 0.25, return_lse=True)
    parts = [attend_one(q, k[a:b], v[a:b], 0.25, return_lse=True) for a, b in [(0, 0), (0, 13), (13, 50)]]
    merged_lse = torch.stack([part[1] for part in parts]).logsumexp(0)
    merged = sum(o * (part_lse - merged_lse).exp()[..., None] for o, part_lse in parts)
    torch.testing.assert_close(merged, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(merged_lse, lse, rtol=0, atol=1e-12)


def test_large_scores_do_not_overflow():
    q, k, v = draw(6, 6, 4, 2, 16, torch.float32)
    o, lse = attend_one(q * 1000, k, v, 1.0, return_lse=True)
    assert o.isfinite().all()
    assert lse.isfinite().all()


def test_visible_is_causal_bottom_right():
    assert visible(2, 4, None, "cpu").int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert visible(2, 4, 2, "cpu").int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert visible(3, 2, None, "cpu").int().tolist() == [[0, 0], [1, 0], [1, 1]]


def test_inputs_need_not_be_contiguous():
    """The model hands over slices of one QKV product."""
    q, k, v = draw(5, 5, 4, 2, 16)
    qkv = torch.cat((q, k, v), dim=1)
    slices = qkv.split((4, 2, 2), dim=1)
    assert not slices[0].is_contiguous()
    assert torch.equal(attend_one(*slices, 0.25)[0], attend_one(q, k, v, 0.25)[0])
