"""Draws figures/paper_map.svg: the fifteen papers, each arrow a problem that one leaves for another."""

import re
from pathlib import Path

from minillm.course.papers import map_svg


def draw() -> str:
    title = "<title>The fifteen papers as a map: each arrow is a problem that one paper leaves for another</title>"
    # A file is in no theme, and programs that make PDF of it know no variables.
    drawn = re.sub(r"var\(--jp-[\w-]+, (#\w+)\)", r"\1", map_svg())
    return drawn.replace("<style>", f"{title}<style>", 1) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
