"""FlashAttention to read: right, and the traffic that its formulas say."""

import math

import pytest
import torch

from minillm.compute.attention.flash import (
    HBM,
    flash_attention_kv_outer,
    flash_attention_q_outer,
    naive_attention,
)
from minillm.compute.attention.naive import attend_one

N, D, HEADS = 1024, 64, 1024  # one head is counted; the paper's setting has 16 heads in a batch of 64


def tensors(n_q, n_k, d, dtype=torch.float64):
    generator = torch.Generator().manual_seed(n_q * 31 + n_k * 7 + d)
    return [torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype) for n in (n_q, n_k, n_k)]


def reference(q, k, v, causal):
    if not causal:
        scores = q @ k.T * q.shape[-1] ** -0.5
        return scores.softmax(-1) @ v, scores.logsumexp(-1)
    o, lse = attend_one(q[:, None], k[:, None], v[:, None], q.shape[-1] ** -0.5, return_lse=True)
    return o[:, 0], lse[:, 0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (7, 7), (33, 33), (5, 40), (1, 65), (20, 13)])
@pytest.mark.parametrize(("block_q", "block_k"), [(4, 4), (8, 5), (64, 64)])
def test_queries_outside(n_q, n_k, block_q, block_k, causal):
    q, k, v = tensors(n_q, n_k, 10)
    o, lse = flash_attention_q_outer(q, k, v, HBM(), block_q, block_k, causal)
    want_o, want_lse = reference(q, k, v, causal)
    torch.testing.assert_close(o, want_o, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (33, 33), (5, 40)])
@pytest.mark.parametrize(("block_q", "block_k"), [(4, 4), (8, 5), (64, 64)])
def test_keys_outside(n_q, n_k, block_q, block_k):
    q, k, v = tensors(n_q, n_k, 10)
    o = flash_attention_kv_outer(q, k, v, HBM(), block_q, block_k)
    torch.testing.assert_close(o, reference(q, k, v, False)[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(naive_attention(q, k, v, HBM()), o, rtol=0, atol=1e-12)


def gigabytes(run) -> float:
    hbm = HBM()
    run(*tensors(N, N, D, torch.float16), hbm)
    return round(HEADS * hbm.bytes["matrices"] / 1e9, 2)


def elements(run, n=N) -> int:
    hbm = HBM()
    run(*tensors(n, n, D, torch.float16), hbm)
    return hbm.bytes["matrices"] // 2


def test_traffic_of_the_whole_matrix():
    assert elements(naive_attention) == 4 * N * D + 4 * N * N
    assert gigabytes(naive_attention) == 9.13


@pytest.mark.parametrize(("block", "total"), [(64, 6.71), (200, 2.68), (48, 9.13)])
def test_traffic_with_keys_outside(block, total):
    def run(q, k, v, hbm):
        flash_attention_kv_outer(q, k, v, hbm, 64, block)

    assert elements(run) == (3 * math.ceil(N / block) + 2) * N * D
    assert gigabytes(run) == total


@pytest.mark.parametrize(("block", "total"), [(64, 4.56), (128, 2.42)])
def test_traffic_with_queries_outside(block, total):
    def run(q, k, v, hbm):
        flash_attention_q_outer(q, k, v, hbm, block, block)

    assert elements(run) == (2 + 2 * math.ceil(N / block)) * N * D
    assert gigabytes(run) == total


@pytest.mark.parametrize("block", [64, 128, 256])
def test_traffic_of_causal_square_tiles(block):
    def run(q, k, v, hbm):
        flash_attention_q_outer(q, k, v, hbm, block, block, causal=True)

    assert elements(run) == (math.ceil(N / block) + 3) * N * D


def test_statistics_are_counted_apart():
    hbm = HBM()
    flash_attention_q_outer(*tensors(N, N, D, torch.float16), hbm, 64, 64)
    assert hbm.bytes["statistics"] == 2 * N  # logsumexp, written once
    hbm = HBM()
    flash_attention_kv_outer(*tensors(N, N, D, torch.float16), hbm, 64, 128)
    assert hbm.bytes["statistics"] == 2 * 4 * N * (N // 128)  # m and l, read and written for every tile of keys
