"""RadixAttention's tree in its plainest form: tokens alone, no KV. What radix_cache.py does, to read and to test by.

Functions of a root, so that each can be written and tried alone (Zheng et al. 2024, section 3 and Figure 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class TreeNode:
    """The tokens on the edge from the parent down to here; a root has none."""

    def __init__(self, tokens: Sequence = (), parent: TreeNode | None = None):
        self.tokens, self.parent = tuple(tokens), parent
        self.end = len(tokens) + (parent.end if parent else 0)
        self.children = {}  # by the first token of each edge
        self.locks = self.last_use = 0


def in_common(a: Sequence, b: Sequence) -> int:
    """How many tokens two sequences begin with alike."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def match(root: TreeNode, tokens: Sequence) -> tuple[TreeNode, int]:
    """The deepest node reached, perhaps only in part, and how many of the tokens were found."""
    node, done = root, 0
    while done < len(tokens) and tokens[done] in node.children:
        node = node.children[tokens[done]]
        done += in_common(node.tokens, tokens[done:])
        if done < node.end:
            break
    return node, done


def split(node: TreeNode, at: int) -> TreeNode:
    """Cut an edge after ``at`` of its tokens. The node stays the lower part; returns the new upper one."""
    upper = TreeNode(node.tokens[:at], node.parent)
    upper.locks, upper.last_use = node.locks, node.last_use
    node.parent.children[upper.tokens[0]] = upper
    node.tokens, node.parent = node.tokens[at:], upper
    upper.children[node.tokens[0]] = node
    return upper


def insert(root: TreeNode, tokens: Sequence, now: int = 0) -> TreeNode:
    """The node that ends with the last token, made if need be. Its path was used ``now``."""
    node, done = match(root, tokens)
    if done < node.end:
        node = split(node, len(node.tokens) - (node.end - done))
    if done < len(tokens):
        node.children[tokens[done]] = node = TreeNode(tokens[done:], node)
    for each in path(node):
        each.last_use = now
    return node


def path(node: TreeNode) -> Iterator[TreeNode]:
    """From here up to the root, which is left out."""
    while node.parent is not None:
        yield node
        node = node.parent


def nodes(root: TreeNode) -> Iterator[TreeNode]:
    """All below the root, parents before children."""
    for child in root.children.values():
        yield child
        yield from nodes(child)


def lock(node: TreeNode, users: int = 1) -> None:
    """So many users more of a node, and with it of all above; −1: one less."""
    for each in path(node):
        each.locks += users


def evict(root: TreeNode, num_tokens: int) -> int:
    """Let go of so many tokens, or all that may go: from the ends of idle leaves, least recently used first."""
    freed = 0
    while freed < num_tokens:
        leaves = [n for n in nodes(root) if not n.children and not n.locks]
        if not leaves:
            break
        leaf = min(leaves, key=lambda n: n.last_use)
        drop = min(len(leaf.tokens), num_tokens - freed)
        if drop == len(leaf.tokens):
            del leaf.parent.children[leaf.tokens[0]]
        leaf.tokens, leaf.end = leaf.tokens[:-drop], leaf.end - drop
        freed += drop
    return freed


def draw(root: TreeNode, sep: str = "", indent: str = "") -> str:
    """A line for each edge, children indented under their parent."""
    lines = []
    for child in root.children.values():
        lock_sign = f"  (locked ×{child.locks})" if child.locks else ""
        lines.append(f"{indent}{sep.join(map(str, child.tokens))}{lock_sign}")
        lines.append(draw(child, sep, indent + "    "))
    return "\n".join(filter(None, lines))


def plain_find(kept: Sequence[Sequence], prompt: Sequence) -> tuple[int, int]:
    """Without a tree: the longest beginning that some kept prompt shares, and how many tokens were compared."""
    same = [in_common(old, prompt) for old in kept]
    return max(same, default=0), sum(same) + len(same)
