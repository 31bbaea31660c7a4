"""Contiguous KV reserved ahead, as before PagedAttention: the three baselines of its section 6.1, in one arena of rows.

A request takes one unbroken run of rows when it is admitted and keeps all of it until it ends. Between runs of unequal
length holes remain that fit nobody: external fragmentation, which equal chunks (kv_layout="contiguous") cannot show.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from minillm.memory.block_pool import BlockPool, IntegrityError
from minillm.memory.kv_manager import Allocation, KVGeometry, KVManager

# Rows to reserve, from (prompt, output, longest sequence allowed): the output's true length is known to the simulator.
RESERVATIONS = {
    "max": lambda prompt, output, longest: longest,
    "pow2": lambda prompt, output, longest: min(longest, prompt + power_of_two(output)),
    "oracle": lambda prompt, output, longest: prompt + output,
}
ALLOCATORS = ("first_fit", "buddy")


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least so large: 25 -> 32."""
    return 1 << (number - 1).bit_length()


class RowArena(BlockPool):
    """A pool of single rows, of which the caller says which to take."""

    def take(self, rows: range) -> None:
        taken = set(rows)
        if any(self.ref_counts[row] for row in taken):
            raise IntegrityError(f"rows {rows.start} to {rows.stop - 1} are not all free")
        for row in taken:
            self.ref_counts[row] = 1
        self._free = deque(row for row in self._free if row not in taken)


class ReservedKV(KVManager):
    """A KVManager whose requests hold a run of rows each: blocks of one row, side by side.

    ``reservations``: rows to reserve, by request. "first_fit" takes the lowest hole that is long enough. "buddy" takes
    runs of a power of two that begin at a multiple of their length; the rows that a request gets by this rounding
    count as free, though nobody can have them, as in the paper's Figure 2.
    """

    def __init__(
        self, geometry: KVGeometry, max_model_len: int, reservations: Mapping[str, int], allocator: str = "buddy"
    ):
        if geometry.block_size != 1 or len(geometry.groups) != 1:
            raise ValueError(f"blocks of {geometry.block_size} rows; a run of rows is made of blocks of one, one group")
        if allocator not in ALLOCATORS:
            raise ValueError(f"allocator is {allocator!r}; it must be one of {', '.join(map(repr, ALLOCATORS))}")
        super().__init__(geometry, max_model_len, block_pool=RowArena)
        self.reservations, self.allocator = reservations, allocator

    @property
    def grows(self) -> bool:
        return False

    def blocks_lacking(self, request_id: str, num_rows: int) -> int:
        return 0 if self.holds(request_id) else self.reservations[request_id]

    def allocate(self, request_id: str, first_row: int, end_row: int, leave: int = 0) -> Allocation | None:
        """As KVManager's. The first call takes the whole reservation, if there is a hole for it."""
        rows = self.reservations[request_id]
        if end_row > rows:
            raise IntegrityError(f"{request_id} reserved {rows} rows and asks for {end_row}")
        if self.holds(request_id):
            return Allocation([[]])
        start = self._find(self._span(rows))
        if start is None or rows + leave > self.pool.num_free:
            return None
        self.pool.take(range(1 + start, 1 + start + rows))
        self._tables[request_id] = [list(range(1 + start, 1 + start + rows))]
        return Allocation(self.block_ids(request_id))

    def _span(self, rows: int) -> int:
        """Rows that a reservation keeps others from."""
        return power_of_two(rows) if self.allocator == "buddy" else rows

    def _find(self, span: int) -> int | None:
        """Where the lowest hole for a span begins, counted from 0."""
        step = span if self.allocator == "buddy" else 1
        start = 0
        for (run,) in sorted(self._tables.values()):
            begin = run[0] - 1
            if start + span <= begin:
                break
            start = max(start, -(-(begin + self._span(len(run))) // step) * step)
        return start if start + span <= self.num_usable_blocks else None
