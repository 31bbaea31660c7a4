"""Draws figures/paper_map.svg: the fifteen papers, each arrow a problem that one leaves for another."""

from pathlib import Path

from minillm.course.papers import map_svg


def draw() -> str:
    title = "<title>The fifteen papers as a map: each arrow is a problem that one paper leaves for another</title>"
    return map_svg().replace("<style>", f"{title}<style>", 1) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
