import itertools

import psutil
import pytest
import torch

from minillm.core.kv_spec import FullAttentionSpec
from minillm.memory.kv_cache import KVCache
from minillm.memory.kv_manager import KVGeometry, group_layers

SPECS = {
    "one group": [FullAttentionSpec(2, 16, "float32")] * 3,
    "odd shapes": [FullAttentionSpec(1, 5, "float16")] * 2,
    "two groups": [
        FullAttentionSpec(2, 16, "float32"),
        FullAttentionSpec(3, 7, "float64"),
        FullAttentionSpec(2, 16, "float32"),
    ],
    "bfloat16 beside float32": [FullAttentionSpec(1, 3, "bfloat16"), FullAttentionSpec(1, 3, "float32")],
}


@pytest.fixture(params=SPECS, ids=SPECS)
def specs(request):
    return SPECS[request.param]


@pytest.fixture(params=[1, 4], ids=["contiguous", "paged"])
def cache(specs, request) -> KVCache:
    """Three usable blocks of four rows."""
    return KVCache(KVGeometry(group_layers(specs), 4, 3, null_rows=request.param))


def all_rows(cache: KVCache, specs) -> dict[tuple[int, str], torch.Tensor]:
    return {(layer, name): cache.layer(layer).rows[name] for layer in range(len(specs)) for name in ("k", "v")}


def fill_randomly(cache: KVCache, specs) -> dict[tuple[int, str], torch.Tensor]:
    """Random content everywhere; returns copies of it."""
    generator = torch.Generator().manual_seed(0)
    for rows in all_rows(cache, specs).values():
        rows.copy_(torch.randn(rows.shape, generator=generator, dtype=torch.float64))
    return {key: rows.clone() for key, rows in all_rows(cache, specs).items()}


def span(cache: KVCache, block: int) -> slice:
    first = cache.geometry.first_row(block)
    return slice(first, first + cache.geometry.block_size)


def test_views_have_their_spec_and_start_at_zero(cache, specs):
    for (layer, name), rows in all_rows(cache, specs).items():
        shape, dtype = specs[layer].rows[name]
        assert rows.shape == (cache.geometry.num_rows, *shape)
        assert rows.dtype == getattr(torch, dtype)
        assert rows.is_contiguous()
        assert not rows.any()
    assert cache.layer(0).k is cache.layer(0).rows["k"]
    assert cache.layer(0).v is cache.layer(0).rows["v"]


def test_views_lie_in_the_arena_and_do_not_overlap(cache, specs):
    start = cache.arena.data_ptr()
    spans = sorted(
        (rows.data_ptr() - start, rows.data_ptr() - start + rows.nbytes) for rows in all_rows(cache, specs).values()
    )
    assert spans[0][0] >= 0
    assert spans[-1][1] <= cache.arena.numel()
    for (_, end), (begin, _) in itertools.pairwise(spans):
        assert end <= begin
    assert all(begin % 256 == 0 for begin, _ in spans)
    used = sum(rows.nbytes for rows in all_rows(cache, specs).values())
    assert used == cache.geometry.num_bytes


def test_a_write_changes_its_rows_alone(cache, specs):
    before = fill_randomly(cache, specs)
    slots = torch.tensor([cache.geometry.num_rows - 1, 0, 3])
    k = torch.full((3, *cache.layer(0).k.shape[1:]), 7.0, dtype=cache.layer(0).k.dtype)
    cache.layer(0).write(slots, k=k, v=-k)
    for (layer, name), rows in all_rows(cache, specs).items():
        want = before[layer, name].clone()
        if layer == 0:
            want[slots] = k if name == "k" else -k
        assert torch.equal(rows, want)


def test_rows_are_written_in_the_order_of_their_slots(cache):
    layer = cache.layer(0)
    k = torch.arange(3 * layer.k[0].numel(), dtype=layer.k.dtype).view(3, *layer.k.shape[1:])
    layer.write(torch.tensor([5, 2, 9]), k=k, v=k + 1)
    assert torch.equal(layer.k[[5, 2, 9]], k)
    assert torch.equal(layer.v[[5, 2, 9]], k + 1)


def test_copy_blocks_copies_one_group_in_order(cache, specs):
    before = fill_randomly(cache, specs)
    cache.copy_blocks([(0, 1, 2), (0, 2, 3)])  # the second reads what the first has written
    for (layer, name), rows in all_rows(cache, specs).items():
        want = before[layer, name].clone()
        if layer in cache.geometry.groups[0].layers:
            want[span(cache, 2)] = want[span(cache, 3)] = before[layer, name][span(cache, 1)]
        assert torch.equal(rows, want)


def test_copy_rows_reads_all_before_it_writes_any(cache, specs):
    before = fill_randomly(cache, specs)
    sources, targets = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 1])  # a cycle
    cache.copy_rows(0, sources, targets)
    for (layer, name), rows in all_rows(cache, specs).items():
        want = before[layer, name].clone()
        if layer in cache.geometry.groups[0].layers:
            want[targets] = before[layer, name][sources]
        assert torch.equal(rows, want)


def test_blocks_read_are_copies_and_can_be_written_elsewhere(cache, specs):
    before = fill_randomly(cache, specs)
    group = len(cache.geometry.groups) - 1
    saved = cache.read_blocks(group, [3, 1])
    assert len(saved) == 2 * len(cache.geometry.groups[group].layers)
    assert all(len(rows) == 2 * cache.geometry.block_size for rows in saved)
    for rows in all_rows(cache, specs).values():
        rows.zero_()
    cache.write_blocks(group, [2, 3], saved)
    for (layer, name), rows in all_rows(cache, specs).items():
        want = torch.zeros_like(rows)
        if layer in cache.geometry.groups[group].layers:
            want[span(cache, 2)] = before[layer, name][span(cache, 3)]
            want[span(cache, 3)] = before[layer, name][span(cache, 1)]
        assert torch.equal(rows, want)


def test_no_blocks_are_a_round_trip_too(cache, specs):
    before = fill_randomly(cache, specs)
    saved = cache.read_blocks(0, [])
    assert all(len(rows) == 0 for rows in saved)
    cache.write_blocks(0, [], saved)
    cache.copy_blocks([])
    assert all(torch.equal(rows, before[key]) for key, rows in all_rows(cache, specs).items())


def test_the_null_block_is_nobodys(cache, specs):
    """Padding rows write there; no usable block may see it."""
    for layer in range(len(specs)):
        view = cache.layer(layer)
        padding = torch.arange(cache.geometry.null_rows)
        ones = torch.ones(len(padding), *view.k.shape[1:], dtype=view.k.dtype)
        view.write(padding, k=ones, v=ones)
    for group in range(len(cache.geometry.groups)):
        for rows in cache.read_blocks(group, [1, 2, 3]):
            assert not rows.any()


def test_memory_on_a_cpu_is_taken_when_it_is_written():
    process = psutil.Process()
    before = process.memory_info().rss
    cache = KVCache(
        KVGeometry(group_layers(SPECS["one group"]), block_size=16, num_usable_blocks=1 << 14, null_rows=16)
    )
    size = cache.arena.numel()
    assert size > 1 << 27 and process.memory_info().rss - before < size // 4
    cache.arena.fill_(1)
    assert process.memory_info().rss - before > size // 2, "the measure itself sees what is written"
