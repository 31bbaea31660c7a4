"""Draws figures/scoreboard.svg: the counters of every chapter's engine, from figures/data/scoreboard.json."""

import json
from pathlib import Path

from minillm.course.drawing import rect, svg, text

COLUMNS = {
    "forward_passes": ("forward passes", "{:,}"),
    "tokens_computed": ("tokens computed", "{:,}"),
    "kv_slots_reserved": ("KV slots reserved", "{:,}"),
    "modelled_hbm_bytes": ("modelled HBM traffic", "{:.2f} GB"),
}
LEFT, WIDTH, GAP, BAR, ROW = 100, 150, 24, 18, 28


def draw() -> str:
    data = json.loads((Path(__file__).parent / "data" / "scoreboard.json").read_text(encoding="utf-8"))
    rows = [row for row in data["rows"] if isinstance(row["chapter"], int)]
    parts = [text(20, 60 + ROW * i + 14, f"chapter {row['chapter']}", "word", "start") for i, row in enumerate(rows)]
    for column, (name, (title, form)) in enumerate(COLUMNS.items()):
        x, most = LEFT + (WIDTH + GAP) * column, max(row[name] for row in rows)
        parts.append(text(x, 36, title, "strong", "start"))
        for i, row in enumerate(rows):
            y, length = 60 + ROW * i, WIDTH * row[name] / most
            better = i > 0 and row[name] < rows[i - 1][name]
            parts.append(rect(x, y, length, BAR, "lit" if better else "box"))
            number = form.format(row[name] / 1e9 if "bytes" in name else row[name])
            inside = length > WIDTH / 2
            parts.append(text(x + 6 if inside else x + length + 6, y + 13, number, "word", "start"))
    first, last = rows[0], rows[-1]
    title = (
        f"The scoreboard's counters by chapter: from {first['chapter']} to {last['chapter']} forward passes fall "
        f"from {first['forward_passes']} to {last['forward_passes']} and tokens computed from "
        f"{first['tokens_computed']:,} to {last['tokens_computed']:,}. Blue: less than the chapter before"
    )
    height = 60 + ROW * len(rows) + 34
    parts.append(text(20, height - 16, "blue, thick edge: less than the chapter before", "small", "start"))
    return svg(LEFT + (WIDTH + GAP) * len(COLUMNS), height, title, parts)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
