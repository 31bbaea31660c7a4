"""The package as it grows: ``house(n)`` draws it, ``show(obj)`` prints a piece of it, ``build`` copies it."""

from __future__ import annotations

import inspect
import shutil
from html import escape
from pathlib import Path

from minillm.core.chapters import PACKAGE, files_of, introduced_in
from minillm.core.config import LAST_BUILT

# What a reader of the engine meets; who measures it or teaches it is left out of the picture.
ROOMS = ("core", "kernels", "compute", "parallel", "models", "memory", "scheduling", "engine", "")


class House:
    """The engine's files after a chapter: a table in a notebook, text elsewhere."""

    def __init__(self, chapter: int):
        if isinstance(chapter, bool) or chapter not in range(LAST_BUILT + 1):
            raise ValueError(f"chapter {chapter!r} is not built; built are 0 to {LAST_BUILT}")
        self.chapter = chapter
        self.rooms: dict[str, list[tuple[str, int, bool]]] = {}  # room -> (file, lines, whether this chapter brings it)
        for file in files_of(chapter):
            room = file.partition("/")[0] if "/" in file else ""
            if room in ROOMS and not file.endswith("__init__.py") and file != "cli.py":
                lines = len((PACKAGE / file).read_text(encoding="utf-8").splitlines())
                new = chapter > 0 and introduced_in(file) == chapter
                self.rooms.setdefault(room, []).append((file.removeprefix(f"{room}/"), lines, new))

    @property
    def lines(self) -> int:
        """Lines of all files drawn."""
        return sum(lines for files in self.rooms.values() for _, lines, _ in files)

    def _rows(self):
        for room in ROOMS:
            if room in self.rooms:
                yield f"{room}/" if room else "minillm/", self.rooms[room]

    def __repr__(self) -> str:
        title = f"minillm after chapter {self.chapter:02d}: {self.lines:,} lines"
        rows = [
            f"{room:12} " + ", ".join(f"{'* ' if new else ''}{file} {lines}" for file, lines, new in files)
            for room, files in self._rows()
        ]
        return "\n".join([title, *rows, *(["* new in this chapter"] if self.chapter else [])])

    def _repr_html_(self) -> str:
        rows = []
        for room, files in self._rows():
            cells = []
            for file, lines, new in files:
                label = f"{escape(file)} <small>{lines}</small>"
                cells.append(f"<b>+ {label}</b>" if new else label)
            rows.append(
                f"<tr><td style='text-align:left'><code>{room}</code></td>"
                f"<td style='text-align:left'>{' · '.join(cells)}</td></tr>"
            )
        note = "; + and bold: new in this chapter" if self.chapter else ""
        caption = f"<code>minillm</code> after chapter {self.chapter:02d}: {self.lines:,} lines (lines per file{note})"
        return f"<table><caption>{caption}</caption>{''.join(rows)}</table>"


def house(chapter: int) -> House:
    """The engine as it stands after a chapter: rooms, files, lines, what is new."""
    return House(chapter)


def show(obj) -> None:
    """Print the source of a class or function of the package as installed, with file and line."""
    lines, first = inspect.getsourcelines(obj)
    path = Path(inspect.getsourcefile(obj)).resolve()
    place = path.relative_to(PACKAGE.parent) if path.is_relative_to(PACKAGE.parent) else path
    print(f"# {place.as_posix()}, line {first}")
    print("".join(lines).rstrip())


def build(chapter: int, directory: str | Path) -> Path:
    """Copy the package as it stands after a chapter into ``directory``/minillm. FileExistsError if that is there."""
    House(chapter)  # refuses a chapter that is not built
    target = Path(directory) / "minillm"
    if target.exists():
        raise FileExistsError(f"{target} is there already; name another folder")
    for file in files_of(chapter):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE / file, target / file)
    shutil.copytree(PACKAGE / "assets", target / "assets")
    return target
