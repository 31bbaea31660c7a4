"""The block table (chapter 02): sequences append, fork, write and free; table, reference counts and free list show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import ipywidgets

from minillm.course.widgets import Panel, table
from minillm.memory.block_pool import BlockPool

NAMES = "ABCD"


@dataclass(frozen=True)
class Books:
    """Who holds what after an action."""

    did: str  # the action
    block_size: int
    tables: dict[str, list[int]]  # sequence -> block ids in row order
    lengths: dict[str, int]  # sequence -> tokens
    ref_counts: list[int]  # of blocks 0, 1, …; 0 is the null block
    free: list[int]  # the next to be handed out first
    copied: list[tuple[int, int]]  # (from, to), by this action
    copies: int  # so far

    def rows_filled(self, block: int) -> int:
        """Rows of a block that hold a token of anybody."""
        size = self.block_size
        return max(
            (
                min(size, self.lengths[name] - i * size)
                for name, of in self.tables.items()
                for i, held in enumerate(of)
                if held == block
            ),
            default=0,
        )

    @property
    def held(self) -> list[int]:
        return [block for block, count in enumerate(self.ref_counts) if count]

    @property
    def waste(self) -> int:
        """Rows that somebody holds and no token is in; a shared row counts once."""
        return sum(self.block_size - self.rows_filled(block) for block in self.held)

    @property
    def without_sharing(self) -> int:
        """Blocks that the same sequences would hold if each had all of its own."""
        return sum(map(len, self.tables.values()))


def replay(actions: str, block_size: int = 4, num_blocks: int = 8) -> list[Books]:
    """The books after each of some actions, separated by commas.

    ``append A 6`` six more tokens (a new sequence begins so); ``fork A B`` B shares all that A holds; ``write A 2``
    overwrite token 2, counted from 0, or the last one; ``free A``. Whoever is about to write a block that is shared
    gets a copy first. ValueError for a sequence that is not there, or is there already, and if blocks run out.
    """
    pool, tables, lengths, books, copies = BlockPool(num_blocks), {}, {}, [], 0
    for action in (part.strip() for part in actions.split(",") if part.strip()):
        verb, name, argument = (*action.split(), "", "")[:3]
        if verb not in ("append", "fork", "write", "free") or not name:
            raise ValueError(f"{action!r} is no action; there are append A 6, fork A B, write A 2 and free A")
        if verb != "append" and name not in tables:
            raise ValueError(f"{action!r}: there is no sequence {name}")
        copied: list[tuple[int, int]] = []
        if verb == "append":
            count = _number(action, argument, default=1)
            own, start = tables.setdefault(name, []), lengths.setdefault(name, 0)
            copied = list(_make_writable(pool, own, start, start + count, block_size, action))
            lengths[name] += count
        elif verb == "write":
            row = _number(action, argument, default=lengths[name] - 1)
            if not 0 <= row < lengths[name]:
                raise ValueError(f"{action!r}: {name} has tokens 0 to {lengths[name] - 1}")
            copied = list(_make_writable(pool, tables[name], row, row + 1, block_size, action))
        elif verb == "fork":
            if not argument or argument in tables:
                raise ValueError(f"{action!r}: the child needs a name of its own")
            pool.hold(tables[name])
            tables[argument], lengths[argument] = list(tables[name]), lengths[name]
        else:
            pool.release(reversed(tables.pop(name)))
            del lengths[name]
        copies += len(copied)
        now = {of: list(blocks) for of, blocks in tables.items()}
        free = list(pool._free)
        books.append(Books(action, block_size, now, dict(lengths), list(pool.ref_counts), free, copied, copies))
    return books


def _number(action: str, text: str, default: int) -> int:
    if not text:
        return default
    if not text.isdecimal():
        raise ValueError(f"{action!r}: {text!r} is no number of tokens")
    return int(text)


def _make_writable(pool, own: list[int], first: int, end: int, size: int, action: str) -> Iterator[tuple[int, int]]:
    """Rows first … end − 1 get blocks of the sequence's own; yields the copies to be made."""
    wanted = -(-end // size)
    shared = [i for i in range(first // size, min(wanted, len(own))) if pool.ref_counts[own[i]] > 1]
    need = len(shared) + max(0, wanted - len(own))
    if need > pool.num_free:
        raise ValueError(f"{action!r} needs {need} more blocks and {pool.num_free} are free: somebody must give way")
    for i in shared:
        (fresh,) = pool.allocate(1)
        yield own[i], fresh
        pool.release([own[i]])
        own[i] = fresh
    own += pool.allocate(max(0, wanted - len(own)))


PRESETS = (
    ("one token", "append A 1"),
    ("a full block", "append A 4"),
    ("one token more", "append A 5"),
    ("forked twice", "append A 6, fork A B, fork A C"),
    ("then each appends", "append A 6, fork A B, fork A C, append A, append B, append C"),
    ("forked at a boundary", "append A 8, fork A B, append A, append B"),
    ("parent freed first", "append A 6, fork A B, free A"),
)


def preset_rows() -> list[dict]:
    """What the widget shows for some actions, and the answers to its questions."""
    rows = []
    for name, actions in PRESETS:
        last = replay(actions)[-1]
        held = {"blocks held": len(last.held), "without sharing": last.without_sharing}
        rows.append({"": name, **held, "copies": last.copies, "slots wasted": last.waste})
    return rows


def books_rows(books: Books) -> list[dict]:
    """A line for each sequence."""
    size = books.block_size
    return [
        {
            "sequence": name,
            "tokens": books.lengths[name],
            "block table": ", ".join(map(str, of)) or "–",
            "last block": f"{books.lengths[name] - (len(of) - 1) * size} of {size}" if of else "–",
        }
        for name, of in books.tables.items()
    ]


def pool_svg(books: Books) -> str:
    """Every block as a box of rows: filled ones shaded, its number and its reference count above."""
    size, count = books.block_size, len(books.ref_counts) - 1
    side, gap, parts = 16, 12, []
    width = size * side + gap
    per_line = max(1, 640 // width)
    lines = -(-count // per_line)
    for block in range(1, count + 1):
        x, y = (block - 1) % per_line * width + 4, (block - 1) // per_line * 56 + 20
        refs, filled = books.ref_counts[block], books.rows_filled(block)
        label = f"{block}: ×{refs}" if refs else f"{block}: free"
        weight = " font-weight='bold'" if refs > 1 else ""
        parts.append(f"<text x='{x}' y='{y - 5}' font-size='11' fill='currentColor'{weight}>{label}</text>")
        for row in range(size):
            fill = "#0969da" if row < filled else "none"
            dash = "" if refs else " stroke-dasharray='2 2'"
            parts.append(
                f"<rect x='{x + row * side}' y='{y}' width='{side}' height='{side}' fill='{fill}' "
                f"fill-opacity='0.45' stroke='currentColor'{dash}/>"
            )
    total = per_line * width
    held = ", ".join(f"block {b} held {books.ref_counts[b]} times" for b in books.held) or "no block is held"
    return (
        f"<svg viewBox='0 0 {total} {lines * 56}' width='{total}' role='img' aria-label='{held}'>{''.join(parts)}</svg>"
    )


def _as_far_as_possible(actions: str, block_size: int, num_blocks: int) -> tuple[list[Books], str]:
    """The books up to the first action that is refused, and the sentence that refuses it ("" if none is)."""
    steps = [part for part in actions.split(",") if part.strip()]
    refused = ""
    while True:
        try:
            return replay(",".join(steps), block_size, num_blocks), refused
        except ValueError as error:
            refused = str(error)
            steps.pop()


def block_table_widget() -> Panel:
    """Append, fork, write, free: who holds which block, what is copied, what is wasted?"""
    actions = ipywidgets.Text(
        value="append A 6", description="actions", continuous_update=False, layout=ipywidgets.Layout(width="95%")
    )
    who = ipywidgets.Dropdown(options=list(NAMES), value="A", description="sequence")

    syntax = "<p>Actions stand in a row, a comma between two: append A 6 · fork A B · write A 2 · free A</p>"

    def draw(actions: str, who: str, block_size: int, num_blocks: int) -> str:
        books, refused = _as_far_as_possible(actions, block_size, num_blocks)
        if refused:
            refused = f"<p class='minillm-refused'><b>Not possible:</b> {escape(refused)}</p>"
        if not books:
            return syntax + (refused or "<p>Nobody holds anything. Press append.</p>")
        last = books[-1]
        copied = ", ".join(f"block {a} to {b}" for a, b in last.copied) or "nothing"
        line = f"<p>After <i>{escape(last.did)}</i>: copied {copied}; copies in all {last.copies}. "
        line += f"Slots wasted: <b class='minillm-readout'>{last.waste}</b>. "
        line += f"Blocks held: {len(last.held)}; without sharing it would be {last.without_sharing}.</p>"
        free = ", ".join(map(str, last.free)) or "empty"
        rest = line + f"<p>Free list, next first: {free}</p>"
        return syntax + refused + table(books_rows(last)) + pool_svg(last) + rest

    def button(name: str, action) -> ipywidgets.Button:
        made = ipywidgets.Button(description=name, layout=ipywidgets.Layout(width="auto"))

        def press(_) -> None:
            actions.value = ", ".join(filter(None, (actions.value.strip().rstrip(","), action())))

        made.on_click(press)
        return made

    def child() -> str:
        taken = actions.value.split()
        return next((name for name in NAMES if name not in (word.rstrip(",") for word in taken)), NAMES[-1])

    def undo(_) -> None:
        actions.value = actions.value.rpartition(",")[0]

    back = ipywidgets.Button(description="Undo", layout=ipywidgets.Layout(width="auto"))
    back.on_click(undo)
    buttons = [
        button("Append", lambda: f"append {who.value}"),
        button("Append 4", lambda: f"append {who.value} 4"),
        button("Fork", lambda: f"fork {who.value} {child()}"),
        button("Write last", lambda: f"write {who.value}"),
        button("Free", lambda: f"free {who.value}"),
        back,
    ]
    return Panel(
        draw,
        {
            "actions": actions,
            "who": who,
            "block_size": ipywidgets.Dropdown(options=[1, 2, 4, 8], value=4, description="block size"),
            "num_blocks": ipywidgets.IntSlider(value=8, min=2, max=16, description="blocks"),
        },
        extra=buttons,
    )
