"""Draws figures/stall_free.svg: three requests decode and a prompt of twelve tokens comes, whole and in chunks."""

from pathlib import Path

from minillm.course.drawing import rect, svg, text

PROMPT, BUDGET, TOKEN, ROW = 12, 7, 16, 26
BEFORE, OUTPUT = 2, 8  # passes before the prompt comes; tokens that A, B and C each have


def passes(budget: int) -> list[int]:
    """Prompt tokens of each pass; D decodes once they are done."""
    chunks, left = [0] * BEFORE, PROMPT
    while left:
        chunks.append(min(left, budget - 3))
        left -= chunks[-1]
    return chunks + [0] * (OUTPUT - len(chunks))


def panel(y: float, title: str, chunks: list[int], verdict: str) -> list[str]:
    parts, x = [text(16, y, title, "strong", "start")], 62.0
    done = 0
    for row, name in enumerate("ABCD"):
        parts.append(text(44, y + 30 + row * ROW, name, "mono", "end"))
    for chunk in chunks:
        decoding = 4 if done == PROMPT else 3
        width = (chunk + decoding) * TOKEN
        for row in range(decoding):
            parts.append(rect(x, y + 14 + row * ROW, width - 2, ROW - 5, "lit"))
        if chunk:
            parts.append(rect(x, y + 14 + 3 * ROW, width - 2, ROW - 5, "warn"))
            parts.append(text(x + width / 2 - 1, y + 31 + 3 * ROW, f"{chunk} of D", "small"))
        done += chunk
        x += width
    parts.append(text(62, y + 30 + 4 * ROW, verdict, "small", "start"))
    return parts


def draw() -> str:
    whole, chunked = passes(PROMPT + 3), passes(BUDGET)
    longest = [max(chunks) + 3 for chunks in (whole, chunked)]
    title = (
        f"A, B and C decode, D brings {PROMPT} prompt tokens; a pass is as wide as it has tokens. Whole, one pass has "
        f"{longest[0]} tokens and A, B, C wait that long for their next. In chunks under a budget of {BUDGET} tokens "
        f"no pass has more than {longest[1]}"
    )
    return svg(
        740,
        366,
        title,
        [
            *panel(28, "the prompt in one pass", whole, f"A, B and C wait {longest[0]} units for a token"),
            *panel(190, f"in chunks, {BUDGET} tokens a pass", chunked, f"they never wait more than {longest[1]}"),
            rect(62, 332, 18, 18, "lit"),
            text(90, 346, "decodes: one token at the end of it", "small", "start"),
            rect(330, 332, 18, 18, "warn"),
            text(358, 346, "computes (part of) its prompt; the last part gives a token", "small", "start"),
        ],
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
