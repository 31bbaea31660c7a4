"""Draws figures/block_tables.svg: two samples of one prompt, their tables, and the blocks these name."""

from pathlib import Path

from minillm.course.drawing import arrow, rect, svg, text

CELL, SIZE = 52, 4  # pixels of a slot; slots of a block
PROMPT = ["It", "was", "a", "dark", "and"]
SEQUENCES = {  # words after the prompt, block table
    "A": (["stormy", "night"], [5, 2]),
    "B": (["cold"], [5, 7]),
}
POOL = range(1, 9)
POOL_X, POOL_Y, POOL_STEP = 640, 60, 44


def draw() -> str:
    parts = [
        text(24, 36, "What a sample sees: rows in order", "strong", "start"),
        text(400, 36, "Block table", "strong"),
        text(POOL_X, 36, "Blocks in memory", "strong", "start"),
    ]
    centre = {block: POOL_Y + i * POOL_STEP + 17 for i, block in enumerate(POOL)}
    rows = {}
    for number, (name, (more, table)) in enumerate(SEQUENCES.items()):
        words, top = PROMPT + more, 92 + number * 170
        parts.append(text(24, top - 12, f"sample {name}, {len(words)} tokens", "small", "start"))
        for i, block in enumerate(table):
            y = top + i * 46
            for slot in range(SIZE):
                t = i * SIZE + slot
                kind = "absent" if t >= len(words) else "lit" if t < len(PROMPT) else "box"
                parts.append(rect(24 + slot * CELL, y, CELL, 34, kind))
                if t < len(words):
                    parts.append(text(24 + slot * CELL + CELL / 2, y + 22, words[t], "word"))
            parts.append(arrow(f"M{24 + SIZE * CELL + 6},{y + 17} H{368}", "line"))
            parts += [rect(374, y, 52, 34, "box"), text(400, y + 22, str(block), "mono")]
            kind, width = ("heavy", 4) if block == 5 else ("flow", None)
            path = f"M430,{y + 17} C520,{y + 17} 520,{centre[block]} {POOL_X - 36},{centre[block]}"
            parts.append(arrow(path, kind, width))
            for slot in range(SIZE):
                t = i * SIZE + slot
                if t < len(words):
                    rows.setdefault(block, {})[slot] = (words[t], t < len(PROMPT))
    for i, block in enumerate(POOL):
        y = POOL_Y + i * POOL_STEP
        parts.append(text(POOL_X - 18, y + 22, str(block), "mono"))
        for slot in range(SIZE):
            word, of_prompt = rows.get(block, {}).get(slot, ("", False))
            kind = "lit" if of_prompt else "box" if word else "absent"
            parts.append(rect(POOL_X + slot * CELL, y, CELL, 34, kind))
            if word:
                parts.append(text(POOL_X + slot * CELL + CELL / 2, y + 22, word, "word"))
        holders = sum(block in table for _, table in SEQUENCES.values())
        words = f"×{holders}" if holders else "free"
        parts.append(text(POOL_X + SIZE * CELL + 14, y + 22, words, "strong" if holders > 1 else "small", "start"))
    parts.append(text(24, 428, "blue: the prompt · grey: written since · dashed: no token", "small", "start"))
    title = (
        "Samples A and B of one prompt: both tables begin with block 5, which is held twice; then A has block 2 and B "
        "block 7, each with its own copy of the prompt's last token"
    )
    return svg(930, 450, title, parts)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
