"""The radix tree (chapter 05): prompts of words are asked, run, end; edges split, idle leaves go, order decides."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import ipywidgets

from minillm.course.widgets import Panel, table
from minillm.memory.block_pool import BlockPool
from minillm.memory.prefix_cache import Node
from minillm.memory.radix_cache import RadixCache

VERBS = ("ask", "run", "end", "evict")
ORDERS = ("as typed", "longest prefix first")
MOST_ACTIONS, MOST_WORDS = 24, 12


@dataclass(frozen=True)
class Edge:
    """A node of the tree as it stood after an action."""

    words: tuple[str, ...]
    start: int  # words before it
    parent: int | None  # its place in the list of edges
    locks: int
    last_use: int
    is_leaf: bool


@dataclass(frozen=True)
class Step:
    """What an action did, and the tree after it."""

    did: str
    words: int  # of the prompt; 0 if there is none
    found: int  # of them in the tree already
    evicted: int  # words, to make room or because that was asked
    edges: list[Edge]
    words_asked: int  # all prompts so far
    words_found: int
    compared: int  # words looked at by this action's look-up

    @property
    def kept(self) -> int:
        return sum(len(edge.words) for edge in self.edges)

    @property
    def hit_rate(self) -> float:
        return self.words_found / self.words_asked if self.words_asked else 0.0

    @property
    def goes_first(self) -> int | None:
        """The edge that eviction would take next."""
        idle = [i for i, edge in enumerate(self.edges) if edge.is_leaf and not edge.locks]
        return min(idle, key=lambda i: self.edges[i].last_use, default=None)


def replay(actions: str, room: int = 24, order: str = "as typed") -> list[Step]:
    """The tree after each of some actions, separated by commas. Words are tokens, and ``room`` is how many there are.

    ``ask you are a cat``  a request comes, is answered and leaves its prompt in the tree; ``run …`` it comes and stays,
    so its path is locked; ``end …`` it ends; ``evict 3``. With the order "longest prefix first", requests next to each
    other in the list wait together, and of those that wait the one with the longest prefix in the tree comes first.
    ValueError for what is no action, and for a prompt that finds no room.
    """
    todo = [part.split() for part in actions.split(",") if part.strip()]
    if len(todo) > MOST_ACTIONS:
        raise ValueError(f"{len(todo)} actions; {MOST_ACTIONS} at most can be shown")
    for verb, *words in todo:
        if verb not in VERBS or not words:
            raise ValueError(f"{' '.join([verb, *words])!r} is no action: ask, run or end a prompt, or evict 3")
        if len(words) > MOST_WORDS:
            raise ValueError(f"a prompt of {len(words)} words; {MOST_WORDS} at most can be shown")
    cache, steps, running = RadixCache(BlockPool(room), block_size=1), [], []
    asked = found_in_all = 0
    while todo:
        verb, *words = todo.pop(_next(todo, cache, order))
        before, found, evicted = cache.num_compared, 0, 0
        if verb == "evict":
            if not words[0].isdecimal():
                raise ValueError(f"{words[0]!r} is no number of words")
            evicted = cache.evict(int(words[0]))
        elif verb == "end":
            node = next((node for prompt, node in running if prompt == words), None)
            if node is None:
                raise ValueError(f"{' '.join(words)!r} does not run")
            running.remove((words, node))
            cache.unlock(node)
        else:
            match = cache.match(words)
            found, compared = match.num_tokens, cache.num_compared - before
            node, evicted = _insert(cache, match, words)
            if verb == "run":
                running.append((words, node))
            else:
                cache.unlock(node)
            asked, found_in_all = asked + len(words), found_in_all + found
            before = cache.num_compared - compared
        did = " ".join([verb, *words])
        size = len(words) if verb in ("ask", "run") else 0
        compared = cache.num_compared - before
        steps.append(Step(did, size, found, evicted, _edges(cache), asked, found_in_all, compared))
    return steps


def _next(todo: list[list[str]], cache: RadixCache, order: str) -> int:
    """The place of the next action: the first, unless others that wait with it have a longer prefix."""
    if order != ORDERS[1]:
        return 0
    queue = next((i for i, action in enumerate(todo) if action[0] not in ("ask", "run")), len(todo))
    return max(range(queue), key=lambda i: (cache.match(todo[i][1:]).num_tokens, -i), default=0)


def _insert(cache: RadixCache, match, words: list[str]) -> tuple[Node, int]:
    """Lock what is there, make room for the rest and add it: (the node, locked; words evicted)."""
    locked = cache.lock(match)
    need, free = len(words) - match.num_tokens, cache.pool.num_free
    if need > free + cache.num_idle_blocks:
        raise ValueError(f"{' '.join(words)!r} needs {need} words more; free: {free}, idle: {cache.num_idle_blocks}")
    evicted = cache.evict(need - free) if need > free else 0
    rows = cache.pool.allocate(need)
    node = cache.insert(words, [*match.blocks, *((row,) for row in rows)])
    cache.pool.release(rows)  # the tree holds them now
    cache.hold(node)
    cache.unlock(locked)
    return node, evicted


def _edges(cache: RadixCache) -> list[Edge]:
    """Depth first, children in the order in which they came."""
    edges: list[Edge] = []

    def add(node: Node, parent: int | None) -> None:
        place = len(edges)
        edges.append(Edge(node.tokens, node.start, parent, node.locks, node.last_use, not node.children))
        for child in node.children.values():
            add(child, place)

    for root in cache._roots.values():
        for child in root.children.values():
            add(child, None)
    return edges


def tree_text(step: Step) -> str:
    """A line for each edge, below its parent's and further in."""
    depth: list[int] = []
    lines = []
    for i, edge in enumerate(step.edges):
        depth.append(0 if edge.parent is None else depth[edge.parent] + 1)
        locked = f"  locked ×{edge.locks}" if edge.locks else ""
        first = "  goes first" if i == step.goes_first else ""
        lines.append("    " * depth[i] + " ".join(edge.words) + locked + first)
    return "\n".join(lines)


def tree_svg(step: Step) -> str:
    """The tree from left to right, a box a word in the column of its position; a line of boxes for each leaf."""
    edges = step.edges
    width = max([34, *(9 * len(word) + 12 for edge in edges for word in edge.words)])
    gap, height, line = 16, 26, 50
    rows: list[int] = []
    starts: list[int] = []
    leaf = -1
    for i, edge in enumerate(edges):
        if edge.parent is None or edge.parent != i - 1:  # a first child goes on in its parent's line
            leaf += 1
        rows.append(leaf)
        starts.append(0 if edge.parent is None else starts[edge.parent] + 1)
    where = [(10 + edge.start * width + starts[i] * gap, 24 + rows[i] * line) for i, edge in enumerate(edges)]
    parts = []
    for i, edge in enumerate(edges):
        x, y = where[i]
        if edge.parent is not None:
            px, py = where[edge.parent]
            px += len(edges[edge.parent].words) * width
            bend = (px + x) / 2
            parts.append(
                f"<path d='M{px},{py + height / 2} H{bend} V{y + height / 2} H{x}' fill='none' stroke='currentColor'/>"
            )
        fill = "#0969da" if edge.locks else "none"
        for w, word in enumerate(edge.words):
            parts.append(
                f"<rect x='{x + w * width}' y='{y}' width='{width}' height='{height}' fill='{fill}' "
                f"fill-opacity='0.3' stroke='currentColor'/>"
                f"<text x='{x + (w + 0.5) * width}' y='{y + 18}' font-size='12' text-anchor='middle' "
                f"fill='currentColor'>{escape(word)}</text>"
            )
        if edge.locks:
            parts.append(
                f"<rect x='{x}' y='{y}' width='{len(edge.words) * width}' height='{height}' fill='none' "
                f"stroke='currentColor' stroke-width='3'/>"
            )
        label = f"locked ×{edge.locks}" if edge.locks else "goes first" if i == step.goes_first else ""
        if label:
            weight = "" if edge.locks else " font-weight='bold'"
            parts.append(f"<text x='{x}' y='{y - 5}' font-size='11' fill='currentColor'{weight}>{label}</text>")
    most = max((where[i][0] + len(e.words) * width for i, e in enumerate(edges)), default=100) + 70
    tall = 40 + (max(rows, default=0) + 1) * line - 10
    label = f"a tree of {len(edges)} edges that keeps {step.kept} words"
    return (
        f"<svg viewBox='0 0 {most} {tall}' width='{most}' style='max-width:100%' role='img' "
        f"aria-label='{label}'>{''.join(parts)}</svg>"
    )


TWO_PAIRS = "ask a b c 1, ask x y z 1, ask a b c 2, ask x y z 2"
PRESETS = (
    ("one prompt", "ask you are a cat", 24, "as typed"),
    ("one that parts", "ask you are a cat, ask you are the dog", 24, "as typed"),
    ("one that goes on", "ask you are a cat, ask you are a cat now", 24, "as typed"),
    ("its beginning", "ask you are a cat, ask you are", 24, "as typed"),
    ("locked, evict 9", "run you are a cat, ask you are the dog, evict 9", 24, "as typed"),
    ("two pairs, room 4", TWO_PAIRS, 4, "as typed"),
    ("by prefix, room 4", TWO_PAIRS, 4, "longest prefix first"),
    ("two pairs, room 6", TWO_PAIRS, 6, "as typed"),
    ("two pairs, room 7", TWO_PAIRS, 7, "as typed"),
)


def preset_rows() -> list[dict]:
    """What the widget shows for some actions, and the answers to its questions."""
    rows = []
    for name, actions, room, order in PRESETS:
        last = replay(actions, room, order)[-1]
        edges = len(last.edges)
        rows.append({"": name, "edges": edges, "words kept": last.kept, "hit rate": f"{last.hit_rate:.0%}"})
    return rows


def step_rows(steps: list[Step]) -> list[dict]:
    """A line for each action."""
    rows = []
    for step in steps:
        found = f"{step.found} of {step.words}" if step.words else ""
        rows.append({"action": step.did, "found": found, "compared": step.compared or "", "evicted": step.evicted})
    return rows


def radix_tree_widget() -> Panel:
    """Ask, run, end, evict: where does an edge split, what may go, and does the order matter?"""
    actions = ipywidgets.Textarea(
        value="ask you are a cat",
        description="actions",
        continuous_update=False,
        layout=ipywidgets.Layout(width="95%", height="4em"),
    )

    def draw(actions: str, room: int, order: str) -> str:
        steps = replay(actions, room, order)
        if not steps:
            return "<p>The tree is empty. Ask something.</p>"
        last = steps[-1]
        line = f"<p>Words kept: {last.kept} of {room}; edges: {len(last.edges)}. "
        line += f"Hit rate so far: <b class='minillm-readout'>{last.hit_rate:.0%}</b> "
        line += f"({last.words_found} of {last.words_asked} prompt words).</p>"
        return tree_svg(last) + line + table(step_rows(steps), mark=len(steps) - 1)

    def evict(_) -> None:
        actions.value = ", ".join(filter(None, (actions.value.strip().rstrip(","), "evict 1")))

    def undo(_) -> None:
        actions.value = actions.value.rpartition(",")[0]

    buttons = []
    for name, press in (("Evict 1", evict), ("Undo", undo)):
        button = ipywidgets.Button(description=name, layout=ipywidgets.Layout(width="auto"))
        button.on_click(press)
        buttons.append(button)
    return Panel(
        draw,
        {
            "actions": actions,
            "order": ipywidgets.ToggleButtons(options=list(ORDERS), description="order"),
            "room": ipywidgets.IntSlider(value=24, min=3, max=32, description="room", continuous_update=False),
        },
        extra=buttons,
    )
