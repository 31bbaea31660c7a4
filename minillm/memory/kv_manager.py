"""Who owns which rows of the KV cache: block tables of requests over a block pool. No torch in here.

Contiguous KV (chapter 0) and paged KV (chapter 2) are one manager: contiguous is a block of max_model_len rows for
each request, so that a request never needs a second one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minillm.core.config import EngineConfig
from minillm.core.kv_spec import FullAttentionSpec
from minillm.memory.block_pool import BlockPool, IntegrityError


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


class KVManager:
    """Block tables by request. Rows are counted, never positions."""

    def __init__(self, geometry: KVGeometry, max_model_len: int):
        self.geometry = geometry
        self.capacity = min(max_model_len, geometry.num_usable_blocks * geometry.block_size)
        self.pool = BlockPool(geometry.num_usable_blocks)
        self._tables: dict[str, list[list[int]]] = {}  # request -> per group, block ids in row order
        self._copies: list[tuple[int, int, int]] = []

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_usable

    @property
    def num_reserved_rows(self) -> int:
        """Rows of all blocks that anybody holds."""
        return (self.num_usable_blocks - self.num_free_blocks) * self.geometry.block_size

    def block_ids(self, request_id: str) -> list[list[int]]:
        """The request's block table per group (copies)."""
        return [list(table) for table in self._tables[request_id]]

    def allocate(self, request_id: str, first_row: int, end_row: int) -> Allocation | None:
        """Make rows first_row … end_row − 1 of a request writable; None, and nothing changed, if blocks are lacking.

        Grows the tables where they are too short. A block about to be written that somebody else holds too is
        replaced by a fresh one, its rows to be copied before the pass (copy-on-write: ``take_copies``).
        """
        tables = self._tables.get(request_id) or [[] for _ in self.geometry.groups]
        wanted = self.geometry.blocks_for(end_row)
        touched = range(first_row // self.geometry.block_size, wanted) if first_row < end_row else ()
        shared = [[i for i in touched if i < len(table) and self.pool.ref_counts[table[i]] > 1] for table in tables]
        grow = [max(0, wanted - len(table)) for table in tables]
        if sum(grow) + sum(map(len, shared)) > self.pool.num_free:
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

    def take_copies(self) -> list[tuple[int, int, int]]:
        """Block copies (group, from, to) that the next pass must do first; each is handed out once."""
        copies, self._copies = self._copies, []
        return copies

    def fork(self, parent_id: str, child_id: str) -> None:
        """Give a new request the parent's blocks, shared until either writes."""
        if child_id in self._tables:
            raise IntegrityError(f"{child_id} already owns blocks; a fork would lose them")
        tables = [list(table) for table in self._tables[parent_id]]
        for table in tables:
            self.pool.hold(table)
        self._tables[child_id] = tables

    def truncate(self, request_id: str, num_rows: int) -> None:
        """Keep the first ``num_rows`` rows; blocks wholly past them are released."""
        keep = self.geometry.blocks_for(num_rows)
        for table in self._tables[request_id]:
            self.pool.release(reversed(table[keep:]))
            del table[keep:]

    def free(self, request_id: str) -> None:
        """Release all of a request's blocks; one that holds none is fine."""
        for table in self._tables.pop(request_id, []):
            # Last block first: of a shared prefix the tail is reused before the head.
            self.pool.release(reversed(table))

    def check_integrity(self, live: Iterable[str] | None = None) -> bool:
        """True if free and owned blocks add up and only ``live`` requests own any; else IntegrityError says what."""
        if live is not None:
            dead = set(self._tables) - set(live)
            if dead:
                raise IntegrityError(f"finished requests still own blocks: {', '.join(sorted(dead))}")
        return self.pool.check_integrity(b for tables in self._tables.values() for table in tables for b in table)
