"""The course's words: each told once, and no chapter uses one that a later chapter introduces."""

import json
import re
from pathlib import Path

import nbformat
import pytest

from minillm.course.glossary import GlossaryError, Term, early_terms, early_uses, load_glossary, prose

CHAPTERS = Path(__file__).parents[2] / "chapters"
NOTEBOOKS = sorted(CHAPTERS.glob("[0-9][0-9]_*.ipynb")) + sorted(CHAPTERS.glob("frontier/[0-9][0-9]_*.ipynb"))


def test_the_stored_glossary_holds():
    glossary = load_glossary()  # unique, sorted, chapters 0 to 15, one sentence each: checked there
    assert {term.chapter for term in glossary} >= {0, 1}
    for term in glossary:
        assert re.search(r"[\u4e00-\u9fff]", term.zh), f"{term.term}: {term.zh} has no Chinese"
        assert len(term.sentence) < 160, f"{term.term}: too long to be read in passing"


def test_sentences_use_no_word_of_a_later_chapter():
    glossary = load_glossary()
    for term in glossary:
        early = early_terms(term.sentence, term.chapter, glossary)
        assert not early, f"{term.term} is explained by {[other.term for other in early]}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_chapter_uses_a_term_before_the_chapter_that_introduces_it(path):
    uses = early_uses(nbformat.read(path, as_version=4), int(path.name[:2]), load_glossary())
    for use in uses:
        print(use)
    assert not [str(use) for use in uses if not use.waived]


# -- the loader -------------------------------------------------------------------------------------------------------

GOOD = [
    {"term": "batch", "zh": "批", "chapter": 0, "sentence": "Requests in one pass."},
    {"term": "SRAM", "zh": "片上存储", "chapter": 0, "sentence": "Memory on the chip.", "also": ["on-chip memory"]},
    {"term": "grid", "zh": "网格", "chapter": 1, "sentence": "All programs of a launch."},
]


def stored(tmp_path, items) -> Path:
    path = tmp_path / "glossary.json"
    path.write_text(json.dumps(items), encoding="utf-8")
    return path


def test_load(tmp_path):
    glossary = load_glossary(stored(tmp_path, GOOD))
    assert glossary[1] == Term("SRAM", "片上存储", 0, "Memory on the chip.", ("on-chip memory",))


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, {"zh": ""}, "term 'batch': zh is ''"),
        (0, {"chapter": 16}, "term 'batch': chapter is 16; it must be a chapter, 0 to 15"),
        (0, {"chapter": "0"}, "term 'batch': chapter is '0'"),
        (0, {"sentence": "One. Two."}, "term 'batch': sentence is 'One. Two.'; it must be one sentence"),
        (0, {"sentence": "No full stop"}, "it must be one sentence"),
        (0, {"sentence": "A thing; another."}, "it must be one sentence"),
        (0, {"chinese": "批"}, "term 'batch': chinese is unknown"),
        (0, {"term": 3}, "term 1: term is 3"),
        (0, {"also": "batches"}, "term 'batch': also is 'batches'; it must be a list"),
        (0, {"chapter": 2}, "term 'SRAM': stands after 'batch'; sort by chapter, then term"),
        (2, {"term": "Batch", "chapter": 1}, "term 'Batch': 'Batch' is there already, for 'batch'"),
        (2, {"also": ["on-chip memory"]}, "term 'grid': 'on-chip memory' is there already, for 'SRAM'"),
    ],
)
def test_a_fault_names_file_term_and_field(tmp_path, place, change, message):
    items = [dict(item) for item in GOOD]
    items[place].update(change)
    with pytest.raises(GlossaryError) as raised:
        load_glossary(stored(tmp_path, items))
    assert message in str(raised.value) and "glossary.json" in str(raised.value)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(GlossaryError, match=r"none\.json: is not readable JSON"):
        load_glossary(tmp_path / "none.json")
    with pytest.raises(GlossaryError, match="holds a dict; it must be a list of terms"):
        load_glossary(stored(tmp_path, {}))


# -- the linter -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A grid of programs.", True),
        ("Grids, and more", True),
        ("gridlock, subgrid, grid_size", False),
        ("a grid-like thing", True),
        ("the `grid` argument", False),
        ("```python\ngrid = 3\n```\nprose", False),
        ("see [this page](grid.md)", False),
        ("see [the grid](page.md)", True),
        ("<svg id='grid'></svg> <!-- grid -->", False),
        ("$grid^2$ and $$\ngrid\n$$", False),
        ("it costs $5, the grid costs", True),
    ],
)
def test_words_are_found_in_prose_only(text, found):
    glossary = [Term("grid", "网格", 1, "All programs.")]
    assert bool(early_terms(text, 0, glossary)) is found, prose(text)
    assert not early_terms(text, 1, glossary), "its own chapter may use it"


def test_names_keep_their_capitals_and_words_may_be_parted_by_a_line_break():
    sram = Term("SRAM", "片上存储", 1, "Memory.", ("on-chip memory",))
    assert sram.found_in("SRAMs") and not sram.found_in("sram") and sram.found_in("On-chip\nmemory")
    softmax = Term("online softmax", "在线 softmax", 1, "Softmax.")
    assert softmax.found_in("Online softmaxes") and softmax.found_in("online\nsoftmax")
    assert softmax.found_in("online-softmax") and not softmax.found_in("softmax, online")
    assert Term("top-p", "核采样", 1, "Sampling.").found_in("top-p = 0.9")


def test_early_uses_name_the_cell_and_a_cell_may_waive_them():
    new = nbformat.v4
    metadata = {"minillm": {"waive": {"terms": "names all papers"}}}
    waived = new.new_markdown_cell("The grid.", id="map", metadata=metadata)
    cells = [new.new_markdown_cell("A grid.", id="intro"), new.new_code_cell("grid = 1", id="code"), waived]
    notebook, glossary = new.new_notebook(cells=cells), [Term("grid", "网格", 1, "All programs.")]
    uses = early_uses(notebook, 0, glossary)
    assert [(use.cell, use.waived) for use in uses] == [("intro", ""), ("map", "names all papers")]
    assert str(uses[0]) == "cell intro: “grid” belongs to chapter 01" and "waived: names all" in str(uses[1])
    notebook.metadata = nbformat.from_dict(metadata)
    assert [use.waived for use in early_uses(notebook, 0, glossary)] == ["names all papers"] * 2
