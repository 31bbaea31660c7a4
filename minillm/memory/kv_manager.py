"""Who owns which rows of the KV cache: block tables of requests over a block pool. No torch in here.

Contiguous KV (chapter 0) and paged KV (chapter 2) are one manager: contiguous is a block of max_model_len rows for
each request, so that a request never needs a second one. Blocks that gave way to others may wait in host memory, which
is a second pool of blocks of the same size (PagedAttention, section 4.5).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minillm.core.batch import ScheduledBatch
from minillm.core.config import EngineConfig
from minillm.core.kv_spec import FullAttentionSpec
from minillm.memory.block_pool import BlockPool, IntegrityError

if TYPE_CHECKING:  # an engine without a prefix cache loads no file of one
    from minillm.memory.prefix_cache import Match, Node, PrefixCache


@dataclass(frozen=True)
class KVGroup:
    """Layers of equal spec; a request has one block table for each group."""

    spec: FullAttentionSpec
    layers: tuple[int, ...]


@dataclass(frozen=True)
class KVGeometry:
    """How block ids map to rows of a layer's KV. Block 0 is the null block, of ``null_rows`` rows."""

    groups: tuple[KVGroup, ...]
    block_size: int
    num_usable_blocks: int
    null_rows: int

    @property
    def num_rows(self) -> int:
        return self.null_rows + self.num_usable_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_rows * bytes_per_row(self.groups)

    def first_row(self, block: int) -> int:
        """Row where a block begins."""
        return 0 if block == 0 else self.null_rows + (block - 1) * self.block_size

    def blocks_for(self, rows: int) -> int:
        return -(-rows // self.block_size)


@dataclass(frozen=True)
class Allocation:
    """What a runner must be told after ``KVManager.allocate``: block ids per group."""

    block_ids: list[list[int]]  # to append to the request's table, or the whole table if it was rewritten
    rewritten: bool = False


def bytes_per_row(groups: Iterable[KVGroup]) -> int:
    """Bytes that one token takes in all layers."""
    return sum(group.spec.bytes_per_token * len(group.layers) for group in groups)


def group_layers(specs: list[FullAttentionSpec]) -> tuple[KVGroup, ...]:
    """Layers of equal spec together, in the order of their first layer."""
    layers: dict[FullAttentionSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers.setdefault(spec, []).append(layer)
    return tuple(KVGroup(spec, tuple(of)) for spec, of in layers.items())


def plan_geometry(config: EngineConfig, specs: list[FullAttentionSpec], available_bytes: int) -> KVGeometry:
    """The KV cache that a resolved config asks for, in at most ``available_bytes`` unless blocks are given.

    For contiguous KV ``num_gpu_blocks_override`` counts requests, and the null block is one row beside them; for
    paged KV it counts blocks, the null block among them. ValueError if not even one request of one token fits.
    """
    groups = group_layers(specs)
    row_bytes = bytes_per_row(groups)
    if config.kv_layout == "contiguous":
        block_size, null_rows, uncounted = config.max_model_len, 1, 0
        most = config.max_num_seqs  # one block a request: more could never be used
    else:
        block_size, null_rows, uncounted = config.block_size, config.block_size, 1
        most = None
    if config.num_gpu_blocks_override is not None:
        usable = config.num_gpu_blocks_override - uncounted
        limit = f"num_gpu_blocks_override is {config.num_gpu_blocks_override}"
    else:
        usable = (available_bytes // row_bytes - null_rows) // block_size
        limit = f"the KV cache may take {available_bytes:,} bytes"
        usable = usable if most is None else min(usable, most)
    if usable < 1:
        need = (null_rows + block_size) * row_bytes
        raise ValueError(
            f"{limit}: that holds no request; one block of {block_size} rows and the null block take {need:,} bytes "
            f"({row_bytes:,} a row). Raise it, or lower max_model_len ({config.max_model_len})"
        )
    return KVGeometry(groups, block_size, usable, null_rows)


def plan_host_blocks(config: EngineConfig, geometry: KVGeometry) -> int:
    """How many blocks fit into ``swap_space`` GiB of host memory; 0 if preempted requests are recomputed instead."""
    if config.preemption_mode != "swap":
        return 0
    return int(config.swap_space * 2**30) // (geometry.block_size * bytes_per_row(geometry.groups))


def prefix_cache(config: EngineConfig) -> Callable[[BlockPool, int], PrefixCache] | None:
    """The configured kind, to be called as f(pool, block size). Imported only here."""
    if config.prefix_cache == "radix":
        from minillm.memory.radix_cache import RadixCache

        return RadixCache
    if config.prefix_cache == "block_hash":
        from minillm.memory.block_hash import BlockHashCache

        return BlockHashCache
    return None


class KVManager:
    """Block tables by request. Rows are counted, never positions.

    With a prefix cache a request may begin with blocks of it, ``adopt``, and leave it its own, ``keep``. What nobody
    uses but the cache counts as free: it is evicted when a block is wanted.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        max_model_len: int,
        num_host_blocks: int = 0,
        block_pool: Callable[[int], BlockPool] = BlockPool,
        prefix_cache: Callable[[BlockPool, int], PrefixCache] | None = None,
    ):
        self.geometry = geometry
        self.capacity = min(max_model_len, geometry.num_usable_blocks * geometry.block_size)
        self.pool = block_pool(geometry.num_usable_blocks)
        self.host_pool = BlockPool(num_host_blocks)
        self.cache = prefix_cache(self.pool, geometry.block_size) if prefix_cache else None
        self._locked: dict[str, Node] = {}  # request -> the cached prefix that it keeps from eviction
        self._tables: dict[str, list[list[int]]] = {}  # request -> per group, block ids in row order
        self._host_tables: dict[str, list[list[int]]] = {}  # the same of requests that were swapped out
        # What the runner must do before the next pass, as (group, from, to): see ScheduledBatch.
        self._swaps_out: list[tuple[int, int, int]] = []
        self._swaps_in: list[tuple[int, int, int]] = []
        self._copies: list[tuple[int, int, int]] = []
        # Host blocks that the pass reads: it swaps out before it swaps in, so until then they must not be written.
        self._read_by_next_pass: list[int] = []

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had at once, those that only the cache holds among them."""
        return self.pool.num_free + (self.cache.num_idle_blocks if self.cache else 0)

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_usable

    @property
    def num_reserved_rows(self) -> int:
        """Rows of all blocks that anybody holds."""
        return (self.num_usable_blocks - self.num_free_blocks) * self.geometry.block_size

    @property
    def grows(self) -> bool:
        """Whether a request may come to need a second block."""
        return self.geometry.block_size < self.capacity

    @property
    def owners(self) -> list[str]:
        """Requests that hold blocks on the device."""
        return list(self._tables)

    def holds(self, request_id: str) -> bool:
        return request_id in self._tables

    def blocks_lacking(self, request_id: str, num_rows: int) -> int:
        """Blocks that the request must be given to have room for so many rows, as far as it may have rows."""
        wanted = self.geometry.blocks_for(min(num_rows, self.capacity))
        tables = self._tables.get(request_id) or [[] for _ in self.geometry.groups]
        return sum(max(0, wanted - len(table)) for table in tables)

    def num_used_rows(self, lengths: dict[str, int]) -> int:
        """Rows that hold a token, given how many each request has; a row shared by several counts once."""
        tables = {i: self._tables[i][0] for i in lengths}  # a token has a row in every group
        held = list(itertools.chain.from_iterable(tables.values()))
        if len(set(held)) == len(held):
            return sum(lengths.values())  # nothing is shared
        size, used = self.geometry.block_size, {}
        for request_id, table in tables.items():
            for i, block in enumerate(table):
                used[block] = max(used.get(block, 0), min(size, lengths[request_id] - i * size))
        return sum(used.values())

    def block_ids(self, request_id: str) -> list[list[int]]:
        """The request's block table per group (copies)."""
        return [list(table) for table in self._tables[request_id]]

    def is_swapped(self, request_id: str) -> bool:
        """Whether the request's rows wait in host memory."""
        return request_id in self._host_tables

    def allocate(self, request_id: str, first_row: int, end_row: int, leave: int = 0) -> Allocation | None:
        """Make rows first_row … end_row − 1 of a request writable; None, and nothing changed, if blocks are lacking.

        Grows the tables where they are too short. A block about to be written that somebody else holds too is
        replaced by a fresh one, its rows to be copied before the pass (copy-on-write). Rows that were swapped out are
        brought back. ``leave`` blocks must stay free.
        """
        if self.is_swapped(request_id):
            return self._swap_in(request_id, end_row, leave)
        tables = self._tables.get(request_id) or [[] for _ in self.geometry.groups]
        wanted = self.geometry.blocks_for(end_row)
        touched = range(first_row // self.geometry.block_size, wanted) if first_row < end_row else ()
        shared = [[i for i in touched if i < len(table) and self.pool.ref_counts[table[i]] > 1] for table in tables]
        grow = [max(0, wanted - len(table)) for table in tables]
        if not self._make_room(sum(grow) + sum(map(len, shared)), leave):
            return None
        self._tables[request_id] = tables
        new: list[list[int]] = []
        for group, table in enumerate(tables):
            for i in shared[group]:
                (fresh,) = self.pool.allocate(1)
                self._copies.append((group, table[i], fresh))
                self.pool.release([table[i]])
                table[i] = fresh
            added = self.pool.allocate(grow[group])
            table.extend(added)
            new.append(added)
        return Allocation(self.block_ids(request_id), True) if any(shared) else Allocation(new)

    def _make_room(self, num_blocks: int, leave: int) -> bool:
        """See to it that so many blocks are really free, at the cache's cost; False if that cannot be."""
        if num_blocks + leave > self.num_free_blocks:
            return False
        if num_blocks > self.pool.num_free:
            self.cache.evict(num_blocks - self.pool.num_free)
        return True

    def swap_out(self, request_id: str, num_rows: int) -> bool:
        """Move a request's first ``num_rows`` rows to host memory and release its blocks; False if no room is there.

        Blocks shared with others stay theirs: what moves is a copy.
        """
        keep = self.geometry.blocks_for(num_rows)
        tables = self._tables[request_id]
        if sum(len(table[:keep]) for table in tables) > self.host_pool.num_free:
            return False
        self._host_tables[request_id] = []
        for group, table in enumerate(tables):
            hosts = self.host_pool.allocate(len(table[:keep]))
            self._host_tables[request_id].append(hosts)
            self._swaps_out += [(group, device, host) for device, host in zip(table, hosts, strict=False)]
        self._release(request_id)
        return True

    def _swap_in(self, request_id: str, end_row: int, leave: int) -> Allocation | None:
        hosts = self._host_tables[request_id]
        wanted = max(self.geometry.blocks_for(end_row), *map(len, hosts))
        if not self._make_room(wanted * len(hosts), leave):
            return None
        tables = self._tables[request_id] = [self.pool.allocate(wanted) for _ in hosts]
        for group, (table, away) in enumerate(zip(tables, hosts, strict=True)):
            self._swaps_in += [(group, host, device) for host, device in zip(away, table, strict=False)]
        self._read_by_next_pass += itertools.chain(*self._host_tables.pop(request_id))
        return Allocation(self.block_ids(request_id), True)

    def swapped_by(self, batch: ScheduledBatch) -> list[str]:
        """Requests whose rows a batch was to bring to host memory."""
        targets = {host for _, _, host in batch.swaps_out}
        return [i for i, tables in self._host_tables.items() if not targets.isdisjoint(itertools.chain(*tables))]

    def take_moves(self, batch: ScheduledBatch) -> None:
        """Hand the next pass all swaps and copies that must come before it; each is handed out once."""
        batch.swaps_out, self._swaps_out = self._swaps_out, []
        batch.swaps_in, self._swaps_in = self._swaps_in, []
        batch.block_copies, self._copies = self._copies, []
        self.host_pool.release(self._read_by_next_pass)
        self._read_by_next_pass = []

    def fork(self, parent_id: str, child_id: str, num_rows: int | None = None) -> None:
        """Give a new request the parent's blocks, or those of its first rows, shared until either writes."""
        if child_id in self._tables or child_id in self._host_tables:
            raise IntegrityError(f"{child_id} already owns blocks; a fork would lose them")
        keep = None if num_rows is None else self.geometry.blocks_for(num_rows)
        tables = [table[:keep] for table in self._tables[parent_id]]
        for table in tables:
            self.pool.hold(table)
        self._tables[child_id] = tables
        if parent_id in self._locked:
            self._lock(child_id, self._locked[parent_id])

    def match(self, tokens: Sequence[int], extra: Hashable = None) -> Match | None:
        """The longest cached prefix of a prompt whose last token is always computed; None if there is none.

        Good until the cache changes: adopt it at once.
        """
        if self.cache is None:
            return None
        match = self.cache.match(tokens[:-1], extra)
        return match if match.num_tokens else None

    def adopt(self, request_id: str, match: Match) -> None:
        """Give a new request the blocks of a match, to share and not to write (``allocate`` copies on write)."""
        if request_id in self._tables or request_id in self._host_tables:
            raise IntegrityError(f"{request_id} already owns blocks; to adopt others would lose them")
        self._tables[request_id] = [list(table) for table in zip(*match.blocks, strict=True)]
        for entry in match.blocks:
            self.pool.hold(entry)
        self._locked[request_id] = self.cache.lock(match)

    def keep(self, request_id: str, tokens: Sequence[int], extra: Hashable = None, running: bool = False) -> None:
        """Leave the KV of a request's first tokens, all of it written, to the cache as well.

        ``running``: only whole blocks, since the request goes on writing into its last one.
        """
        if self.cache is None or request_id not in self._tables:
            return
        if running:
            tokens = tokens[: len(tokens) // self.geometry.block_size * self.geometry.block_size]
        blocks = list(zip(*self._tables[request_id], strict=True))
        node = self.cache.insert(tokens, blocks, extra)
        if request_id not in self._locked or node.end > self._locked[request_id].end:
            self._lock(request_id, node)

    def reset_prefix_cache(self) -> bool:
        """Drop all that the prefix cache keeps; False, and nothing is dropped, while a request uses any of it."""
        if self._locked:
            return False
        if self.cache is not None:
            self.cache.evict(self.cache.num_idle_blocks)
        return True

    def forget(self, request_id: str) -> bool:
        """Drop from the cache what only this request uses of the prefix that it locks; False if there is nothing.

        The prefix may lie partly in other blocks than the request's, which are its own after this as before.
        """
        node = self._locked.get(request_id)
        alone = [] if node is None else [each for each in node.path() if each.locks == 1]
        if not alone:
            return False
        self._lock(request_id, alone[-1].parent)
        self.cache.drop(alone[-1])
        return True

    def _lock(self, request_id: str, node: Node) -> None:
        self.cache.hold(node)
        if request_id in self._locked:
            self.cache.unlock(self._locked[request_id])
        self._locked[request_id] = node

    def truncate(self, request_id: str, num_rows: int) -> None:
        """Keep the first ``num_rows`` rows; blocks wholly past them are released."""
        keep = self.geometry.blocks_for(num_rows)
        for table in self._tables[request_id]:
            self.pool.release(reversed(table[keep:]))
            del table[keep:]

    def free(self, request_id: str) -> None:
        """Release all of a request's blocks, here and in host memory; one that holds none is fine."""
        self._release(request_id)
        self._drop_host(request_id)

    def _release(self, request_id: str) -> None:
        for table in self._tables.pop(request_id, []):
            # Last block first: of a shared prefix the tail is reused before the head.
            self.pool.release(reversed(table))
        if request_id in self._locked:
            self.cache.unlock(self._locked.pop(request_id))

    def _drop_host(self, request_id: str) -> None:
        for hosts in self._host_tables.pop(request_id, []):
            self.host_pool.release(hosts)

    def check_integrity(self, live: Iterable[str] | None = None) -> bool:
        """True if free and owned blocks add up and only ``live`` requests own any; else IntegrityError says what."""
        if live is not None:
            dead = {*self._tables, *self._host_tables} - set(live)
            if dead:
                raise IntegrityError(f"finished requests still own blocks: {', '.join(sorted(dead))}")
        both = self._tables.keys() & self._host_tables.keys()
        if both:
            raise IntegrityError(f"{min(both)} is swapped out and holds blocks as well")
        hosts = itertools.chain(_blocks(self._host_tables), self._read_by_next_pass)
        owned = _blocks(self._tables)
        if self.cache is not None:
            self.cache.check_integrity()
            owned = itertools.chain(owned, self.cache.owned_blocks())
            locked = {id(node) for at in self._locked.values() for node in at.path()}
            if locked != {id(node) for node in self.cache.nodes() if node.locks}:
                raise IntegrityError("what is locked in the prefix cache is not what requests use")
        return self.pool.check_integrity(owned) and self.host_pool.check_integrity(hosts)


def _blocks(tables: dict[str, list[list[int]]]) -> Iterator[int]:
    return (block for of_groups in tables.values() for table in of_groups for block in table)
