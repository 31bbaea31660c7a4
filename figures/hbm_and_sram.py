"""Draws figures/hbm_and_sram.svg: what crosses between memory and chip, with the N × N matrix and with tiles.

Matrices are to scale for N = 256 and d = 64. Numbers beside the arrows are in units of N·d; chapter 01 counts them.
"""

from pathlib import Path

from minillm.course.drawing import arrow, rect, svg, text

N, D, TILE = 100, 25, 25  # pixels: N is four times d, and a tile has d rows
CHIP, MEMORY = 62, 262  # tops of the two boxes


def panel(x: float, title: str, traffic: list[tuple[str, int, int]], total: str, chip: list[str]) -> list[str]:
    """traffic: name of a matrix, N·d loaded, N·d stored; (0, 0) for one that is never there."""
    parts = [
        text(x + 210, 30, title, "strong"),
        rect(x + 90, CHIP, 240, 84, "lit", 10),
        text(x + 210, CHIP + 22, "chip: SRAM, fast and small", "strong"),
        *(text(x + 210, CHIP + 44 + 18 * i, line, "small") for i, line in enumerate(chip)),
        rect(x, MEMORY, 420, 166, "box", 10),
        text(x + 12, MEMORY + 20, "memory: HBM, large and slow", "strong", "start"),
    ]
    left = x + 16
    for name, loaded, stored in traffic:
        square = name in ("scores", "weights")
        width = N if square else D
        kind = "absent" if not loaded + stored else "warn" if square else "open"
        middle, top = left + width / 2, MEMORY + 34
        parts += [rect(left, top, width, N, kind), text(middle, top + N + 18, name, "mono")]
        if square:
            words = ("never", "stored") if kind == "absent" else ("N × N",)
            parts += [text(middle, top + 48 + 18 * i, word, "small") for i, word in enumerate(words)]
        line = "heavy" if square else "flow"
        lean = x + 210 + (middle - x - 210) * 0.52  # where the arrow meets the chip
        for times, up, shift in ((loaded, True, -7), (stored, False, 7)):
            if times:
                ends = [(middle + shift, MEMORY - 2), (lean + shift, CHIP + 88)]
                (x0, y0), (x1, y1) = ends if up else ends[::-1]
                parts.append(arrow(f"M{x0:.0f},{y0} L{x1:.0f},{y1}", line, 1 + 0.8 * times))
                at = 0.36
                px, py = ends[0][0] + at * (ends[1][0] - ends[0][0]), ends[0][1] + at * (ends[1][1] - ends[0][1])
                side = -9 if up else 9
                parts.append(text(px + side, py, str(times), "strong", "end" if up else "start"))
        left += width + 14
    return [*parts, text(x + 210, MEMORY + 196, total, "strong")]


def draw() -> str:
    naive = [("Q", 1, 0), ("K", 1, 0), ("scores", 4, 4), ("weights", 4, 4), ("V", 1, 0), ("O", 0, 1)]
    tiles = [("Q", 1, 0), ("K", 4, 0), ("scores", 0, 0), ("weights", 0, 0), ("V", 4, 0), ("O", 0, 1)]
    title = (
        "Between HBM and the chip: with the N by N matrix 20 times N·d numbers cross, 16 of them scores and weights; "
        "with tiles of 64 only Q, K, V and O cross, 10 times N·d"
    )
    parts = [
        *panel(15, "N × N attention", naive, "20 N·d cross, 16 of them scores and weights",
               ["one product or softmax at a time;", "results go back in between"]),
        *panel(465, "tiles of 64", tiles, "10 N·d cross: Q and O once, K and V four times",
               ["a tile of q, k, v and scores;", "m, l and acc of 64 rows"]),
    ]  # fmt: skip
    return svg(900, 470, title, parts)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
