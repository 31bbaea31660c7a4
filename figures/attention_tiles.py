"""Draws figures/attention_tiles.svg: what one program of the kernel holds, and how it walks over the keys."""

from pathlib import Path

from minillm.course.drawing import arrow, rect, svg, text

TILE, COUNT, D = 62, 4, 46  # pixels: side of a tile, tiles a side, width of Q, K, V and O
X, Y = 190, 92  # corner of the score matrix
ROW, COLUMN = 1, 2  # the tile that is being worked on


def draw() -> str:
    side = TILE * COUNT
    parts = []
    for row in range(COUNT):
        for column in range(COUNT):
            mine = row == ROW
            kind = "lit" if mine and column == COLUMN else "done" if mine and column < COLUMN else "absent"
            parts.append(rect(X + column * TILE, Y + row * TILE, TILE, TILE, kind))
    for i in range(COUNT):
        parts += [
            rect(X - D - 24, Y + i * TILE, D, TILE, "lit" if i == ROW else "open"),
            rect(X + i * TILE, Y - D - 24, TILE, D, "lit" if i == COLUMN else "open"),
            rect(X + side + 24, Y + i * TILE, D, TILE, "lit" if i == ROW else "open"),
            rect(X + i * TILE, Y + side + 24, TILE, D, "lit" if i == COLUMN else "open"),
        ]
    middle = Y + ROW * TILE + TILE / 2
    now = X + COLUMN * TILE + TILE / 2
    parts += [
        text(X - D / 2 - 24, Y + side + 20, "Q", "strong"),
        text(X - 14, Y - D / 2 - 20, "Kᵀ", "strong", "end"),
        text(X + side + 24 + D / 2, Y + side + 20, "O", "strong"),
        text(X - 14, Y + side + 24 + D / 2 + 5, "V", "strong", "end"),
        text(now, middle + 5, "scores", "mono"),
        text(X - D / 2 - 24, middle + 5, "q", "mono"),
        text(now, Y - 24 - D / 2 + 5, "k", "mono"),
        text(now, Y + side + 24 + D / 2 + 5, "v", "mono"),
        text(X + side + 24 + D / 2, middle + 5, "o", "mono"),
        arrow(f"M{X + 8},{middle - 22:g} H{X + side - 8}", "flow"),
    ]
    left, top = 560, 60
    parts += [
        rect(left, top, 320, 300, "box", 10),
        text(left + 16, top + 26, "One program, one tile of queries", "strong", "start"),
        text(left + 16, top + 58, "load q, once", "mono", "start"),
        text(left + 16, top + 90, "for each tile of keys:", "small", "start"),
        text(left + 40, top + 114, "load k and v", "mono", "start"),
        text(left + 40, top + 138, "scores = q kᵀ / √d", "mono", "start"),
        text(left + 40, top + 162, "update m, l, acc", "mono", "start"),
        text(left + 16, top + 194, "store acc / l and m + ln l", "mono", "start"),
        text(left + 16, top + 230, "hatched: done, thrown away, never in memory", "small", "start"),
        text(left + 16, top + 250, "blue: on the chip now", "small", "start"),
        text(left + 16, top + 270, "dashed: not computed yet, or another program's", "small", "start"),
    ]
    title = (
        "The score matrix cut into tiles: one program keeps a tile of Q, walks along its row over the tiles of K and "
        "V, and writes one tile of O"
    )
    return svg(900, 440, title, parts)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
