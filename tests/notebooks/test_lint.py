"""The checklist: every notebook keeps it, and every rule can be broken."""

from copy import deepcopy
from pathlib import Path

import nbformat
import pytest

from minillm.course.lint import complaints, is_chapter, words

CHAPTERS = sorted(
    path for path in (Path(__file__).parents[2] / "chapters").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts
)
PACKAGE_CELL = """
def finish_state(m, l, acc):
    o = acc / torch.where(l == 0, 1.0, l)[..., None]
    return o, torch.where(l == 0, float("-inf"), m + torch.log(l))
"""
SECTIONS = (
    "At a glance|The problem in numbers|One|Two|Three|In the engine|Paper and here|Test yourself|What this leaves open"
)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_committed_notebooks_keep_the_checklist(path):
    wrong, waived = complaints(path)
    print("\n".join(waived))
    assert not wrong, "\n".join(wrong)


def good_chapter():
    """The least that keeps every rule."""
    cells = [nbformat.v4.new_markdown_cell("# 01 · Title", id="title")]

    def code(name, source, *tags):
        cell = nbformat.v4.new_code_cell(source, id=name, metadata={"tags": list(tags)})
        cell.execution_count = 1
        cell.outputs = [nbformat.v4.new_output("stream", text="1\n")]
        cells.append(cell)

    for i, section in enumerate(SECTIONS.split("|")):
        cells.append(nbformat.v4.new_markdown_cell(f"## {section}\n" + "word " * 190, id=f"section-{i}"))
        code(f"code-{i}", "print(1)", "nbval-check-output")
        cells.append(nbformat.v4.new_markdown_cell("word " * 40, id=f"more-{i}"))
        code(f"more-code-{i}", "print(1)")
    for i in range(3):
        code(f"guess-{i}", "guess = None", "guess")
    code("wrong", "print(1)", "wrong")
    code("widget", "print(1)", "widget")
    code("static", "print(1)", "static-fallback")
    code("package-a", PACKAGE_CELL, "package")
    code("package-b", PACKAGE_CELL, "package")
    return nbformat.v4.new_notebook(cells=cells)


def check(tmp_path, notebook):
    path = tmp_path / "chapters" / "01_title.ipynb"
    path.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, path)
    assert is_chapter(path)
    return complaints(path)


def cell(notebook, name):
    return next(c for c in notebook.cells if c.id == name)


def drop(notebook, *names):
    notebook.cells = [c for c in notebook.cells if c.id not in names]


FAULTS = {
    "tags": lambda n: cell(n, "wrong").metadata.tags.append("important"),
    "prose": lambda n: cell(n, "more-0").update(source="word " * 201),
    "cell length": lambda n: cell(n, "code-0").update(source="x = 1\n" * 26),
    "line length": lambda n: cell(n, "code-0").update(source="x = " + "1" * 90),
    "outputs": lambda n: cell(n, "code-0").outputs[0].update(text="1\n" * 31),
    "checks": lambda n: cell(n, "code-0").update(outputs=[]),
    "errors": lambda n: cell(n, "more-code-0").update(outputs=[nbformat.v4.new_output("error", ename="E", evalue="")]),
    "metadata": lambda n: n.metadata.update(widgets={}),
    "size": lambda n: cell(n, "code-0").outputs[0].update(text="1" * 400_001),
    "fallback": lambda n: cell(n, "static").metadata.update(tags=[]),
    "cells": lambda n: drop(n, *(f"more-code-{i}" for i in range(8))),
    "words": lambda n: [c.update(source=c.source[:200]) for c in n.cells if c.cell_type == "markdown"],
    "code lines": lambda n: [c.update(source="x = 1\n" * 25) for c in n.cells if "code" in c.id],
    "guesses": lambda n: cell(n, "guess-0").metadata.update(tags=[]),
    "wrong cells": lambda n: cell(n, "wrong").metadata.update(tags=[]),
    "widgets": lambda n: cell(n, "widget").metadata.update(tags=[]),
    "headings": lambda n: cell(n, "section-0").update(source="## At first sight"),
    "sections": lambda n: cell(n, "section-3").update(source="text"),
    "first output": lambda n: [c.update(outputs=[]) for c in n.cells[:5] if c.cell_type == "code"],
    "package cells": lambda n: cell(n, "package-b").metadata.update(tags=[]),
    "package lines": lambda n: cell(n, "package-a").update(source=PACKAGE_CELL + "\n" * 120),
    "package twins": lambda n: cell(n, "package-a").update(source=PACKAGE_CELL.replace("1.0", "2.0")),
}


def test_a_good_chapter_passes(tmp_path):
    assert check(tmp_path, good_chapter()) == ([], [])


@pytest.mark.parametrize("rule", FAULTS)
def test_every_rule_can_be_broken_and_waived(tmp_path, rule):
    notebook = good_chapter()
    FAULTS[rule](notebook)
    wrong, _ = check(tmp_path, deepcopy(notebook))
    assert any(text.startswith(f"{rule}: ") for text in wrong), wrong
    notebook.metadata.minillm = {"waive": {rule: "a reason"}}
    left, waived = check(tmp_path, notebook)
    assert f"{rule} waived: a reason" in waived
    assert not any(text.startswith(f"{rule}: ") for text in left)


def test_blank_lines_and_package_cells_are_no_code_lines(tmp_path):
    notebook = good_chapter()  # two package cells, and 24 cells of one line
    for i in range(9):
        cell(notebook, f"code-{i}").source = "x = 1\n" * 23 + "\n\n"
    cell(notebook, "more-code-0").source = "x = 1\n" * 25
    for lines, wrong in ((5, []), (6, ["code lines: 251; from 0 to 250"])):
        cell(notebook, "more-code-1").source = "x = 1\n" * lines
        assert check(tmp_path, notebook)[0] == wrong


def test_package_cells_may_differ_in_docstring_annotation_and_import(tmp_path):
    notebook = good_chapter()
    source = PACKAGE_CELL.replace(
        "(m, l, acc):", '(m: "Tensor", l, acc) -> tuple:\n    "Other words."\n    import torch'
    )
    cell(notebook, "package-a").source = source
    assert check(tmp_path, notebook)[0] == []
    cell(notebook, "package-a").source = "def no_such_function():\n    pass"
    assert check(tmp_path, notebook)[0] == [
        "package twins: no_such_function in cell package-a is nowhere in the package"
    ]


def test_words_leave_out_addresses_markup_and_code():
    assert words("two [words](https://example.org/a/b)") == 2
    assert words("<details>one</details> ```python\nx = 1\n``` two") == 2
