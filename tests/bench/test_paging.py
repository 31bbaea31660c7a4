"""The bench of paging compares like with like: both steps answer the same."""

import torch

from minillm.bench import paging


def test_paged_and_contiguous_steps_take_the_same_tokens():
    model = paging.random_model("tiny", torch.float32)
    for lens in ([33, 33], [40, 5, 17, 5]):
        contiguous, paged = (paging.decode_step(model, lens, paged=paged) for paged in (False, True))
        assert contiguous()[1] == paged()[1] == paged()[1]
        other = paging.decode_step(model, [n - 3 for n in lens], paged=True)
        assert other()[1] != paged()[1], "tokens that do not hang on the cache would show nothing"


def test_row_has_the_ratio_of_medians():
    row = paging.paging_row(paging.random_model("tiny", torch.float32), [5, 9], repeats=3)
    assert row["ratio"] == row["paged_ms"] / row["contiguous_ms"] > 0
