"""Every attention backend over a KV cache, as the engine calls it."""

import math

import pytest
import torch

from minillm.compute.attention.flash_backend import FlashAttention
from minillm.compute.attention.naive import NaiveAttention
from minillm.core.kv_spec import FullAttentionSpec
from minillm.kernels import HAS_TRITON, use_triton
from minillm.memory.kv_cache import KVCache
from minillm.memory.kv_manager import KVGeometry, group_layers
from tests.compute.attention.reference import DTYPES, assert_as_good, draw, low_precision, metadata, reference

BACKENDS = {"naive": NaiveAttention, "flash": FlashAttention}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
def test_a_ragged_batch_over_the_cache(make, dtype, window):
    """Prefill, decode, a longer append and a request that waits with one row, in rows out of order."""
    heads, kv_heads, d = 4, 2, 24
    query_lens, seq_lens, blocks = [9, 1, 5, 1], [9, 17, 20, 1], [3, 1, 4, 2]
    spec = FullAttentionSpec(kv_heads, d, str(dtype).removeprefix("torch."))
    geometry = KVGeometry(group_layers([spec]), 20, 4, null_rows=1)
    cache = KVCache(geometry)
    # Rows nobody has written must not be read: one NaN there would spoil everything.
    cache.layer(0).k.fill_(math.nan)
    cache.layer(0).v.fill_(math.nan)
    sequences = [
        draw(new, rows, heads, kv_heads, d, dtype, seed=i)
        for i, (new, rows) in enumerate(zip(query_lens, seq_lens, strict=True))
    ]
    first_rows = [geometry.first_row(block) for block in blocks]
    for (_, k, v), first in zip(sequences, first_rows, strict=True):
        cache.layer(0).write(torch.arange(first, first + len(k)), k=k, v=v)
    backend = make()
    backend.plan(metadata(query_lens, seq_lens, first_rows))
    q = torch.cat([q for q, _, _ in sequences])
    o, lse = backend.forward(q, cache.layer(0), d**-0.5, window, return_lse=True)
    want = [reference(*sequence, d**-0.5, window) for sequence in sequences]
    low = [low_precision(*sequence, d**-0.5, window) for sequence in sequences]
    for got, i in ((o, 0), (lse, 1)):
        assert_as_good(got, torch.cat([x[i] for x in low]), torch.cat([x[i] for x in want]))
    assert backend.forward(q, cache.layer(0), d**-0.5, window)[1] is None


def test_triton_only_where_it_is_asked_for_or_there_is_a_gpu():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert not use_triton("auto", cpu) and not use_triton("torch", gpu)
    assert use_triton("auto", gpu) == HAS_TRITON
    if HAS_TRITON:
        assert use_triton("triton", cpu)
    else:
        with pytest.raises(ValueError, match="Triton is not installed"):
            use_triton("triton", cpu)
