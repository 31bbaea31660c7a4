import random
from collections import Counter

import pytest

from minillm.core.batch import ScheduledBatch
from minillm.core.config import EngineConfig
from minillm.core.kv_spec import FullAttentionSpec
from minillm.memory.block_pool import IntegrityError
from minillm.memory.kv_manager import (
    KVGeometry,
    KVManager,
    bytes_per_row,
    group_layers,
    plan_geometry,
)
from minillm.memory.radix_cache import RadixCache
from tests.support import random_config

SPEC = FullAttentionSpec(num_kv_heads=2, head_dim=16, dtype="float32")  # 256 bytes a row
WIDE = FullAttentionSpec(num_kv_heads=4, head_dim=8, dtype="float16")  # 128 bytes a row


def copies_of(kv: KVManager) -> list[tuple[int, int, int]]:
    """The copies that the next pass must do first."""
    batch = ScheduledBatch(step=0)
    kv.take_moves(batch)
    return batch.block_copies


def manager(blocks: int = 4, block_size: int = 4, groups: int = 1, null_rows: int = 4) -> KVManager:
    specs = [SPEC, WIDE][:groups]
    return KVManager(KVGeometry(group_layers(specs), block_size, blocks, null_rows), max_model_len=1000)


# -- geometry -------------------------------------------------------------------------------------------------------


def config(**changes) -> EngineConfig:
    return EngineConfig(max_model_len=100, max_num_batched_tokens=2048, **changes)


def paged(**changes) -> EngineConfig:
    """A config with the layout of chapter 02, whether or not that chapter is built."""
    made = config(**changes)
    object.__setattr__(made, "kv_layout", "paged")
    return made


def test_layers_of_equal_spec_form_a_group():
    groups = group_layers([SPEC, WIDE, SPEC, WIDE, SPEC])
    assert [(g.spec, g.layers) for g in groups] == [(SPEC, (0, 2, 4)), (WIDE, (1, 3))]
    assert bytes_per_row(groups) == 3 * 256 + 2 * 128


def test_contiguous_override_counts_requests_and_not_the_null_row():
    plan = plan_geometry(config(num_gpu_blocks_override=3), [SPEC] * 2, 0)
    assert (plan.num_usable_blocks, plan.block_size, plan.null_rows) == (3, 100, 1)
    assert plan.num_rows == 301
    assert plan.num_bytes == 301 * 2 * 256
    assert [plan.first_row(block) for block in range(4)] == [0, 1, 101, 201]
    assert KVManager(plan, 100).capacity == 100


def test_paged_override_counts_the_null_block():
    plan = plan_geometry(paged(num_gpu_blocks_override=3, block_size=16), [SPEC] * 2, 0)
    assert (plan.num_usable_blocks, plan.block_size, plan.null_rows) == (2, 16, 16)
    assert [plan.first_row(block) for block in range(3)] == [0, 16, 32]
    assert plan.num_rows == 48
    assert KVManager(plan, 100).capacity == 32, "two blocks of 16 rows hold less than max_model_len"


@pytest.mark.parametrize("make, null_rows, block_size", [(config, 1, 100), (paged, 16, 16)])
def test_bytes_are_filled_as_far_as_whole_blocks_go(make, null_rows, block_size):
    row = 2 * 256
    for blocks in (1, 2, 5):
        exact = (null_rows + blocks * block_size) * row
        assert plan_geometry(make(), [SPEC] * 2, exact).num_usable_blocks == blocks
        assert plan_geometry(make(), [SPEC] * 2, exact + block_size * row - 1).num_usable_blocks == blocks
        plan = plan_geometry(make(), [SPEC] * 2, exact)
        assert plan.num_bytes == exact, "the null block is paid for out of the same bytes"


def test_contiguous_reserves_no_more_than_max_num_seqs():
    assert plan_geometry(config(max_num_seqs=7), [SPEC], 1 << 40).num_usable_blocks == 7
    assert plan_geometry(paged(max_num_seqs=7), [SPEC], 1 << 20).num_usable_blocks > 7


def test_too_little_memory_is_refused_with_the_numbers():
    row, need = 512, 101 * 512
    with pytest.raises(ValueError, match=f"{need - 1:,} bytes.*100 rows.*take {need:,} bytes.*{row:,} a row"):
        plan_geometry(config(), [SPEC] * 2, need - 1)
    with pytest.raises(ValueError, match="num_gpu_blocks_override is 1"):
        plan_geometry(paged(num_gpu_blocks_override=1), [SPEC], 1 << 30)
    with pytest.raises(ValueError, match="may take -5 bytes"):
        plan_geometry(config(), [SPEC], -5)


def test_a_real_config_resolves_to_a_geometry():
    resolved = EngineConfig().resolve(random_config())
    assert plan_geometry(resolved, [SPEC] * 2, 1 << 30).block_size == 128


# -- tables ---------------------------------------------------------------------------------------------------------


def test_tables_grow_by_whole_blocks():
    kv = manager()
    assert kv.allocate("a", 0, 4).block_ids == [[1]]
    assert kv.allocate("a", 4, 5).block_ids == [[2]]
    assert kv.allocate("a", 5, 8).block_ids == [[]]
    assert kv.block_ids("a") == [[1, 2]]
    assert kv.num_free_blocks == 2
    assert kv.num_reserved_rows == 8


def test_exactly_all_blocks_and_one_row_more():
    kv = manager(blocks=3)
    assert kv.allocate("a", 0, 12).block_ids == [[1, 2, 3]]
    assert kv.allocate("a", 12, 13) is None
    assert kv.allocate("b", 0, 1) is None
    assert kv.block_ids("a") == [[1, 2, 3]]
    kv.free("a")
    assert kv.allocate("a", 0, 13) is None
    assert kv.num_free_blocks == 3
    assert kv.check_integrity(live=[])


def test_lack_in_one_group_changes_no_group():
    kv = manager(blocks=5, groups=2)
    assert kv.allocate("a", 0, 8).block_ids == [[1, 2], [3, 4]]
    assert kv.allocate("a", 8, 9) is None, "one block is free, two groups want one each"
    assert kv.block_ids("a") == [[1, 2], [3, 4]]
    assert kv.num_free_blocks == 1
    assert kv.check_integrity(live=["a"])


def test_a_refused_newcomer_leaves_no_trace():
    kv = manager(blocks=1)
    assert kv.allocate("a", 0, 5) is None
    with pytest.raises(KeyError):
        kv.block_ids("a")
    assert kv.check_integrity(live=[])


def test_free_returns_the_tail_first_and_ignores_the_unknown():
    kv = manager(blocks=3)
    kv.allocate("a", 0, 12)
    kv.free("a")
    kv.free("a")
    kv.free("nobody")
    assert kv.num_free_blocks == 3
    assert kv.allocate("b", 0, 12).block_ids == [[3, 2, 1]]


def test_block_ids_are_copies():
    kv = manager()
    kv.allocate("a", 0, 4)
    kv.block_ids("a")[0].append(3)
    assert kv.block_ids("a") == [[1]]
    assert kv.check_integrity(live=["a"])


@pytest.mark.parametrize("groups", [1, 2])
def test_a_write_to_a_shared_block_copies_exactly_that_one(groups):
    kv = manager(blocks=10, groups=groups)
    kv.allocate("parent", 0, 10)  # three blocks a group, the last one half full
    kv.fork("parent", "child")
    before = kv.block_ids("parent")
    assert kv.block_ids("child") == before
    assert kv.num_free_blocks == 10 - 3 * groups, "a fork takes no block"
    got = kv.allocate("child", 10, 11)
    assert got.rewritten
    assert got.block_ids == kv.block_ids("child")
    copies = copies_of(kv)
    assert copies == [(g, before[g][2], kv.block_ids("child")[g][2]) for g in range(groups)]
    assert copies_of(kv) == [], "handed out once"
    assert kv.block_ids("parent") == before
    for g in range(groups):
        assert kv.block_ids("child")[g][:2] == before[g][:2], "blocks not written stay shared"
        assert kv.block_ids("child")[g][2] not in before[g]
    # The parent is alone with its last block now, so it writes in place.
    assert not kv.allocate("parent", 10, 11).rewritten
    assert copies_of(kv) == []
    assert kv.check_integrity(live=["parent", "child"])


def test_copy_on_write_and_growth_in_one_go():
    kv = manager(blocks=6)
    kv.allocate("a", 0, 6)
    kv.fork("a", "b")
    assert kv.allocate("b", 6, 13).block_ids == [[1, 3, 4, 5]]
    assert copies_of(kv) == [(0, 2, 3)]


def test_copy_on_write_lacking_a_block_changes_nothing():
    kv = manager(blocks=2)
    kv.allocate("a", 0, 6)
    kv.fork("a", "b")
    assert kv.allocate("b", 6, 7) is None
    assert copies_of(kv) == []
    assert kv.block_ids("a") == kv.block_ids("b") == [[1, 2]]
    assert kv.check_integrity(live=["a", "b"])


def test_nothing_to_write_copies_nothing():
    kv = manager()
    kv.allocate("a", 0, 6)
    kv.fork("a", "b")
    assert not kv.allocate("b", 5, 5).rewritten
    assert copies_of(kv) == []


def test_a_fork_of_nothing_or_onto_somebody_is_refused():
    kv = manager()
    kv.allocate("a", 0, 4)
    kv.allocate("b", 0, 4)
    with pytest.raises(KeyError):
        kv.fork("nobody", "c")
    with pytest.raises(IntegrityError, match="b already owns blocks"):
        kv.fork("a", "b")
    assert kv.check_integrity(live=["a", "b"])


def test_truncate_releases_whole_blocks_only():
    kv = manager(groups=2, blocks=8)
    kv.allocate("a", 0, 16)
    kv.truncate("a", 9)
    assert [len(table) for table in kv.block_ids("a")] == [3, 3]
    kv.truncate("a", 8)
    assert [len(table) for table in kv.block_ids("a")] == [2, 2]
    kv.truncate("a", 100)
    assert [len(table) for table in kv.block_ids("a")] == [2, 2]
    kv.truncate("a", 0)
    assert kv.block_ids("a") == [[], []]
    assert kv.num_free_blocks == 8
    assert kv.allocate("a", 0, 4).block_ids == [[4], [8]], "the longest free first"


def test_truncate_of_a_fork_leaves_the_other_its_blocks():
    kv = manager()
    kv.allocate("a", 0, 16)
    kv.fork("a", "b")
    kv.truncate("a", 4)
    assert kv.num_free_blocks == 0
    kv.free("b")
    assert kv.num_free_blocks == 3
    assert kv.check_integrity(live=["a"])


def leak(kv: KVManager) -> None:
    kv.pool.allocate(1)


def double_free(kv: KVManager) -> None:
    kv.pool.release(kv.block_ids("a")[0])


def block_in_two_tables(kv: KVManager) -> None:
    kv._tables["b"][0][0] = kv._tables["a"][0][0]


def null_block_owned(kv: KVManager) -> None:
    kv._tables["a"][0][0] = 0


def dead_owner(kv: KVManager) -> None:
    kv._tables["gone"] = kv._tables.pop("b")


@pytest.mark.parametrize("fault", [leak, double_free, block_in_two_tables, null_block_owned, dead_owner])
def test_planted_faults_are_found(fault):
    kv = manager(blocks=8)
    kv.allocate("a", 0, 8)
    kv.allocate("b", 0, 4)
    assert kv.check_integrity(live=["a", "b"])
    fault(kv)
    with pytest.raises(IntegrityError):
        kv.check_integrity(live=["a", "b"])


def test_a_dead_owner_is_named():
    kv = manager()
    kv.allocate("a", 0, 1)
    assert kv.check_integrity()
    with pytest.raises(IntegrityError, match="finished requests still own blocks: a"):
        kv.check_integrity(live=[])


# -- fuzz -----------------------------------------------------------------------------------------------------------


class Mirror:
    """Plays a runner beside a KVManager: keeps tables from what ``allocate`` says, and the content of every row."""

    def __init__(self, kv: KVManager):
        self.kv, self.groups = kv, len(kv.geometry.groups)
        self.tables: dict[str, list[list[int]]] = {}
        self.texts: dict[str, list[int]] = {}  # what the request has written, row by row
        self.rows: dict[tuple[int, int], int] = {}  # (group, row) -> content
        self.pending: dict[str, tuple[int, list[int]]] = {}  # writes of the next pass

    def slot(self, request_id: str, group: int, row: int) -> tuple[int, int]:
        geometry = self.kv.geometry
        block = self.tables[request_id][group][row // geometry.block_size]
        return group, geometry.first_row(block) + row % geometry.block_size

    def blocks_needed(self, request_id: str, first: int, end: int) -> int:
        size = self.kv.geometry.block_size
        holders = Counter(b for tables in self.tables.values() for table in tables for b in table)
        needed = 0
        for table in self.tables.get(request_id, [[]] * self.groups):
            for i in range(-(-end // size)):
                written = first // size <= i and first < end
                needed += i >= len(table) or (written and holders[table[i]] > 1)
        return needed

    def allocate(self, request_id: str, first: int, values: list[int]) -> None:
        end = first + len(values)
        needed, free = self.blocks_needed(request_id, first, end), self.kv.num_free_blocks
        got = self.kv.allocate(request_id, first, end)
        assert (got is None) == (needed > free)
        if got is None:
            assert self.kv.num_free_blocks == free
            return
        assert self.kv.num_free_blocks == free - needed
        if got.rewritten:
            self.tables[request_id] = [list(table) for table in got.block_ids]
        else:
            tables = self.tables.setdefault(request_id, [[] for _ in range(self.groups)])
            for table, new in zip(tables, got.block_ids, strict=True):
                table += new
        self.texts.setdefault(request_id, [])
        self.pending[request_id] = (first, values)

    def run_pass(self) -> None:
        """Copies in order, then all writes."""
        geometry = self.kv.geometry
        for group, source, target in copies_of(self.kv):
            for i in range(geometry.block_size):
                content = self.rows.get((group, geometry.first_row(source) + i))
                self.rows[group, geometry.first_row(target) + i] = content
        for request_id, (first, values) in self.pending.items():
            self.texts[request_id][first : first + len(values)] = values
            for group in range(self.groups):
                for i, value in enumerate(values):
                    self.rows[self.slot(request_id, group, first + i)] = value
        self.pending.clear()

    def fork(self, parent: str, child: str) -> None:
        self.kv.fork(parent, child)
        self.tables[child] = self.kv.block_ids(child)
        self.texts[child] = list(self.texts[parent])

    def truncate(self, request_id: str, rows: int) -> None:
        self.kv.truncate(request_id, rows)
        keep = self.kv.geometry.blocks_for(rows)
        self.tables[request_id] = [table[:keep] for table in self.tables[request_id]]
        del self.texts[request_id][rows:]

    def free(self, request_id: str) -> None:
        self.kv.free(request_id)
        for of in (self.tables, self.texts, self.pending):
            of.pop(request_id, None)

    def check(self) -> None:
        assert self.kv.check_integrity(live=self.tables)
        blocks = {b for tables in self.tables.values() for table in tables for b in table}
        assert self.kv.num_free_blocks == self.kv.num_usable_blocks - len(blocks)
        for request_id, text in self.texts.items():
            assert self.kv.block_ids(request_id) == self.tables[request_id]
            if request_id in self.pending:
                continue
            for group in range(self.groups):
                assert [self.rows[self.slot(request_id, group, row)] for row in range(len(text))] == text


@pytest.mark.parametrize("seed", range(30))
def test_everybody_reads_what_they_wrote(seed):
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 5])
    kv = manager(rng.randint(4, 24), block_size, groups=rng.choice([1, 2]), null_rows=rng.choice([1, block_size]))
    mirror = Mirror(kv)
    fresh = iter(range(10**6))

    def values() -> list[int]:
        return [next(fresh) for _ in range(rng.randint(1, 2 * block_size + 1))]

    for _ in range(200):
        known = sorted(mirror.texts)
        choice = rng.random()
        settled = not mirror.pending
        if choice < 0.25 or not known:
            mirror.allocate(f"r{next(fresh)}", 0, values())
        elif choice < 0.5:
            chosen = rng.choice(known)
            if chosen not in mirror.pending:
                length = len(mirror.texts[chosen])
                mirror.allocate(chosen, rng.choice([length, rng.randint(0, length)]), values())
        elif choice < 0.6 and settled:
            mirror.fork(rng.choice(known), f"r{next(fresh)}")
        elif choice < 0.7 and settled:
            chosen = rng.choice(known)
            mirror.truncate(chosen, rng.randint(0, len(mirror.texts[chosen])))
        elif choice < 0.8:
            mirror.free(rng.choice(known))
        else:
            mirror.run_pass()
        mirror.check()
    for request_id in list(mirror.texts):
        mirror.free(request_id)
    assert kv.num_free_blocks == kv.num_usable_blocks


# -- host memory ----------------------------------------------------------------------------------------------------


def hosted(blocks: int = 4, hosts: int = 2) -> KVManager:
    return KVManager(KVGeometry(group_layers([SPEC]), 4, blocks, 4), 1000, hosts)


def test_swapping_out_and_in_names_every_move_once():
    kv = hosted()
    kv.allocate("a", 0, 7)
    (table,) = kv.block_ids("a")
    assert kv.swap_out("a", 7) and kv.num_free_blocks == 4 and kv.is_swapped("a") and not kv.holds("a")
    assert kv.check_integrity(live=["a"])
    got = kv.allocate("a", 7, 9)
    assert got.rewritten and got.block_ids == kv.block_ids("a") and len(got.block_ids[0]) == 3
    batch = ScheduledBatch(step=0)
    kv.take_moves(batch)
    assert [device for _, device, _ in batch.swaps_out] == table
    hosts = [host for _, _, host in batch.swaps_out]
    assert [(host, device) for _, host, device in batch.swaps_in] == list(zip(hosts, got.block_ids[0], strict=False))
    again = ScheduledBatch(step=1)
    kv.take_moves(again)
    assert not again.swaps_out and not again.swaps_in


def test_only_rows_that_hold_a_token_move():
    kv = hosted(hosts=1)
    kv.allocate("a", 0, 7)
    assert not kv.swap_out("a", 5), "two blocks, room for one"
    assert kv.holds("a") and kv.check_integrity(live=["a"])
    assert kv.swap_out("a", 4)


def test_host_blocks_that_the_pass_reads_are_not_written_by_it():
    """Swaps out come before swaps in, so what is being brought back must stay until the pass is formed."""
    kv = hosted(hosts=1)
    kv.allocate("a", 0, 4)
    kv.allocate("b", 0, 4)
    assert kv.swap_out("a", 4)
    kv.take_moves(ScheduledBatch(step=0))
    assert kv.allocate("a", 4, 5) is not None
    assert not kv.swap_out("b", 4), "a's rows are still there"
    assert kv.check_integrity(live=["a", "b"])
    kv.take_moves(ScheduledBatch(step=1))
    assert kv.swap_out("b", 4)


def test_requests_whose_rows_a_lost_pass_was_to_save_are_named():
    kv = hosted()
    kv.allocate("a", 0, 4)
    kv.swap_out("a", 4)
    saved, lost = ScheduledBatch(step=0), ScheduledBatch(step=1)
    kv.take_moves(saved)
    kv.allocate("b", 0, 4)
    kv.swap_out("b", 4)
    kv.take_moves(lost)
    assert kv.swapped_by(lost) == ["b"] and kv.swapped_by(saved) == ["a"]


def test_rows_shared_by_several_count_once():
    kv = manager(blocks=10)
    kv.allocate("a", 0, 10)
    assert kv.num_used_rows({"a": 10}) == 10
    kv.fork("a", "b", 9)
    assert kv.num_used_rows({"a": 10, "b": 9}) == 10
    kv.allocate("b", 9, 12)
    assert kv.num_used_rows({"a": 10, "b": 12}) == 8 + 2 + 4


# -- a prefix cache -------------------------------------------------------------------------------------------------


def cached(blocks: int = 6, groups: int = 1, hosts: int = 0) -> KVManager:
    geometry = KVGeometry(group_layers([SPEC, WIDE][:groups]), 4, blocks, 4)
    return KVManager(geometry, 1000, hosts, prefix_cache=RadixCache)


def begin(kv: KVManager, request_id: str, tokens) -> int:
    """A request's way to the pass that computes its prompt. Rows that it found; all blocks must be there."""
    match = kv.match(tokens)
    found = match.num_tokens if match else 0
    if match:
        kv.adopt(request_id, match)
    assert kv.allocate(request_id, found, len(tokens)) is not None
    return found


def end(kv: KVManager, request_id: str, tokens) -> None:
    kv.keep(request_id, tokens)
    kv.free(request_id)


@pytest.mark.parametrize("groups", [1, 2])
def test_who_adopts_shares_and_what_is_idle_counts_as_free(groups):
    kv = cached(blocks=8, groups=groups)
    tokens = list(range(10))
    assert begin(kv, "a", tokens) == 0
    blocks = kv.block_ids("a")
    end(kv, "a", tokens)
    assert kv.num_free_blocks == 8 and kv.pool.num_free == 8 - 3 * groups and kv.num_reserved_rows == 0
    assert kv.match(tokens[:8]).num_tokens == 7, "the last token of a prompt is always computed"
    assert kv.match(tokens[:1]) is None and kv.match([9, *tokens]) is None
    match = kv.match([*tokens[:9], 77])
    assert match.num_tokens == 9
    kv.adopt("b", match)
    assert kv.block_ids("b") == blocks and kv.num_free_blocks == 8 - 3 * groups
    assert kv.check_integrity(live=["b"])
    got = kv.allocate("b", 9, 10)
    assert got.rewritten and copies_of(kv) == [(g, blocks[g][2], got.block_ids[g][2]) for g in range(groups)]
    kv.free("b")
    assert kv.num_free_blocks == 8 and kv.check_integrity(live=[])


def test_a_prompt_of_whole_blocks_found_whole_computes_its_last_row_in_a_copy():
    kv = cached()
    begin(kv, "a", range(8))
    end(kv, "a", range(8))
    assert begin(kv, "b", range(8)) == 7
    assert copies_of(kv) == [(0, 2, 3)]
    end(kv, "b", range(8))
    assert kv.pool.num_free == 4, "the same once more is not kept"
    assert kv.check_integrity(live=[])


def test_no_more_is_evicted_than_is_lacking():
    kv = cached(blocks=6)
    begin(kv, "a", range(16))
    end(kv, "a", range(16))
    assert kv.allocate("b", 0, 8) is not None and kv.match(range(17)).num_tokens == 16, "two were free"
    assert kv.allocate("b", 8, 9) is not None and kv.match(range(17)).num_tokens == 12, "one from the end"
    assert kv.num_free_blocks == 3 and kv.check_integrity(live=["b"])


@pytest.mark.parametrize("leave", [0, 1, 5])
def test_nothing_is_evicted_in_vain(leave):
    kv = cached(blocks=6)
    begin(kv, "a", range(16))
    end(kv, "a", range(16))
    assert kv.allocate("b", 0, 4 * (7 - leave), leave=leave) is None
    assert kv.match(range(17)).num_tokens == 16 and kv.pool.num_free == 2
    assert kv.allocate("b", 0, 4 * (6 - leave), leave=leave) is not None
    assert kv.num_free_blocks == leave and kv.check_integrity(live=["b"])


def test_what_a_request_uses_is_not_evicted():
    kv = cached(blocks=6)
    begin(kv, "a", range(16))
    end(kv, "a", range(16))
    assert begin(kv, "b", [*range(8), 70]) == 8
    assert kv.num_free_blocks == 3
    assert kv.allocate("c", 0, 16) is None
    assert kv.allocate("c", 0, 12) is not None
    assert kv.match(range(17)).num_tokens == 8, "the other half is gone"
    assert kv.check_integrity(live=["b", "c"])


def test_of_a_running_request_whole_blocks_are_kept():
    kv = cached(blocks=6)
    begin(kv, "a", range(10))
    kv.keep("a", range(10), running=True)
    assert kv.match(range(10)).num_tokens == 8
    assert kv.num_free_blocks == 3 and kv.check_integrity(live=["a"])
    assert not kv.allocate("a", 10, 11).rewritten, "it goes on writing in its last block"
    end(kv, "a", range(11))
    assert kv.match(range(12)).num_tokens == 11
    assert kv.num_free_blocks == 6 and kv.check_integrity(live=[])


def test_two_that_computed_the_same_keep_it_once_and_both_lock_it():
    kv = cached(blocks=8)
    for name in "ab":
        begin(kv, name, range(8))
    for name in "ab":
        kv.keep(name, range(8), running=True)
    assert kv.num_free_blocks == 4 and kv.check_integrity(live=["a", "b"])
    kv.free("a")
    assert kv.num_free_blocks == 4, "b's own two, and the two of a's that b keeps in the cache"
    kv.free("b")
    assert kv.num_free_blocks == 8 and kv.pool.num_free == 6 and kv.check_integrity(live=[])


def test_a_request_may_give_up_what_only_it_keeps_in_the_cache():
    kv = cached(blocks=8)
    for name in "ab":
        begin(kv, name, range(8))
    for name in "ab":
        kv.keep(name, range(8), running=True)
    assert not kv.forget("a"), "b uses it as well"
    kv.free("a")
    assert kv.forget("b") and kv.num_free_blocks == 6 and kv.match(range(9)) is None
    assert kv.check_integrity(live=["b"])
    assert not kv.forget("b") and not kv.forget("nobody")
    kv.keep("b", range(8), running=True)
    assert kv.match(range(9)).num_tokens == 8 and kv.num_free_blocks == 6
    assert kv.check_integrity(live=["b"])


def test_a_fork_locks_what_it_shares():
    kv = cached(blocks=8)
    begin(kv, "a", range(9))
    kv.keep("a", range(9), running=True)
    kv.fork("a", "b", 8)
    kv.free("a")
    assert kv.num_free_blocks == 6 and kv.check_integrity(live=["b"])
    assert kv.allocate("c", 0, 25) is None
    assert kv.allocate("c", 0, 24) is not None and kv.match(range(9)).num_tokens == 8
    kv.free("b")
    assert kv.num_free_blocks == 2 and kv.check_integrity(live=["c"])


def test_rows_that_only_the_cache_has_are_no_requests():
    """As many blocks may be held without being in a table as are in two: what is shared still counts once."""
    kv = cached(blocks=12)
    for name in "ab":
        begin(kv, name, range(8))
    for name in "ab":
        kv.keep(name, range(8), running=True)
    kv.free("a")  # its two blocks stay: b uses them in the cache, if not in its table
    kv.allocate("c", 0, 8)
    kv.fork("c", "d")
    held = sum(len(kv.block_ids(name)[0]) for name in "bcd")
    assert held == kv.num_usable_blocks - kv.num_free_blocks == 6
    assert kv.num_used_rows({"b": 8, "c": 8, "d": 8}) == 16


def test_extras_keep_apart():
    kv = cached(blocks=8)
    kv.allocate("a", 0, 8)
    kv.keep("a", range(8), ("adapter", None))
    kv.free("a")
    assert kv.match(range(9)) is None and kv.match(range(9), ("other", None)) is None
    assert kv.match(range(9), ("adapter", None)).num_tokens == 8


def test_who_is_swapped_out_leaves_the_cache_alone():
    kv = cached(blocks=6, hosts=6)
    begin(kv, "a", range(8))
    end(kv, "a", range(8))
    begin(kv, "b", [*range(8), 70, 71])
    assert kv.swap_out("b", 10) and kv.num_free_blocks == 6 and kv.check_integrity(live=["b"])
    kv.keep("b", [*range(8), 70, 71])
    assert kv.match([*range(8), 70, 71]).num_tokens == 8, "it holds nothing that could be kept"
    assert kv.allocate("b", 10, 11).rewritten
    assert kv.match(range(9)).num_tokens == 8 and kv.pool.num_free == 1
    assert kv.check_integrity(live=["b"])


def test_adopting_twice_or_too_late_is_refused():
    kv = cached(blocks=4)
    begin(kv, "a", range(8))
    end(kv, "a", range(8))
    match = kv.match(range(9))
    kv.adopt("b", match)
    with pytest.raises(IntegrityError, match="b already owns blocks"):
        kv.adopt("b", match)
    kv.free("b")
    assert kv.allocate("c", 0, 16) is not None
    with pytest.raises(IntegrityError):
        kv.adopt("d", match)


def test_the_cache_is_emptied_only_while_nobody_uses_it():
    kv = cached(blocks=8)
    for name, tokens in (("a", range(8)), ("b", range(100, 106))):
        begin(kv, name, tokens)
        kv.keep(name, tokens)
    kv.free("a")
    assert not kv.reset_prefix_cache() and kv.match(range(9)) is not None
    kv.free("b")
    assert kv.reset_prefix_cache() and kv.match(range(9)) is None and kv.pool.num_free == 8
    assert kv.check_integrity(live=[]) and kv.reset_prefix_cache() and manager().reset_prefix_cache()


def test_a_manager_without_a_cache_finds_and_keeps_nothing():
    kv = manager()
    kv.allocate("a", 0, 8)
    kv.keep("a", range(8))
    kv.free("a")
    assert kv.match(range(9)) is None and not kv.forget("a") and kv.pool.num_free == kv.num_free_blocks == 4


def lock_of_nobody(kv: KVManager) -> None:
    kv.cache.hold(kv.match(range(9)).node)


def lock_lost(kv: KVManager) -> None:
    kv.cache.unlock(kv._locked.pop("b"))


@pytest.mark.parametrize("fault", [lock_of_nobody, lock_lost])
def test_locks_and_users_agree(fault):
    kv = cached(blocks=8)
    begin(kv, "a", range(8))
    end(kv, "a", range(8))
    if fault is lock_lost:
        begin(kv, "b", range(9))
    assert kv.check_integrity()
    fault(kv)
    with pytest.raises(IntegrityError, match=r"somebody uses its block|what is locked in the prefix cache"):
        kv.check_integrity()
