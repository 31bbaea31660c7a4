"""The note to write after each paper: ``minillm note NN`` lays out work/notes/NN.md, with the guide's four headings."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from minillm.course.papers import PAPERS
from minillm.course.progress import work_folder
from minillm.course.quiz import chapter_name

TEMPLATE = """# {paper} · read {day}

## Problem (问题)

<!-- 50 words. How are things done, and what is bad about it? Best with one number: X % wasted, Y times slower. -->

## Method (方法)

<!-- 100 words. The idea in one sentence, the mechanism that matters most in one paragraph, and a sketch. -->

## Check against the code (对账)

<!-- 50 words. Which lines or module of vLLM, and which of minillm? If there is none, say where it would go. -->

## What I learnt (我学到了)

<!-- 100 words, if you like. What went against intuition, what to borrow, whether to go deeper here. -->
"""


def write_note(chapter: str | int, folder: Path | None = None) -> tuple[Path, bool]:
    """The note's path, and whether it is new. A note that is there is left as it is.

    ValueError for an unknown chapter. ``folder``: the work folder, by default the clone's.
    """
    name = chapter_name(chapter)
    path = (folder or work_folder()) / "notes" / f"{name}.md"
    path.parent.mkdir(exist_ok=True)
    paper = PAPERS[int(name)]
    title = " · ".join(part for part in (paper.name, paper.venue) if part)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.format(paper=title, day=date.today().isoformat()))
    except FileExistsError:
        return path, False
    return path, True
