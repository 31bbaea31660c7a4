"""Draws figures/order_and_hits.svg: six prompts of three subjects, served as they came and depth first, one kept."""

from pathlib import Path

from minillm.course.drawing import rect, svg, text

ARRIVED = ["A1", "B1", "C1", "A2", "B2", "C2"]
SHARED, OWN, HEIGHT, STEP = 78, 26, 26, 40


def row(y: float, order: list[str], title: str) -> tuple[list[str], int]:
    """The prompts in a line each: examples and question; examples that the one before had too are found."""
    parts, computed = [text(20, y, title, "strong", "start")], 0
    for i, prompt in enumerate(order):
        x, top = 20 + (SHARED + OWN + 14) * i, y + 14
        found = i > 0 and order[i - 1][0] == prompt[0]
        computed += OWN + (0 if found else SHARED)
        parts += [
            rect(x, top, SHARED, HEIGHT, "done" if found else "lit"),
            text(x + SHARED / 2, top + 18, f"examples {prompt[0]}" if not found else "found"),
            rect(x + SHARED, top, OWN, HEIGHT, "warn"),
            text(x + SHARED + OWN / 2, top + 18, prompt[1], "mono"),
        ]
    return parts, computed


def draw() -> str:
    came, a = row(30, ARRIVED, "as they came: the cache has just let go of what comes next")
    sorted_, b = row(120, sorted(ARRIVED), "depth first: what begins alike comes together")
    whole = len(ARRIVED) * (SHARED + OWN)
    title = (
        "Six prompts, two of each of three subjects, in a cache that holds one. As they came all examples are computed "
        f"each time; depth first half of them are found: hit rate 0 and {1 - b / whole:.1%}"
    )
    assert a == whole
    parts = [
        *came,
        *sorted_,
        text(
            20,
            200,
            "blue: examples, computed · hatched: examples, found · orange: the question's own",
            "small",
            "start",
        ),
    ]
    return svg(740, 220, title, parts)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
