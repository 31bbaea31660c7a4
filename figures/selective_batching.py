"""Draws figures/selective_batching.svg: four requests as seven rows, split in attention only."""

from pathlib import Path

from minillm.course.drawing import arrow, rect, svg, text

LENGTHS = (("A", 2), ("B", 3), ("C", 1), ("D", 1))
KINDS = {"A": "lit", "B": "box", "C": "warn", "D": "bold"}
ROW, TOP = 26, 62
KEYS = {"A": 2, "B": 3, "C": 6, "D": 4}


def _of(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def rows(x: float, width: float) -> list[str]:
    """The seven rows as one block, each with its request's letter."""
    parts, y = [], TOP
    for name, count in LENGTHS:
        for _ in range(count):
            parts += [rect(x, y, width, ROW - 3, KINDS[name]), text(x + width / 2, y + 16, name, "mono")]
            y += ROW
    return parts


def draw() -> str:
    title = (
        "Rows of four requests, 2, 3, 1 and 1, stand one under another in one tensor of seven. One matrix product "
        "serves all seven. Attention is split: each request's rows meet its own keys and values. Then one tensor of "
        "seven rows again, and one product"
    )
    parts = [*rows(20, 90), text(65, 40, "[7, H]", "mono")]
    parts += [arrow("M116,153 H164", "flow"), text(140, 143, "× W", "mono")]
    parts += [*rows(170, 130), text(235, 40, "Q, K, V  [7, 3H]", "mono")]
    y = TOP
    for name, count in LENGTHS:
        middle = y + count * ROW / 2
        box = 366, middle - 11, 214, 22
        parts += [
            arrow(f"M304,{middle:g} H360"),
            rect(*box, KINDS[name], 6),
            text(473, middle + 4, f"{name}: {_of(count, 'query', 'queries')}, {KEYS[name]} keys", "mono"),
            arrow(f"M584,{middle:g} H632"),
        ]
        y += count * ROW
    parts += [text(473, 40, "attention: split", "strong"), *rows(638, 90), text(683, 40, "[7, H]", "mono")]
    parts += [arrow("M734,153 H790", "flow"), text(760, 143, "× W_out", "mono")]
    parts += [*rows(796, 90), text(841, 40, "[7, H]", "mono")]
    parts += [
        text(235, TOP + 7 * ROW + 22, "one product, weights read once", "small"),
        text(473, TOP + 7 * ROW + 22, "no weights here, so nothing to share", "small"),
    ]
    return svg(906, 282, title, parts)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
