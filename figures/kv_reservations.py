"""Draws figures/kv_reservations.svg: the same 64 slots, reserved ahead and in blocks."""

from pathlib import Path

from minillm.course.drawing import rect, svg, text

SLOT, LEFT = 12, 40  # pixels of a slot; where memory begins
LONGEST, SPAN, BLOCK = 24, 32, 4  # longest request allowed; what the buddy allocator makes of it; a block
REQUESTS = {"A": (9, 14), "B": (5, 8)}  # tokens so far, rows at the end


def run(start: int, count: int, kind: str, y: int) -> str:
    return rect(LEFT + start * SLOT, y, count * SLOT, 34, kind) if count else ""


def draw() -> str:
    parts = [text(LEFT, 34, "Reserved ahead: 24 slots wanted, 32 given by a buddy allocator", "strong", "start")]
    y = 52
    for i, (name, (tokens, end)) in enumerate(REQUESTS.items()):
        start = i * SPAN
        pieces = ((tokens, "lit", name), (end, "box", "later"), (LONGEST, "warn", "never"), (SPAN, "absent", "nobody"))
        begin = 0
        for stop, kind, words in pieces:
            parts.append(run(start + begin, stop - begin, kind, y))
            middle = LEFT + (start + (begin + stop) / 2) * SLOT
            parts.append(text(middle, y + 22, words, "mono" if words == name else "small"))
            begin = stop
    parts.append(text(LEFT + 64 * SLOT, 34, "C waits", "strong", "end"))
    y = 172
    parts.append(text(LEFT, y - 18, "In blocks of 4, taken one by one as tokens come", "strong", "start"))
    # block: (whose, tokens in it)
    blocks = {0: ("A", 4), 1: ("B", 4), 2: ("A", 4), 3: ("C", 4), 4: ("B", 1), 5: ("A", 1), 6: ("C", 2)}
    for block in range(64 // BLOCK):
        start = block * BLOCK
        if block in blocks:
            name, tokens = blocks[block]
            parts += [run(start, tokens, "lit", y), run(start + tokens, BLOCK - tokens, "box", y)]
            parts.append(text(LEFT + (start + tokens / 2) * SLOT, y + 22, name, "mono"))
        else:
            parts.append(run(start, BLOCK, "absent", y))
    parts.append(text(LEFT + 64 * SLOT, y - 18, "nine blocks free, for anybody", "strong", "end"))
    y = 240
    keys = (
        ("lit", "holds a token"),
        ("box", "its owner will write it"),
        ("warn", "never: internal fragmentation"),
        ("absent", "held by nobody; above, external fragmentation"),
    )
    for i, (kind, words) in enumerate(keys):
        x, line = LEFT + i % 2 * 320, y + i // 2 * 26
        parts += [rect(x, line, 24, 16, kind), text(x + 32, line + 12, words, "small", "start")]
    title = (
        "64 slots twice. Reserved ahead, requests A and B fill them though they hold 14 tokens; C waits. In blocks of "
        "four, A, B and C take seven blocks and nine are free"
    )
    return svg(850, 306, title, [part for part in parts if part])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
