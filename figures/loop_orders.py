"""Draws figures/loop_orders.svg: the same tiles in two orders, and what has to travel in each."""

from pathlib import Path

from minillm.course.drawing import arrow, rect, svg, text

TILE, COUNT, D = 40, 4, 26
TOP = 96


def panel(x: float, title: str, along_rows: bool, lines: list[str], total: str) -> list[str]:
    side, left = TILE * COUNT, x + 60
    parts = [text(x, 30, title, "strong", "start")]
    for i in range(COUNT):
        first = i == 0
        parts += [
            rect(left - D - 14, TOP + i * TILE, D, TILE, "lit" if along_rows and first else "open"),
            rect(left + i * TILE, TOP - D - 14, TILE, D, "lit" if first and not along_rows else "open"),
            *(rect(left + i * TILE, TOP + j * TILE, TILE, TILE, "absent") for j in range(COUNT)),
        ]
        at = i * TILE + TILE / 2
        if along_rows:
            parts.append(arrow(f"M{left + 8},{TOP + at:g} H{left + side - 6}", "flow", 2.5 if first else 1.5))
            parts.append(text(left + side + 12, TOP + at + 5, str(i + 1), "small"))
        else:
            parts.append(arrow(f"M{left + at:g},{TOP + 8} V{TOP + side - 6}", "flow", 2.5 if first else 1.5))
            parts.append(text(left + at, TOP + side + 16, str(i + 1), "small"))
    parts += [
        text(left - D / 2 - 14, TOP + side + 16, "Q, O", "mono"),
        text(left - 10, TOP - 22, "K, V", "mono", "end"),
        *(text(left + side + 30, TOP + 26 + 24 * i, line, "small", "start") for i, line in enumerate(lines)),
        text(left + side + 30, TOP + 34 + 24 * len(lines), total, "strong", "start"),
    ]
    return parts


def draw() -> str:
    title = (
        "Two loop orders. Queries outside: a tile of Q stays, K and V pass by, O is written once. "
        "Keys outside: a tile of K and V stays, Q and O pass by, O is read and written every time"
    )
    parts = [
        *panel(16, "Q outside: FlashAttention-2, the kernel here", True,
               ["stays:  q, m, l, acc", "passes by:  k, v", "written:  o, once"], "(2⌈N/B⌉ + 2) N·d"),
        *panel(466, "K/V outside: FlashAttention, Algorithm 1", False,
               ["stays:  k, v", "passes by:  q, o, m, l", "written:  o, every time"], "(3⌈N/B⌉ + 2) N·d"),
    ]  # fmt: skip
    return svg(900, 290, title, parts)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
