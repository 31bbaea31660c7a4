"""The course's words, ``chapters/glossary.json``, and a check that none is used before its chapter.

    [{"term": "KV slot", "zh": "KV 槽位", "chapter": 0, "sentence": "One sentence.", "also": ["other form"]}, …]

Sorted by chapter, then term. ``also`` lists other forms by which the term is known in a text; plurals are found anyway.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from minillm.course.progress import course_root


class GlossaryError(ValueError):
    """A glossary that does not hold what it must. The message names file, term and field."""


@dataclass(frozen=True)
class Term:
    term: str
    zh: str
    chapter: int
    sentence: str
    also: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[int, str]:
        return self.chapter, self.term.casefold()

    def found_in(self, text: str) -> bool:
        """Whether plain text has the term as a word of its own, in the plural too."""
        return any(_pattern(form).search(text) for form in (self.term, *self.also))


def _pattern(form: str) -> re.Pattern:
    words = r"[\s-]+".join(re.escape(word) for word in re.split(r"[\s-]+", form))
    # What is written with capitals is a name: "Grid" at the start of a sentence is grid, "sram" is not SRAM.
    flags = re.IGNORECASE if form == form.lower() else 0
    return re.compile(rf"(?<!\w){words}(?:s|es)?(?!\w)", flags)


@dataclass(frozen=True)
class EarlyUse:
    """A term in a cell of a chapter before its own; ``waived`` is the reason if metadata give one."""

    cell: str
    term: str
    introduced: int
    waived: str = ""

    def __str__(self) -> str:
        said = f"cell {self.cell}: “{self.term}” belongs to chapter {self.introduced:02d}"
        return f"{said} (waived: {self.waived})" if self.waived else said


def load_glossary(path: Path | None = None) -> list[Term]:
    """All terms, checked. GlossaryError names what is wrong."""
    path = path or course_root() / "chapters" / "glossary.json"
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GlossaryError(f"{path}: is not readable JSON ({error})") from None
    if not isinstance(items, list):
        raise GlossaryError(f"{path}: holds a {type(items).__name__}; it must be a list of terms")
    terms = [_term(item, f"{path}: term {place}") for place, item in enumerate(items, 1)]

    seen: dict[str, str] = {}
    for term in terms:
        for form in (term.term, *term.also):
            if form.casefold() in seen:
                raise GlossaryError(
                    f"{path}: term {term.term!r}: {form!r} is there already, for {seen[form.casefold()]!r}"
                )
            seen[form.casefold()] = term.term
    for before, term in pairwise(terms):
        if before.order > term.order:
            raise GlossaryError(f"{path}: term {term.term!r}: stands after {before.term!r}; sort by chapter, then term")
    return terms


def _term(item, source: str) -> Term:
    def fail(field: str, what: str):
        raise GlossaryError(f"{source}: {field} {what}")

    if not isinstance(item, dict):
        raise GlossaryError(f"{source}: is {item!r}; it must be an object")
    if isinstance(item.get("term"), str):
        source = f"{source.rpartition(' ')[0]} {item['term']!r}"
    for field in item:
        if field not in ("term", "zh", "chapter", "sentence", "also"):
            fail(field, "is unknown; fields are term, zh, chapter, sentence, also")
    for field in ("term", "zh", "sentence"):
        value = item.get(field)
        if not isinstance(value, str) or not value or value != value.strip():
            fail(field, f"is {value!r}; it must be a text with nothing empty round it")
    chapter = item.get("chapter")
    if isinstance(chapter, bool) or not isinstance(chapter, int) or not 0 <= chapter <= 15:
        fail("chapter", f"is {chapter!r}; it must be a chapter, 0 to 15")
    if not is_one_sentence(item["sentence"]):
        fail("sentence", f"is {item['sentence']!r}; it must be one sentence with a full stop")
    also = item.get("also", [])
    if not isinstance(also, list) or any(not isinstance(form, str) or not form.strip() for form in also):
        fail("also", f"is {also!r}; it must be a list of other forms")
    return Term(item["term"], item["zh"], chapter, item["sentence"], tuple(also))


def is_one_sentence(text: str) -> bool:
    """It begins with a capital, a digit or a formula, ends with the only full stop, and is no list of clauses."""
    return text.endswith(".") and not re.search(r"[.!?;]\s", text) and not text[0].islower()


# -- the check of notebooks -------------------------------------------------------------------------------------------


def prose(markdown: str) -> str:
    """Markdown without what is no prose: code, formulas, link targets, HTML tags and comments."""
    markdown = re.sub(r"^(```|~~~).*?^\1\s*$", " ", markdown, flags=re.DOTALL | re.MULTILINE)
    markdown = re.sub(r"`[^`]*`", " ", markdown)
    markdown = re.sub(r"\$\$.*?\$\$|\$[^$\n]+\$", " ", markdown, flags=re.DOTALL)
    markdown = re.sub(r"<!--.*?-->|<[^>\n]+>", " ", markdown, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)|https?://\S+", "] ", markdown)


def early_terms(text: str, chapter: int, glossary: list[Term]) -> list[Term]:
    """Terms that a piece of Markdown uses although a later chapter introduces them."""
    text = prose(text)
    return [term for term in glossary if term.chapter > chapter and term.found_in(text)]


def early_uses(notebook, chapter: int, glossary: list[Term]) -> list[EarlyUse]:
    """The same for all Markdown cells of a notebook (as nbformat reads it).

    A cell may waive the rule, as a notebook may (course/lint.py): metadata {"minillm": {"waive": {"terms": "why"}}}.
    """
    whole = _waiver(notebook)
    return [
        EarlyUse(cell["id"], term.term, term.chapter, _waiver(cell) or whole)
        for cell in notebook["cells"]
        if cell["cell_type"] == "markdown"
        for term in early_terms(cell["source"], chapter, glossary)
    ]


def _waiver(node) -> str:
    return node["metadata"].get("minillm", {}).get("waive", {}).get("terms", "")
