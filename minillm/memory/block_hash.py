"""Block-hash prefix caching (vLLM): a full block is known by the hash of its tokens and of all that come before them.

One look-up a block instead of a walk down a tree; a prefix is shared in whole blocks only. Since two prefixes may have
one hash, the tokens of a block that was found are compared, and its parent must be the block before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from minillm.memory.block_pool import BlockPool
from minillm.memory.prefix_cache import Blocks, Match, Node, PrefixCache


class BlockHashCache(PrefixCache):
    """``hash_function`` maps (the parent's hash, the block's tokens, extra) to a number."""

    def __init__(self, pool: BlockPool, block_size: int, hash_function: Callable[[Hashable], int] = hash):
        super().__init__(pool, block_size)
        self._hash = hash_function
        self._by_hash: dict[int, Node] = {}

    def match(self, tokens: Sequence[int], extra: Hashable = None) -> Match:
        tokens = tuple(tokens)
        node, blocks = self._root(extra), []
        for number in range(len(tokens) // self.block_size):
            found = self._find(node, self._block(tokens, number), extra)
            if found is None:
                break
            node = found
            blocks += node.blocks
        return Match(node, node.end, blocks)

    def lock(self, match: Match) -> Node:
        self._check_stands(match)
        self.hold(match.node)
        return match.node

    def insert(self, tokens: Sequence[int], blocks: Blocks, extra: Hashable = None) -> Node:
        tokens = tuple(tokens)
        node = self.match(tokens, extra).node
        for number in range(node.end // self.block_size, len(tokens) // self.block_size):
            block = self._block(tokens, number)
            key = self._key(node, block, extra)
            if key in self._by_hash:
                break  # two prefixes of one hash: the first stays, the other is not kept
            node = self._add(node, key, block, [blocks[number]])
            self._by_hash[key] = node
        return node

    def _block(self, tokens: tuple[int, ...], number: int) -> tuple[int, ...]:
        return tokens[number * self.block_size : (number + 1) * self.block_size]

    def _key(self, parent: Node, block: tuple[int, ...], extra: Hashable) -> int:
        return self._hash((0 if parent.parent is None else parent.detail, block, extra))

    def _find(self, parent: Node, block: tuple[int, ...], extra: Hashable) -> Node | None:
        self.num_compared += len(block)
        node = self._by_hash.get(self._key(parent, block, extra))
        return node if node is not None and node.parent is parent and node.tokens == block else None

    def _cut(self, leaf: Node, drop: int) -> bool:
        key = leaf.detail
        gone = super()._cut(leaf, drop)
        if gone:
            del self._by_hash[key]
        return gone
