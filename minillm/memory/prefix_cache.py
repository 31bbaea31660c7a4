"""KV that outlives its request, for later prompts that begin alike: what every prefix cache shares.

A cache is a tree. A node holds some tokens and the blocks where their KV lies; the way from the root down to it is the
prefix that it stands for. Who uses a prefix locks its way to the root; what is not locked is idle and may be evicted,
least recently used leaves first (SGLang, section 3). No torch in here, and no request.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from minillm.memory.block_pool import BlockPool, IntegrityError

Blocks = list[tuple[int, ...]]  # one entry a block of rows: its id in each KV group


@dataclass(eq=False)
class Node:
    """Tokens ``start`` … ``end`` − 1 of a prefix. ``blocks`` begins with the one that token ``start`` lies in.

    If that is in the middle of a block, the block's rows before it hold the same tokens as the parent's last block,
    and may be the same block: a node of two halves was split there.
    """

    parent: Node | None
    tokens: tuple[int, ...]
    blocks: Blocks
    start: int = 0
    children: dict[Hashable, Node] = field(default_factory=dict)
    locks: int = 0  # users of this node or of one below it
    last_use: int = 0
    detail: Hashable = None  # a cache's own: how its parent finds it

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def path(self) -> Iterator[Node]:
        """From here up to the root, which is left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(frozen=True)
class Match:
    """The longest cached prefix of some tokens. Good until the cache changes: lock it at once, or ask again."""

    node: Node  # the deepest one reached, perhaps only in part
    num_tokens: int
    blocks: Blocks


class PrefixCache(ABC):
    """What KVManager asks of a cache. It holds its blocks by reference, as every owner does.

    ``extra`` is whatever makes equal tokens differ in KV, such as an adapter, or in who may see them, such as a
    tenant's salt: prefixes of different extras never meet.
    """

    def __init__(self, pool: BlockPool, block_size: int):
        self.pool, self.block_size = pool, block_size
        self.num_idle_blocks = 0  # that ``evict`` could free
        self.num_compared = 0  # tokens looked at by all lookups so far
        self._roots: dict[Hashable, Node] = {}
        self._clock = itertools.count(1)
        self._num_nodes = 0
        self._leaves: list[tuple[int, int, Node]] = []  # a heap by last use; an entry is stale once its node was used
        self._serial = itertools.count()

    # -- what a kind of cache decides --------------------------------------------------------------------------------

    @abstractmethod
    def match(self, tokens: Sequence[int], extra: Hashable = None) -> Match:
        """The longest prefix of ``tokens`` that is there. Changes nothing."""

    @abstractmethod
    def insert(self, tokens: Sequence[int], blocks: Blocks, extra: Hashable = None) -> Node:
        """Keep the KV of ``tokens``, which lies in ``blocks``, as far as it is not there already.

        Returns the deepest node of that prefix: the root if nothing of it is kept.
        """

    @abstractmethod
    def lock(self, match: Match) -> Node:
        """Keep a match's tokens from eviction until the returned node is given to ``unlock``.

        IntegrityError if the cache has changed since and the match no longer stands.
        """

    # -- what all have in common -------------------------------------------------------------------------------------

    def hold(self, node: Node) -> None:
        """One more user of a node."""
        now = next(self._clock)
        for each in node.path():
            if not each.locks:
                self.num_idle_blocks -= self._num_own(each) * len(each.blocks[0])
            each.locks += 1
            each.last_use = now

    def unlock(self, node: Node) -> None:
        """One user less. Used just now, so the last to be evicted."""
        now = next(self._clock)
        for each in node.path():
            if not each.locks:
                raise IntegrityError("a prefix is unlocked more often than it was locked")
            each.locks -= 1
            each.last_use = now
            if not each.locks:
                self.num_idle_blocks += self._num_own(each) * len(each.blocks[0])
                self._maybe_leaf(each)

    def evict(self, num_blocks: int) -> int:
        """Free at least so many blocks, or all that are idle; returns how many. Of a leaf no more than need be."""
        freed = 0
        while freed < num_blocks and self._leaves:
            last_use, _, node = heapq.heappop(self._leaves)
            if not self._is_idle_leaf(node) or node.last_use != last_use:
                continue  # stale
            groups = len(node.blocks[0])
            drop = min(self._num_own(node), -(-(num_blocks - freed) // groups))
            freed += drop * groups
            self.num_idle_blocks -= drop * groups
            if not self._cut(node, drop):
                self._maybe_leaf(node)
        return freed

    def drop(self, node: Node) -> None:
        """Let go of an idle node and all below it."""
        below = [node]
        for each in below:
            below += each.children.values()
        for each in reversed(below):
            own = self._num_own(each)
            self.num_idle_blocks -= own * len(each.blocks[0])
            self._cut(each, own)

    def nodes(self) -> Iterator[Node]:
        """All of them, parents before children, roots left out."""
        todo = list(self._roots.values())
        while todo:
            node = todo.pop()
            todo += node.children.values()
            if node.parent is not None:
                yield node

    def owned_blocks(self) -> Iterator[int]:
        """Every block that a node holds, with repeats."""
        return (block for node in self.nodes() for entry in node.blocks for block in entry)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is kept."""
        return sum(len(node.tokens) for node in self.nodes())

    def check_integrity(self) -> bool:
        """True if the tree, its locks and its counts agree; IntegrityError says what does not."""
        held = Counter(self.owned_blocks())
        idle, leaves = 0, {id(node): use for use, _, node in self._leaves if use == node.last_use}
        for node in self.nodes():
            parent, where = node.parent, f"the node of tokens {node.start} to {node.end}"
            if node.start != parent.end:
                raise IntegrityError(f"{where} hangs below one that ends at {parent.end}")
            if not node.tokens or node.end > node.start + len(node.blocks) * self.block_size:
                raise IntegrityError(f"{where} has {len(node.blocks)} blocks of {self.block_size}")
            first, last = node.start // self.block_size, -(-node.end // self.block_size)
            if len(node.blocks) != last - first:
                raise IntegrityError(f"{where} has {len(node.blocks)} blocks instead of {last - first}")
            if parent.children.get(node.detail) is not node:
                raise IntegrityError(f"{where} is not found from its parent")
            if parent.parent is not None and parent.locks < sum(child.locks for child in parent.children.values()):
                raise IntegrityError(f"{where} is locked and its parent is not")
            if any(not self.pool.ref_counts[block] for entry in node.blocks for block in entry):
                raise IntegrityError(f"{where} holds a free block")
            if not node.locks:
                own = node.blocks[len(node.blocks) - self._num_own(node) :]
                used = [b for entry in own for b in entry if self.pool.ref_counts[b] > held[b]]
                if used:
                    raise IntegrityError(f"{where} is idle and somebody uses its block {used[0]}")
                idle += len(own) * len(node.blocks[0])
                if not node.children and leaves.get(id(node)) != node.last_use:
                    raise IntegrityError(f"{where} is an idle leaf that eviction would not find")
        if idle != self.num_idle_blocks:
            raise IntegrityError(f"{idle} blocks are idle, {self.num_idle_blocks} are counted")
        return True

    @staticmethod
    def _check_stands(match: Match) -> None:
        node = match.node
        if match.num_tokens and (node.parent is None or not node.start < match.num_tokens <= node.end):
            raise IntegrityError("a match was evicted or split before it was locked; ask again")

    def _root(self, extra: Hashable) -> Node:
        return self._roots.get(extra) or Node(None, (), [], detail=extra)

    def _add(self, parent: Node, detail: Hashable, tokens: Sequence[int], blocks: Blocks) -> Node:
        """A new leaf, which takes a reference on each of its blocks."""
        if parent.parent is None:
            self._roots[parent.detail] = parent  # a root is kept from its first node to its last
        node = Node(parent, tuple(tokens), list(blocks), parent.end, detail=detail, last_use=next(self._clock))
        parent.children[detail] = node
        self._num_nodes += 1
        for entry in node.blocks:
            self.pool.hold(entry)
        self.num_idle_blocks += self._num_own(node) * len(node.blocks[0])
        self._maybe_leaf(node)
        return node

    def _num_own(self, node: Node) -> int:
        """Its blocks, but one that it shares with its parent: that one is the parent's."""
        shared = node.start % self.block_size and node.parent.blocks[-1] == node.blocks[0]
        return len(node.blocks) - bool(shared)

    def _maybe_leaf(self, node: Node) -> None:
        if node.children or node.locks:
            return
        heapq.heappush(self._leaves, (node.last_use, next(self._serial), node))
        if len(self._leaves) > 2 * self._num_nodes + 64:  # mostly stale
            fresh = {id(leaf): (leaf.last_use, n, leaf) for _, n, leaf in self._leaves if self._is_idle_leaf(leaf)}
            self._leaves = list(fresh.values())
            heapq.heapify(self._leaves)

    @staticmethod
    def _is_idle_leaf(node: Node) -> bool:
        return not node.locks and not node.children and node.parent is not None

    def _cut(self, leaf: Node, drop: int) -> bool:
        """Take the last ``drop`` own blocks from a leaf, the whole leaf if it has no more. Whether it is gone."""
        gone = drop == self._num_own(leaf)
        keep = 0 if gone else len(leaf.blocks) - drop
        for entry in reversed(leaf.blocks[keep:]):
            self.pool.release(entry)
        if gone:
            parent = leaf.parent
            del parent.children[leaf.detail]
            leaf.parent = None
            self._num_nodes -= 1
            if parent.parent is not None:
                self._maybe_leaf(parent)
            elif not parent.children:
                del self._roots[parent.detail]
        else:
            leaf.blocks = leaf.blocks[:keep]
            leaf.tokens = leaf.tokens[: (leaf.start // self.block_size + keep) * self.block_size - leaf.start]
        return gone
