"""Draws figures/static_and_iteration.svg: five requests on two seats, batched by request and by iteration."""

from pathlib import Path

from minillm.course.drawing import rect, svg, text

LENGTHS = {"A": 2, "B": 6, "C": 1, "D": 4, "E": 3}
CELL, ROW = 23, 34


def by_request() -> list[list[tuple[str, bool]]]:
    """For each of two seats what it does in each pass: (request, whether it computes)."""
    rows: list[list[tuple[str, bool]]] = [[], []]
    names = list(LENGTHS)
    for start in range(0, len(names), 2):
        batch = names[start : start + 2]
        longest = max(LENGTHS[name] for name in batch)
        for row, name in zip(rows, [*batch, ""], strict=False):
            row += [(name, i < LENGTHS.get(name, 0)) for i in range(longest)]
    return rows


def by_iteration() -> list[list[tuple[str, bool]]]:
    rows: list[list[tuple[str, bool]]] = [[], []]
    for name, length in LENGTHS.items():
        min(rows, key=len).extend([(name, True)] * length)
    longest = max(map(len, rows))
    return [row + [("", False)] * (longest - len(row)) for row in rows]


def panel(y: float, title: str, rows: list[list[tuple[str, bool]]], verdict: str) -> list[str]:
    parts = [text(16, y, title, "strong", "start")]
    for seat, row in enumerate(rows):
        top = y + 14 + seat * ROW
        parts.append(text(62, top + 19, f"seat {seat + 1}", "small", "end"))
        for i, (name, busy) in enumerate(row):
            x = 72 + i * CELL
            parts.append(rect(x, top, CELL - 2, ROW - 6, "lit" if busy else "done" if name else "absent"))
            if busy:
                parts.append(text(x + CELL / 2 - 1, top + 19, name, "mono"))
    parts.append(text(72, y + 14 + 2 * ROW + 16, verdict, "small", "start"))
    return parts


def draw() -> str:
    static, iteration = by_request(), by_iteration()
    work = sum(LENGTHS.values())

    def verdict(rows) -> str:
        return f"{len(rows[0])} passes, {work} of {2 * len(rows[0])} seats at work"

    title = (
        "Requests A to E with 2, 6, 1, 4 and 3 tokens on two seats. By request: A's seat is held for four passes until "
        f"B ends, {len(static[0])} passes in all. By iteration: C takes A's seat at once, {len(iteration[0])} passes"
    )
    parts = [
        *panel(28, "by request: nobody joins until all have ended", static, verdict(static)),
        *panel(158, "by iteration: whoever waits takes a seat before the next pass", iteration, verdict(iteration)),
        rect(16, 278, 20, 24, "lit"), text(44, 295, "at work", "small", "start"),
        rect(116, 278, 20, 24, "done"), text(144, 295, "ended, seat held", "small", "start"),
        rect(264, 278, 20, 24, "absent"), text(292, 295, "free, nobody waits", "small", "start"),
    ]  # fmt: skip
    return svg(520, 318, title, parts)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
