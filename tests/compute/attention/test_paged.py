"""The paged backend over a real cache whose other rows are NaN, against plain attention and the contiguous one."""

import math
import random
from dataclasses import replace

import pytest
import torch

from minillm.compute.attention import paged
from minillm.compute.attention.base import AttentionMetadata, StepAttention
from minillm.compute.attention.naive import NaiveAttention, visible
from minillm.compute.attention.paged import PagedAttention, additive_mask, indices
from minillm.core.config import EngineConfig
from minillm.core.kv_spec import FullAttentionSpec
from minillm.kernels import HAS_TRITON
from minillm.memory.kv_cache import KVCache
from minillm.memory.kv_manager import KVGeometry, group_layers
from tests.compute.attention.reference import DTYPES, assert_as_good, draw, low_precision, metadata, reference
from tests.kernels.support import compiled, needs_triton

if HAS_TRITON:
    from minillm.kernels.interpreter import watch

# (n_q, n_k): decodes of equal and other lengths, prompts, appends, one that waits, queries that see nothing.
MIXED = [
    (1, 37),
    (9, 9),
    (1, 1),
    (0, 5),
    (1, 37),
    (3, 20),
    (5, 3),
    (2, 0),
    (1, 17),
    (1, 0),
    (9, 12),
    (3, 21),
    (1, 2),
    (4, 8),
]
SCALE = 0.2  # not what torch takes if it is told nothing
BACKENDS = {
    "torch": PagedAttention,
    "triton": lambda: PagedAttention(EngineConfig(kernel_backend="triton"), "cpu"),
}
backends = pytest.mark.parametrize(
    "make", [BACKENDS["torch"], pytest.param(BACKENDS["triton"], marks=[needs_triton, compiled])], ids=BACKENDS
)


@pytest.fixture(params=["", "short stretches", "many small groups"])
def groups(request, monkeypatch):
    """Groups as they are; prompts cut into many stretches; and groups so small that a few tokens make many."""
    small = {"STRETCH": 4, "GROUP_PADDING": 3, "GROUP_BYTES": 2000}
    for name in {"": (), "short stretches": ("STRETCH",), "many small groups": small}[request.param]:
        monkeypatch.setattr(paged, name, small[name])


class Paged:
    """Sequences (q, k, v) in a cache of shuffled blocks, and one step over the last tokens of each."""

    def __init__(self, sequences, size=4, layers=1, seed=0):
        self.sequences = sequences
        (_, kv_heads, d), dtype = sequences[0][1].shape, sequences[0][0].dtype
        counts = [-(-len(k) // size) for _, k, _ in sequences]
        ids = list(range(1, sum(counts) + 3))
        random.Random(seed).shuffle(ids)
        spec = FullAttentionSpec(kv_heads, d, str(dtype).removeprefix("torch."))
        self.geometry = KVGeometry(group_layers([spec] * layers), size, len(ids), null_rows=size)
        self.cache = KVCache(self.geometry)
        for layer in range(layers):
            self.cache.layer(layer).k.fill_(math.nan)
            self.cache.layer(layer).v.fill_(math.nan)
        table = torch.zeros(len(sequences), max(1, *counts) + 1, dtype=torch.int32)
        self.slots, starts = [], [0]
        for r, ((q, k, v), count) in enumerate(zip(sequences, counts, strict=True)):
            own, ids = ids[:count], ids[count:]
            table[r, :count] = torch.tensor(own)
            slots = [self.geometry.first_row(own[i // size]) + i % size for i in range(len(k))]
            for layer in range(layers):
                self.cache.layer(layer).write(torch.tensor(slots, dtype=torch.int64), k=k, v=v)
            self.slots.append(slots)
            starts.append(starts[-1] + len(q))
        new = [
            slot for (q, k, _), slots in zip(sequences, self.slots, strict=True) for slot in slots[-len(q) :] if len(q)
        ]
        self.q = torch.cat([q for q, _, _ in sequences])
        self.metadata = AttentionMetadata(
            query_lens=[len(q) for q, _, _ in sequences],
            seq_lens=[len(k) for _, k, _ in sequences],
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            slot_mapping=torch.tensor(new, dtype=torch.int64),
            block_table=table,
            first_rows=[slots[0] if slots else 0 for slots in self.slots],
            block_size=size,
        )

    def run(self, backend, window=None, return_lse=False, layer=0):
        backend.plan(self.metadata)
        return backend.forward(self.q, self.cache.layer(layer), SCALE, window, return_lse)

    def check(self, backend, window=None):
        want = [reference(*sequence, SCALE, window) for sequence in self.sequences]
        low = [low_precision(*sequence, SCALE, window) for sequence in self.sequences]
        o, nothing = self.run(backend, window)
        with_o, lse = self.run(backend, window, return_lse=True)
        assert nothing is None and o.dtype == self.q.dtype and lse.dtype == torch.promote_types(o.dtype, torch.float32)
        for got, i in ((o, 0), (with_o, 0), (lse, 1)):
            assert_as_good(got, torch.cat([x[i] for x in low]), torch.cat([x[i] for x in want]))


def sequences(shapes, heads=4, kv_heads=2, d=16, dtype=torch.float64):
    return [draw(*shape, heads, kv_heads, d, dtype, seed) for seed, shape in enumerate(shapes)]


# -- right ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 4])
def test_a_mixed_batch(dtype, window, groups):
    Paged(sequences(MIXED, dtype=dtype)).check(PagedAttention(), window)


@needs_triton
@compiled
@pytest.mark.parametrize("window", [None, 4])
def test_a_mixed_batch_in_triton(window):
    step, backend = Paged(sequences(MIXED, 2, 1, dtype=torch.float32)), BACKENDS["triton"]()
    with watch() as seen:
        step.run(backend, window)
    assert seen.loads["k_ptr"] and seen.loads["table_ptr"], "it is the kernel that runs"
    step.check(backend, window)


@pytest.mark.parametrize("size", [1, 4, 16, 64])
def test_block_sizes(size, groups):
    Paged(sequences(MIXED, dtype=torch.float32), size).check(PagedAttention())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [1, 40, 59, 256])
def test_head_dims(d, dtype):
    Paged(sequences([(1, 18), (1, 7), (5, 9)], d=d, dtype=dtype)).check(PagedAttention())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (9, 3), (8, 2), (5, 1)])
def test_grouped_queries(heads, kv_heads, dtype):
    Paged(sequences([(1, 18), (1, 7), (5, 9)], heads, kv_heads, dtype=dtype)).check(PagedAttention())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompt_of_several_stretches(dtype):
    Paged(sequences([(paged.STRETCH + 3, paged.STRETCH + 20), (1, 200)], 2, 1, dtype=dtype)).check(PagedAttention())


def test_two_stretches_of_one_prompt_in_a_group(monkeypatch):
    monkeypatch.setattr(paged, "STRETCH", 4)
    step, backend = Paged(sequences([(8, 8), (1, 3), (4, 8)])), PagedAttention()
    step.check(backend)
    step.run(backend)
    assert [len(group.blocks) for groups in backend.groups.values() for group in groups] == [6, 1]


@pytest.mark.parametrize("window", [None, 1, 6, 100])
def test_paged_equals_contiguous(window, groups):
    """Equal to NaiveAttention over a contiguous cache, and to it over the paged one."""
    here = Paged(sequences(MIXED))
    rows = [len(k) for _, k, _ in here.sequences]
    firsts = [sum(rows[:i]) for i in range(len(rows))]
    spec = FullAttentionSpec(2, 16, "float64")
    cache = KVCache(KVGeometry(group_layers([spec]), sum(rows), 1, null_rows=1))
    cache.layer(0).write(
        torch.arange(sum(rows)),
        k=torch.cat([k for _, k, _ in here.sequences]),
        v=torch.cat([v for *_, v in here.sequences]),
    )
    naive = NaiveAttention()
    naive.plan(metadata(here.metadata.query_lens, rows, firsts))
    for return_lse in (False, True):
        got = here.run(PagedAttention(), window, return_lse)
        for want in (
            naive.forward(here.q, cache.layer(0), SCALE, window, return_lse),
            here.run(NaiveAttention(), window, return_lse),
        ):
            torch.testing.assert_close(got[0], want[0], rtol=0, atol=1e-12)
            assert not return_lse or torch.allclose(got[1], want[1], rtol=0, atol=1e-12)


def test_no_neighbour_changes_a_request(groups):
    """Alone, beside others, and beside others in other blocks: equal but for the rounding of float64."""
    each = sequences(MIXED)
    whole = Paged(each).run(PagedAttention())[0]
    elsewhere = Paged(each, seed=7).run(PagedAttention())[0]
    assert torch.equal(whole, elsewhere)
    end = 0
    for sequence in each:
        begin, end = end, end + len(sequence[0])
        alone = Paged([sequence]).run(PagedAttention())[0]
        torch.testing.assert_close(whole[begin:end], alone, rtol=0, atol=1e-13)


@backends
def test_step_after_step_and_layers_of_other_windows(make):
    """One backend, as the engine has it: batches that grow and shrink, two windows in one step."""
    backend = make()
    for shapes in ([(5, 5), (1, 30)], [(1, 6), (1, 31), (40, 40)], [(1, 7)]):
        step = Paged(sequences(shapes, dtype=torch.float32), layers=3)
        backend.plan(step.metadata)
        for layer, window in enumerate((None, 3, None)):
            got = backend.forward(step.q, step.cache.layer(layer), SCALE, window)[0]
            want = torch.cat([reference(*sequence, SCALE, window)[0] for sequence in step.sequences])
            torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


@backends
def test_every_step_is_planned_anew(make):
    """The same cache in both steps, as in the engine."""
    step = Paged(sequences([(1, 9), (1, 6), (1, 4)], dtype=torch.float32))
    backend = make()
    whole = step.run(backend)[0]
    step.metadata = replace(step.metadata, seq_lens=[7, 6, 3])
    got = step.run(backend)[0]
    assert not torch.equal(got, whole)
    assert torch.equal(got, step.run(make())[0])


@backends
def test_slices_of_one_product(make):
    step = Paged(sequences([(3, 9), (1, 7), (1, 7)], dtype=torch.float32))
    want = step.run(make())[0]
    step.q = torch.cat((step.q, step.q), dim=1)[:, :4]
    assert not step.q.is_contiguous()
    torch.testing.assert_close(step.run(make())[0], want)


# -- writes ---------------------------------------------------------------------------------------------------------


@backends
def test_a_step_writes_its_slots_and_nothing_else(make):
    step = Paged(sequences([(1, 37), (9, 9), (3, 20), (0, 5)], dtype=torch.float32), layers=2)
    before = step.cache.arena.clone()
    step.run(make())
    assert torch.equal(step.cache.arena, before), "attention only reads"
    new = [torch.randn(len(step.metadata.slot_mapping), 2, 16) for _ in range(2)]
    attention = StepAttention(make(), step.cache, step.metadata)
    attention.attend(1, step.q, *new, SCALE, None)
    rows = before.view(torch.float32).view(2, 2, -1, 2, 16)  # layer, k or v, row
    for i in (0, 1):
        rows[1, i, step.metadata.slot_mapping] = new[i]
    assert torch.equal(step.cache.arena, before)


def test_all_layers_share_one_workspace():
    step = Paged(sequences([(1, 37), (1, 30)], dtype=torch.float32), layers=3)
    backend = PagedAttention()
    backend.plan(step.metadata)
    places = set()
    for layer in range(3):
        backend.forward(step.q, step.cache.layer(layer), SCALE)
        places.add(tuple(space.data_ptr() for space in backend.workspace.values()))
    assert len(places) == 1 and len(backend.workspace) == 2


# -- groups ---------------------------------------------------------------------------------------------------------


def together(shapes, kv_heads=1, d=1, dtype=torch.float32):
    """Groups of a step: the (queries, keys) in each."""
    backend, step = PagedAttention(), Paged(sequences(shapes, kv_heads, kv_heads, d, dtype), 16)
    backend.plan(step.metadata)
    groups = backend._together(step.cache.layer(0))
    return groups, [[(s.n, s.keys) for s in group] for group in groups]


def test_equal_decodes_are_one_group_and_skewed_ones_are_not():
    assert together([(1, 64)] * 8)[1] == [[(1, 64)] * 8]
    assert together([(1, 512), (1, 64)] * 2)[1] == [[(1, 512)] * 2, [(1, 64)] * 2]
    assert together([(1, 60), (1, 64), (1, 62)])[1] == [[(1, 64), (1, 62), (1, 60)]]


def test_tokens_of_a_group_that_is_the_whole_step_are_a_slice():
    """So nothing is copied, though groups are made in the order of lengths."""
    step = Paged(sequences([(1, 9), (1, 12), (1, 10)], dtype=torch.float32))
    backend = PagedAttention()
    step.run(backend)
    ((group,),) = backend.groups.values()
    assert group.tokens == slice(0, 3)


def test_padding_and_size_of_a_group_are_bounded():
    rng = random.Random(0)
    shapes = [(1, rng.randint(1, 400)) for _ in range(40)]
    for kv_heads, d in ((1, 1), (4, 32)):
        groups, keys = together(shapes, kv_heads, d)
        assert sorted(pair for group in keys for pair in group) == sorted(shapes)
        for group in groups:
            width = max(s.keys for s in group)
            assert sum(width - s.keys for s in group) <= paged.GROUP_PADDING
            assert len(group) == 1 or len(group) * width * kv_heads * d * 8 <= paged.GROUP_BYTES
    # Not more groups than those bounds ask for.
    assert len(together(shapes)[0]) <= 2 + sum(400 - n for _, n in shapes) // paged.GROUP_PADDING


def test_stretches_cover_every_query_that_sees_a_key_once():
    groups, _ = together(shapes := [*MIXED, (paged.STRETCH + 44, paged.STRETCH + 54), (1, 900)])
    begin, want = 0, []
    for n_q, n_k in shapes:
        want += range(begin + max(0, n_q - n_k), begin + n_q)
        begin += n_q
    assert sorted(row for group in groups for s in group for row in range(s.first, s.first + s.n)) == want
    of_the_prompt = [(s.n, s.keys) for group in groups for s in group if s.request == len(MIXED)]
    assert of_the_prompt == [(paged.STRETCH, 10 + paged.STRETCH), (44, paged.STRETCH + 54)]


@pytest.mark.parametrize("window", [None, 1, 2, 5, 100])
@pytest.mark.parametrize("n, keys, width", [(1, 1, 1), (1, 5, 8), (3, 5, 5), (3, 5, 9), (5, 5, 6)])
def test_additive_mask(n, keys, width, window):
    seen = torch.nn.functional.pad(visible(n, keys, window, "cpu"), (0, width - keys))
    assert torch.equal(
        additive_mask(n, keys, width, window, torch.float32), torch.zeros(n, width).masked_fill(~seen, -math.inf)
    )


def test_indices():
    assert indices([3, 4, 5], "cpu") == slice(3, 6) and indices([7], "cpu") == slice(7, 8)
    assert indices([3, 5], "cpu").tolist() == [3, 5]
    assert indices([3, 3, 5], "cpu").tolist() == [3, 3, 5], "a request may have two stretches in a group"
