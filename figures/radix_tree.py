"""Draws figures/radix_tree.svg: a radix tree after one prompt, after two, and after a third one and an eviction."""

from pathlib import Path

from minillm.course.drawing import arrow, rect, svg, text

CELL, HEIGHT = 34, 32


def edge(x: float, y: float, letters: str, kind: str, note: str = "") -> list[str]:
    parts = [rect(x, y, CELL * len(letters), HEIGHT, kind)]
    parts += [text(x + (i + 0.5) * CELL, y + 21, letter, "mono") for i, letter in enumerate(letters)]
    if note:
        parts.append(text(x, y - 6, note, "small", "start"))
    return parts


def link(x: float, y: float, to_x: float, to_y: float) -> str:
    middle = (x + to_x) / 2
    return arrow(f"M{x},{y + HEIGHT / 2} H{middle} V{to_y + HEIGHT / 2} H{to_x - 2}")


def draw() -> str:
    title = (
        "A radix tree of letters. After abcd: one edge, abcd. After abef, which still runs: ab, locked, with cd and ef "
        "below it. After abeg came and cd was evicted: ab, e and g, with f beside g; ab, e and f are locked"
    )
    parts = [
        text(20, 30, "1  abcd was asked", "strong", "start"),
        *edge(20, 70, "abcd", "box", "idle"),
        text(20, 190, "one edge, uncut", "small", "start"),
        text(220, 30, "2  abef runs", "strong", "start"),
        *edge(220, 70, "ab", "lit", "locked ×1"),
        link(220 + 2 * CELL, 70, 324, 70),
        link(220 + 2 * CELL, 70, 324, 130),
        *edge(324, 70, "cd", "box", "idle leaf: goes first"),
        *edge(324, 130, "ef", "lit", "locked ×1"),
        text(220, 190, "cut where they part;", "small", "start"),
        text(220, 208, "ab is computed once", "small", "start"),
        text(500, 30, "3  abeg runs too, cd was evicted", "strong", "start"),
        *edge(500, 130, "ab", "lit", "locked ×2"),
        *edge(604, 70, "cd", "absent", "gone"),
        link(500 + 2 * CELL, 130, 604, 130),
        *edge(604, 130, "e", "lit", "locked ×2"),
        link(604 + CELL, 130, 690, 130),
        link(604 + CELL, 130, 690, 190),
        *edge(690, 130, "f", "lit", "locked ×1"),
        *edge(690, 190, "g", "lit", "locked ×1"),
        text(20, 250, "blue, thick: a running request's way, locked · grey: idle · dashed: evicted", "small", "start"),
    ]
    return svg(790, 268, title, parts)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
