"""The checklist that every chapter is held to, as far as a program can hold it: ``complaints(path)``.

A limit may be waived in the notebook's metadata, {"minillm": {"waive": {"words": "why"}}}; waivers are printed, not
hidden. Chapter 00, the primer and Frontier notebooks keep the rules for cells and outputs only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nbformat

from minillm.core.chapters import PACKAGE

TAGS = {
    "setup", "guess", "wrong", "package", "widget", "static-fallback", "triton", "slow", "gpu-optional", "quiz",
    "exercise", "test", "nbval-check-output", "nbval-skip", "nbval-ignore-output", "nbval-raises-exception",
    "raises-exception", "skip-execution",
}  # fmt: skip
OPENING = ["At a glance", "The problem in numbers"]
CLOSING = ["In the engine", "Paper and here", "Test yourself", "What this leaves open"]
MAX_BYTES = 400_000


def complaints(path: Path) -> tuple[list[str], list[str]]:
    """(what is wrong, what was waived and why) in a notebook, each a sentence that starts with its rule's name."""
    notebook = nbformat.read(path, as_version=4)
    waived = notebook.metadata.get("minillm", {}).get("waive", {})
    found = list(_cell_rules(notebook, path))
    if is_chapter(path):
        found += _chapter_rules(notebook)
    wrong = [f"{rule}: {text}" for rule, text in found if rule not in waived]
    return wrong, [f"{rule} waived: {why}" for rule, why in waived.items()]


def is_chapter(path: Path) -> bool:
    """Whether all rules apply: chapters 01 to 15, which lie directly in chapters/."""
    return path.parent.name == "chapters" and re.match(r"(0[1-9]|1[0-5])_", path.name) is not None


def words(text: str) -> int:
    """Words of prose: tables and formulas count as what they show, addresses and markup do not."""
    text = re.sub(r"```.*?```|\]\([^)]*\)|<[^>]+>", " ", text, flags=re.DOTALL)
    return len(re.findall(r"\w[\w'’.,-]*", text))


def _tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


def _tagged(notebook, tag: str) -> list:
    return [cell for cell in notebook.cells if tag in _tags(cell)]


def _output_lines(cell) -> int:
    lines = 0
    for output in cell.get("outputs", []):
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        lines += len(text.splitlines()) if "text/html" not in output.get("data", {}) else 1
    return lines


def _cell_rules(notebook, path: Path) -> Iterator[tuple[str, str]]:
    since_code = 0
    for cell in notebook.cells:
        unknown = set(_tags(cell)) - TAGS
        if unknown:
            yield "tags", f"cell {cell.id} has {', '.join(sorted(unknown))}, which is none of the list"
        if cell.cell_type == "markdown":
            since_code += words(cell.source)
            if since_code > 200:
                yield "prose", f"{since_code} words without a code cell up to {cell.id}; 200 at most"
            continue
        since_code = 0
        lines = cell.source.splitlines()
        if len(lines) > 25:
            yield "cell length", f"cell {cell.id} has {len(lines)} lines; 25 at most"
        if any(len(line) > 88 for line in lines):
            yield "line length", f"cell {cell.id} has a line of {max(map(len, lines))} characters; 88 at most"
        if _output_lines(cell) > 30:
            yield "outputs", f"cell {cell.id} prints {_output_lines(cell)} lines; 30 at most"
        if "nbval-check-output" in _tags(cell) and not (cell.execution_count and cell.outputs):
            yield "checks", f"cell {cell.id} is checked but has no stored output, so nbval would pass it unseen"
        if any(output.output_type == "error" for output in cell.outputs):
            yield "errors", f"cell {cell.id} stores an error"
    if "widgets" in notebook.metadata:
        yield "metadata", "the notebook stores widget state"
    if path.stat().st_size > MAX_BYTES:
        yield "size", f"the file has {path.stat().st_size:,} bytes; {MAX_BYTES:,} at most"
    yield from _fallbacks(notebook)


def _fallbacks(notebook) -> Iterator[tuple[str, str]]:
    code = [(i, cell) for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    for (_, cell), following in zip(code, [*code[1:], None], strict=True):
        if "widget" in _tags(cell) and (following is None or "static-fallback" not in _tags(following[1])):
            yield "fallback", f"widget cell {cell.id} has no static-fallback as its next code cell"


def _chapter_rules(notebook) -> Iterator[tuple[str, str]]:
    cells, code = notebook.cells, [cell for cell in notebook.cells if cell.cell_type == "code"]
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    yield from _range("cells", len(cells), 45, 80)
    yield from _range("words", words(prose), 1800, 3000)
    yield from _range("code lines", _code_lines(code), 0, 250)
    yield from _range("guesses", len(_tagged(notebook, "guess")), 3, 99)
    yield from _range("wrong cells", len(_tagged(notebook, "wrong")), 1, 99)
    yield from _range("widgets", len(_tagged(notebook, "widget")), 1, 99)
    headings = re.findall(r"^(#{1,2}) (.+)$", re.sub(r"```.*?```", "", prose, flags=re.DOTALL), re.MULTILINE)
    if sum(level == "#" for level, _ in headings) != 1:
        yield "headings", "there must be one H1"
    sections = [title.strip() for level, title in headings if level == "##"]
    if sections[:2] != OPENING or sections[-4:] != CLOSING:
        yield "headings", f"H2 must open with {OPENING} and close with {CLOSING}; they are {sections}"
    yield from _range("sections", len(sections) - len(OPENING) - len(CLOSING), 3, 6)
    if not any(cell.get("outputs") for cell in cells[:5]):
        yield "first output", "none of the first five cells has an output"
    yield from _package_rules(notebook)


def _code_lines(cells: list) -> int:
    """Lines that say something, outside package cells: those have a limit of their own."""
    lines = [line for cell in cells if "package" not in _tags(cell) for line in cell.source.splitlines()]
    return sum(bool(line.strip()) for line in lines)


def _range(rule: str, value: int, low: int, high: int) -> Iterator[tuple[str, str]]:
    if not low <= value <= high:
        yield rule, f"{value}; from {low} to {high}" if high < 99 or value > high else f"{value}; at least {low}"


# -- package cells ----------------------------------------------------------------------------------------------------


def _package_rules(notebook) -> Iterator[tuple[str, str]]:
    cells = _tagged(notebook, "package")
    yield from _range("package cells", len(cells), 2, 6)
    yield from _range("package lines", sum(len(cell.source.splitlines()) for cell in cells), 0, 120)
    ours = _definitions_of_package()
    for cell in cells:
        for node in ast.parse(cell.source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and _bare(node) not in ours.get(node.name, []):
                place = "differs from the package's" if node.name in ours else "is nowhere in the package"
                yield "package twins", f"{node.name} in cell {cell.id} {place}"


@cache
def _definitions_of_package() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.setdefault(node.name, []).append(_bare(node))
    return found


def _bare(node: ast.AST) -> str:
    """The tree without docstrings, annotations and imports: what must be equal."""
    node = ast.parse(ast.unparse(node)).body[0]
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef):
            part.returns = None
            for argument in [*part.args.posonlyargs, *part.args.args, *part.args.kwonlyargs]:
                argument.annotation = None
        body = getattr(part, "body", None)
        if isinstance(body, list):
            part.body = [s for s in body if not isinstance(s, ast.Import | ast.ImportFrom)]
            if isinstance(part, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(part) is not None:
                part.body = part.body[1:]
    return ast.dump(node)
