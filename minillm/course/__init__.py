"""What turns the package into a course.

house.py       the package as it grows: house(n) draws it, show(obj) prints of it, build copies it
labs.py        labs: generated from solutions/, started, graded; start("06") and grade() in a notebook
grader.py      a learner's notebook with the pristine checks laid over it, run by nbval; grader_plugin.py watches there
forbidden.py   does an exercise use what it asks one to write?
mine.py        your engine: passed exercises that are parts of it, stored in work/mine
checks.py      what check cells are written with: compare, and name the likely mistake
widgets.py     Panel: a pure function with a thin shell of controls and one view
calculators.py       roofline, tile size, KV memory
softmax_stepper.py   online softmax step by step                                              chapter 01
block_table.py       the block table: append, fork, write, free                                 chapter 02
batch_timeline.py    who ran in which pass, who waited, whose seat was held                  chapter 03
radix_tree.py        prompts of words in a tree: ask, run, end, evict                     chapter 05
papers.py            the fifteen papers: table, map, problems that lead from one to the next
quiz.py        chapters/quiz/NN.json: read, checked, shown as a page and as a widget; interview.py asks in a terminal
glossary.py    chapters/glossary.json, and which terms a notebook uses before their chapter
progress.py    work/progress.json, which labs and quizzes share; notes.py lays out work/notes/NN.md
scoreboard.py  a chapter's engine beside the one before, and the stored scoreboard
scratch.py     LiveBytes: how much memory a computation needs at once
triton_cells.py      Triton in a notebook's cells, or a stand-in that says it is not installed
drawing.py     what the scripts in figures/ draw with
lint.py        the checklist that every chapter is held to
notebooks.py   runs chapters in place and stores their outputs
"""

from importlib import import_module

# Looked up when first used: check cells and a running server import this package too.
_PUBLIC = {"start": "minillm.course.labs", "grade": "minillm.course.labs"}
__all__ = list(_PUBLIC)


def __getattr__(name: str):
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
