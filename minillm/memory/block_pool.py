"""A pool of equal blocks held by reference count. Ids only: no torch, no tokens, no idea of who holds what."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class IntegrityError(AssertionError):
    """The books of the memory room do not balance. Always a fault of ours, never of a request."""


class BlockPool:
    """Blocks 1 … num_usable; block 0 is the null block, which padding rows read and write and nobody owns.

    Any owner (a request, a prefix cache, an adapter, a transfer) holds a block by one reference; a block whose last
    reference is dropped goes to the end of the free list, so the one freed longest ago is handed out first.
    """

    def __init__(self, num_usable: int):
        self.num_usable = num_usable
        self.ref_counts = [0] * (num_usable + 1)
        self._free = deque(range(1, num_usable + 1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one reference each; the caller has made sure that so many are free."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} are free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """One more reference on each of these blocks, all of them in use."""
        for block in blocks:
            if not self.ref_counts[block]:
                raise IntegrityError(f"block {block} is held again but free")
            self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference on each."""
        for block in blocks:
            if not self.ref_counts[block]:
                raise IntegrityError(f"block {block} is released but free")
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                self._free.append(block)

    def check_integrity(self, owned: Iterable[int]) -> bool:
        """True if ``owned``, every block of every owner with repeats, is exactly what the counts say; else raises."""
        counts = [0] * len(self.ref_counts)
        for block in owned:
            if not 0 <= block <= self.num_usable:
                raise IntegrityError(f"block {block} is owned; there are 1 to {self.num_usable}")
            counts[block] += 1
        if counts[0]:
            raise IntegrityError("the null block is owned")
        for block in range(1, self.num_usable + 1):
            if counts[block] != self.ref_counts[block]:
                raise IntegrityError(f"block {block}: {self.ref_counts[block]} references, {counts[block]} owners")
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError("a block stands twice in the free list")
        if free != {b for b in range(1, self.num_usable + 1) if not counts[b]}:
            raise IntegrityError("the free list is not the set of blocks without owner")
        return True
