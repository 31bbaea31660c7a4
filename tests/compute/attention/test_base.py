import torch

from minillm.compute.attention.base import StepAttention
from minillm.compute.attention.naive import NaiveAttention
from minillm.core.kv_spec import FullAttentionSpec
from minillm.memory.kv_cache import KVCache
from minillm.memory.kv_manager import KVGeometry, group_layers
from tests.compute.attention.reference import metadata, reference
from tests.compute.attention.test_naive import draw


class CountingBackend(NaiveAttention):
    def __init__(self):
        self.plans, self.forwards = 0, 0

    def plan(self, metadata):
        self.plans += 1
        super().plan(metadata)

    def forward(self, *args, **kwargs):
        self.forwards += 1
        return super().forward(*args, **kwargs)


def test_a_step_writes_its_rows_and_attends_to_all():
    """Five tokens at once, then one: the second step sees the rows of the first. Two layers, one plan a step."""
    geometry = KVGeometry(group_layers([FullAttentionSpec(2, 16, "float64")] * 2), 8, 1, null_rows=1)
    cache, backend = KVCache(geometry), CountingBackend()
    layers = [draw(6, 6, 4, 2, 16, seed=layer) for layer in range(2)]
    for first, end in ((0, 5), (5, 6)):
        step = StepAttention(backend, cache, metadata([end - first], [end], [1]))
        for layer, (q, k, v) in enumerate(layers):
            new = slice(first, end)
            o = step.attend(layer, q[new], k[new], v[new], 0.25, None)
            torch.testing.assert_close(o, reference(q[:end], k[:end], v[:end], 0.25)[0][new], rtol=0, atol=1e-12)
    assert (backend.plans, backend.forwards) == (2, 4)
    for layer, (_, k, v) in enumerate(layers):
        assert torch.equal(cache.layer(layer).k[1:7], k)
        assert torch.equal(cache.layer(layer).v[1:7], v)
        assert not cache.layer(layer).k[0].any(), "the null row is untouched"


def test_metadata_counts_its_tokens():
    assert metadata([3, 1, 2], [3, 9, 4], [1, 10, 20]).num_tokens == 6
