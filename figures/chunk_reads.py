"""Draws figures/chunk_reads.svg: which keys each of four chunks reads, and which of them for the second time."""

from pathlib import Path

from minillm.course.drawing import rect, svg, text

CHUNKS, SIDE = 4, 46
LEFT, TOP = 150, 66


def draw() -> str:
    parts = [text(LEFT + CHUNKS * SIDE / 2, 26, "keys and values, by the chunk that wrote them", "small")]
    for i in range(CHUNKS):
        parts.append(text(LEFT + (i + 0.5) * SIDE, TOP - 12, str(i + 1), "mono"))
        parts.append(text(LEFT - 12, TOP + (i + 0.5) * SIDE + 5, f"pass {i + 1}, chunk {i + 1}", "small", "end"))
        for j in range(CHUNKS):
            kind = "lit" if i == j else "done" if j < i else "absent"
            parts.append(rect(LEFT + j * SIDE, TOP + i * SIDE, SIDE - 3, SIDE - 3, kind))
        parts.append(text(LEFT + CHUNKS * SIDE + 14, TOP + (i + 0.5) * SIDE + 5, f"{i} again", "small", "start"))
    again = CHUNKS * (CHUNKS - 1) // 2
    x = LEFT + CHUNKS * SIDE + 110
    legend = (
        ("lit", "the chunk's own rows"),
        ("done", f"read again: {again} = {CHUNKS}·{CHUNKS - 1}/2 chunks"),
        ("absent", "later, not seen"),
    )
    for i, (kind, words) in enumerate(legend):
        parts.append(rect(x, TOP + 20 + i * 40, 22, 22, kind))
        parts.append(text(x + 32, TOP + 36 + i * 40, words, "small", "start"))
    title = (
        f"A prompt in {CHUNKS} chunks. Each reads its own keys and those of all chunks before it: {again} blocks below "
        "the diagonal are read again, which one pass over the whole prompt reads once"
    )
    return svg(700, 270, title, parts)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
