import pytest
import torch

from minillm.compute.attention.dense import DenseAttention
from minillm.compute.attention.naive import attend_one
from tests.compute.attention.reference import reference
from tests.compute.attention.test_naive import draw


@pytest.mark.parametrize("batch, length", [(1, 1), (1, 17), (3, 8)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_dense_is_naive_sequence_by_sequence(batch, length, kv_heads):
    q, k, v = draw(batch * length, batch * length, 4, kv_heads, 16)
    o = DenseAttention(batch, length).attend(0, q, k, v, 0.25, None)
    assert o.shape == q.shape
    for i in range(batch):
        one = slice(i * length, (i + 1) * length)
        torch.testing.assert_close(o[one], attend_one(q[one], k[one], v[one], 0.25)[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(o[one], reference(q[one], k[one], v[one], 0.25)[0], rtol=0, atol=1e-12)


def test_it_is_differentiable():
    tensors = [x.requires_grad_() for x in draw(6, 6, 4, 2, 4)]
    attention = DenseAttention(2, 3)
    assert torch.autograd.gradcheck(lambda *qkv: attention.attend(0, *qkv, 0.5, None), tensors)


def test_a_window_that_cuts_is_refused_and_one_that_does_not_is_none():
    q, k, v = draw(8, 8, 4, 2, 16)
    attention = DenseAttention(1, 8)
    assert torch.equal(attention.attend(0, q, k, v, 0.25, 8), attention.attend(0, q, k, v, 0.25, None))
    with pytest.raises(NotImplementedError, match="window of 7 under sequences of 8"):
        attention.attend(0, q, k, v, 0.25, 7)
