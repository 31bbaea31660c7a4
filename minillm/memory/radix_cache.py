"""RadixAttention's cache (Zheng et al. 2024, section 3): a radix tree over tokens, so any common prefix is shared.

Edges are as long as they can be and are split where two prompts part, which may be in the middle of a block of KV. Then
who goes on from there copies that block before it writes (PagedAttention's copy-on-write), so a tree over tokens needs
no blocks of one token.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from minillm.memory.block_pool import BlockPool
from minillm.memory.prefix_cache import Blocks, Match, Node, PrefixCache


class RadixCache(PrefixCache):
    """``page_size`` tokens are shared or not, as one; it must divide the block size. 1: every single token counts."""

    def __init__(self, pool: BlockPool, block_size: int, page_size: int = 1):
        if page_size < 1 or block_size % page_size:
            raise ValueError(f"page_size is {page_size}; it must divide block_size, {block_size}")
        super().__init__(pool, block_size)
        self.page_size = page_size

    def match(self, tokens: Sequence[int], extra: Hashable = None) -> Match:
        tokens = tuple(tokens)
        node, done, blocks = self._root(extra), 0, []
        while (child := self._child(node, tokens, done)) is not None:
            same = self._in_common(child, tokens, done)
            first = child.start // self.block_size
            blocks[first:] = child.blocks[: -(-(done + same) // self.block_size) - first]
            node, done = child, done + same
            if done < child.end:
                break
        return Match(node, done, blocks)

    def lock(self, match: Match) -> Node:
        self._check_stands(match)
        node = match.node
        if match.num_tokens < node.end:
            node = self._split(node, match.num_tokens - node.start)
        self.hold(node)
        return node

    def insert(self, tokens: Sequence[int], blocks: Blocks, extra: Hashable = None) -> Node:
        tokens = tuple(tokens)[: len(tokens) // self.page_size * self.page_size]
        match = self.match(tokens, extra)
        node, done = match.node, match.num_tokens
        if done < node.end:
            node = self._split(node, done - node.start)
        if done == len(tokens):
            return node
        own = blocks[done // self.block_size : -(-len(tokens) // self.block_size)]
        return self._add(node, self._page(tokens, done), tokens[done:], own)

    def _page(self, tokens: Sequence[int], start: int) -> tuple[int, ...]:
        return tuple(tokens[start : start + self.page_size])

    def _child(self, node: Node, tokens: Sequence[int], done: int) -> Node | None:
        page = self._page(tokens, done)
        self.num_compared += len(page)
        return node.children.get(page)

    def _in_common(self, child: Node, tokens: Sequence[int], done: int) -> int:
        """How many of the child's tokens, in whole pages, ``tokens`` have from index ``done``: one page at least."""
        edge = child.tokens
        longest = min(len(edge), len(tokens) - done)
        same = longest
        if edge[:longest] != tokens[done : done + longest]:
            same = next(i for i in range(longest) if edge[i] != tokens[done + i])
        self.num_compared += min(same + 1, longest)
        return same // self.page_size * self.page_size

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge after ``at`` of its tokens. The node stays the lower part; returns the new upper one.

        If that is in the middle of a block both hold the block, and it counts as the upper one's.
        """
        size, start = self.block_size, node.start
        middle = start + at
        upper_blocks = node.blocks[: -(-middle // size) - start // size]
        lower_blocks = node.blocks[middle // size - start // size :]
        upper = Node(node.parent, node.tokens[:at], upper_blocks, start, detail=node.detail)
        upper.locks, upper.last_use = node.locks, node.last_use
        node.parent.children[node.detail] = upper
        if middle % size:
            self.pool.hold(lower_blocks[0])
        node.parent, node.start, node.tokens, node.blocks = upper, middle, node.tokens[at:], lower_blocks
        node.detail = self._page(node.tokens, 0)
        upper.children[node.detail] = node
        self._num_nodes += 1
        return upper
