"""Grades a learner's notebook: the checks as they were handed out, run by nbval in a fresh kernel.

A saved notebook is never its own reference, since its outputs are the learner's. So every check cell, source and
stored output, is taken from ``solutions/`` and laid over a temporary copy; whatever was done to the checks (edited,
deleted, copied, re-tagged) is dropped with them. ``grader_plugin`` watches the kernel there and reports each cell.

This protects against accidents and against imports of the answer, not against someone who sets out to fool it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from minillm.course.forbidden import bound_names, forbidden_use, parse

# A cell may run so long, of the clock's time and of its kernel's own processor time. Where others keep the machine
# busy the second lags behind, so twice as long by the clock ends it in any case: with nbval's 5 s for an interrupt an
# endless loop is told within 30 s.
CELL_SECONDS = 12
# The lab's own first cells, unchanged, import torch; a cold disk takes its time.
SETUP_SECONDS = 60
STARTUP_SECONDS = 90
# torch's threads wait for each other by spinning: on a busy machine that takes minutes for what one does in a second.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
CHECK_OUTPUT = re.compile(r"^\s*#+\s*NBVAL_CHECK_OUTPUT\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What came of running one cell: its error if it raised one (``at`` is the line in a cell), what it printed,
    or the sentence that says why it was stopped."""

    ename: str = ""
    evalue: str = ""
    at: str = ""
    printed: str = ""
    stopped: str = ""

    @property
    def sentence(self) -> str:
        """The error in a line, or an empty string."""
        if self.stopped or not self.ename:
            return self.stopped
        if self.ename == "NameError" and (name := re.match(r"name '(\w+)' is not defined", self.evalue)):
            return (
                f"`{name[1]}` is not defined when the cells run from the top in a fresh kernel: restart and run all. "
                "It was defined by a cell that is gone, changed or further down."
            )
        said = f"{self.ename}: {self.evalue}" if self.evalue else self.ename
        return said + (f", at `{self.at}`" if self.at else "")


@dataclass(frozen=True)
class ExerciseResult:
    """``state`` is ok, FAIL (an answer that is wrong), todo, or error (no answer came); ``message`` says why."""

    id: str
    state: str
    points: int
    max: int
    message: str = ""


@dataclass(frozen=True)
class Grade:
    lab: str
    exercises: tuple[ExerciseResult, ...]

    @property
    def points(self) -> int:
        return sum(exercise.points for exercise in self.exercises)

    @property
    def max(self) -> int:
        return sum(exercise.max for exercise in self.exercises)

    def to_dict(self) -> dict:
        exercises = [asdict(exercise) for exercise in self.exercises]
        return {"lab": self.lab, "points": self.points, "max": self.max, "exercises": exercises}


def grade_notebook(
    learner: NotebookNode,
    solution: NotebookNode,
    folder: Path,
    each: Callable[[ExerciseResult], None] = lambda result: None,
    run: Callable[[NotebookNode, Path], Iterator[tuple[str, Outcome]]] | None = None,
) -> Grade:
    """Grade ``learner`` against the checks of ``solution``, with ``folder`` as the kernel's working directory.

    ``each`` hears of an exercise as soon as its last check has run. ``run`` yields the outcome of each cell of a
    notebook by id; nbval in a process of its own if not given. RuntimeError if no check ran at all.
    """
    cells = overlay(learner, solution)
    checks = [cell for cell in cells if is_check(cell)]
    ids = list(dict.fromkeys(exercise_id(cell) for cell in checks))
    outcomes: dict[str, Outcome] = {}
    results: dict[str, ExerciseResult] = {}

    def judge(final: bool = False) -> None:
        for i in ids:
            own = [cell for cell in checks if exercise_id(cell) == i]
            if i not in results and (final or all(cell.id in outcomes for cell in own)):
                results[i] = _judge(i, own, cells, outcomes, solution)
                each(results[i])

    notebook = nbformat.v4.new_notebook(cells=cells)
    for cell_id, outcome in (run or run_nbval)(notebook, folder):
        outcomes[cell_id] = outcome
        judge()
    if not any(cell.id in outcomes for cell in checks):
        raise RuntimeError("no check ran, so there is nothing to grade")
    judge(final=True)
    return Grade(ids[0].split(".")[0].zfill(2), tuple(results[i] for i in ids))


# -- cells ------------------------------------------------------------------------------------------------------------


def read(path: Path) -> NotebookNode:
    """A notebook in the current format; ValueError if the file is none."""
    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:  # whatever nbformat comes upon in a file that may be anything
        why = (str(error) or type(error).__name__).partition("\n")[0]
        raise ValueError(f"{path} is not a readable notebook ({why})") from None


def is_check(cell: NotebookNode) -> bool:
    return "test" in cell.metadata.get("tags", [])


def is_exercise(cell: NotebookNode) -> bool:
    return "exercise" in cell.metadata.get("tags", [])


def exercise_id(cell: NotebookNode) -> str | None:
    return cell.metadata.get("minillm", {}).get("exercise")


def overlay(learner: NotebookNode, solution: NotebookNode) -> list[NotebookNode]:
    """The code cells to run: the learner's in their order, blank, with the pristine checks in place of theirs.

    A cell of the lab is found again by id, then by first line, then by order. A check stands where the learner left
    it, at least below its exercise, or after the check before it.
    """
    theirs = [cell for cell in learner.cells if cell.source.strip()]
    place = _match([cell for cell in solution.cells if cell.cell_type == "code"], theirs)
    checks = [cell for cell in solution.cells if is_check(cell)]
    replaced = {place[check.id] for check in checks if check.id in place}
    lines = {_first_line(check) for check in checks}

    copies: list[NotebookNode | None] = []
    for i, cell in enumerate(theirs):
        looks_like_a_check = is_check(cell) or _first_line(cell) in lines
        keep = cell.cell_type == "code" and i not in replaced and not looks_like_a_check
        copies.append(_blank(cell, f"learner-{i}") if keep else None)
    for cell in solution.cells:
        if cell.cell_type == "code" and cell.id in place and (copy := copies[place[cell.id]]):
            if is_exercise(cell):
                copy.metadata = {"tags": ["exercise"], "minillm": {"exercise": exercise_id(cell)}}
            elif "setup" in cell.metadata.get("tags", []) and copy.source == cell.source:
                copy.metadata = {"seconds": SETUP_SECONDS}

    after: dict[int, list[NotebookNode]] = {}
    last = -1
    for check in checks:
        exercise = [c for c in solution.cells if is_exercise(c) and exercise_id(c) == exercise_id(check)]
        last = max([last, *(place[cell.id] for cell in [check, *exercise] if cell.id in place)])
        after.setdefault(last, []).append(nbformat.from_dict(check))
    ordered = list(after.get(-1, []))
    for i, copy in enumerate(copies):
        ordered += ([copy] if copy else []) + after.get(i, [])
    return ordered


def _match(pristine: list[NotebookNode], theirs: list[NotebookNode]) -> dict[str, int]:
    """Where each cell of the lab is in the learner's notebook, by its id; lost ones are left out."""
    place: dict[str, int] = {}

    def match(same: Callable[[NotebookNode, NotebookNode], bool]) -> None:
        for cell in pristine:
            free = (i for i, other in enumerate(theirs) if i not in place.values() and same(cell, other))
            if cell.id not in place and (i := next(free, None)) is not None:
                place[cell.id] = i

    match(lambda cell, other: cell.id == other.get("id"))
    match(lambda cell, other: _first_line(cell) == _first_line(other))
    match(lambda cell, other: is_check(cell) and is_check(other))
    match(lambda cell, other: is_exercise(cell) and is_exercise(other))
    return place


def _first_line(cell: NotebookNode) -> str:
    return cell.source.strip().partition("\n")[0].strip()


def _blank(cell: NotebookNode, cell_id: str) -> NotebookNode:
    """Source alone: saved outputs, tags and marks that nbval would obey are the learner's, not the lab's."""
    return nbformat.v4.new_code_cell(cell.source, id=cell_id)


# -- verdicts ---------------------------------------------------------------------------------------------------------


def _judge(
    exercise: str,
    checks: list[NotebookNode],
    cells: list[NotebookNode],
    outcomes: dict[str, Outcome],
    solution: NotebookNode,
) -> ExerciseResult:
    worth = [check.metadata["minillm"]["points"] for check in checks]
    if used := _forbidden(exercise, cells, solution):
        sentence = f"uses {used}, which is not allowed in this exercise, so it gets no points: write it yourself"
        return ExerciseResult(exercise, "FAIL", 0, sum(worth), sentence)
    verdicts = [verdict(check, cells, outcomes) for check in checks]
    points = sum(p for p, (state, _) in zip(worth, verdicts, strict=True) if state == "ok")
    lost = [verdict for verdict in verdicts if verdict[0] != "ok"]
    message = "\n".join(dict.fromkeys(message for _, message in lost))
    return ExerciseResult(exercise, lost[0][0] if lost else "ok", points, sum(worth), message)


def verdict(check: NotebookNode, cells: list[NotebookNode], outcomes: dict[str, Outcome]) -> tuple[str, str]:
    """State and message of one check, from what came of it and of the cells above it."""
    outcome = outcomes.get(check.id)
    if outcome is None:
        return "error", "the check did not run"
    if not outcome.sentence:
        missing = missing_line(check, outcome.printed)
        return ("ok", "") if missing is None else ("FAIL", f"the check did not print the line {missing!r}")
    if outcome.ename == "NameError":  # what failed further up explains it
        above = cells[: [cell.id for cell in cells].index(check.id)]
        failed = [cell for cell in above if not is_check(cell) and cell.id in outcomes and outcomes[cell.id].sentence]
        own = [cell for cell in failed if exercise_id(cell) == exercise_id(check)]
        if own:
            outcome = outcomes[own[-1].id]
        elif failed:
            return "error", f"{outcome.sentence}\nA cell above failed: {outcomes[failed[-1].id].sentence}"
    if outcome.ename == "NotImplementedError" and outcome.evalue.startswith("Exercise "):
        return "todo", outcome.evalue
    if outcome.ename in ("CheckFailed", "AssertionError"):
        return "FAIL", outcome.evalue or f"the check fails at `{outcome.at}`"
    return "error", outcome.sentence


def missing_line(check: NotebookNode, printed: str) -> str | None:
    """The first stored line that a check was to print and did not; lines of the answer's own may stand between."""
    if not CHECK_OUTPUT.search(check.source):
        return None
    stored = "".join(o.text for o in check.outputs if o.output_type == "stream" and o.name == "stdout")
    lines = iter(printed.splitlines())
    return next((line for line in stored.splitlines() if line not in lines), None)


def _forbidden(exercise: str, cells: list[NotebookNode], solution: NotebookNode) -> str | None:
    (pristine,) = [cell for cell in solution.cells if is_exercise(cell) and exercise_id(cell) == exercise]
    forbid = pristine.metadata["minillm"].get("forbid", [])
    names = {name for statement in parse(pristine.source) for name in bound_names(statement)}
    given = [cell.source for cell in solution.cells if cell.cell_type == "code" and not is_exercise(cell)]
    own = [cell for cell in cells if not is_check(cell) and cell.source not in given]
    cell = next((cell.source for cell in own if exercise_id(cell) == exercise), "")
    return forbidden_use(forbid, cell, names, [c.source for c in own if c.source != cell], given)


# -- nbval ------------------------------------------------------------------------------------------------------------


def run_nbval(notebook: NotebookNode, folder: Path) -> Iterator[tuple[str, Outcome]]:
    """Run a notebook's cells by nbval in a process of its own; yields each cell's id and outcome as they come."""
    for cell in notebook.cells:
        cell.metadata.setdefault("seconds", CELL_SECONDS)
    with tempfile.TemporaryDirectory(prefix="minillm-grade-", ignore_cleanup_errors=True) as temp:
        path, ini, events, log = (Path(temp) / name for name in ("lab.ipynb", "pytest.ini", "events", "log"))
        nbformat.write(notebook, path)
        ini.write_text("[pytest]\n")
        events.touch()
        # Only what is needed is loaded: no other plugin, no conftest, no ini file from a folder further up.
        command = [sys.executable, "-m", "pytest", "--noconftest", "-c", str(ini), "--rootdir", temp, "--color=no"]
        command += ["-p", "no:cacheprovider", "-p", "nbval.plugin", "-p", "minillm.course.grader_plugin"]
        command += ["--nbval-lax", "--nbval-current-env", "--lab-folder", str(folder), "--lab-events", str(events)]
        env = ONE_THREAD | {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        with open(log, "w") as output:
            process = subprocess.Popen(
                [*command, str(path)], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, cwd=temp
            )
        ran = False
        try:
            for event in _follow(events, process):
                ran = True
                yield event.pop("id"), Outcome(**event)
        finally:
            process.kill()  # the kernel goes when its parent does
            process.wait()
        if not ran:
            raise RuntimeError(f"the notebook could not be run:\n{log.read_text()[-2000:]}")


def _follow(events: Path, process: subprocess.Popen) -> Iterator[dict]:
    """Lines of JSON as they are written, until the process ends or has been silent for longer than any cell may be."""
    heard = time.monotonic()
    with open(events) as stream:
        running, text = True, ""
        while running and time.monotonic() - heard < STARTUP_SECONDS + 2 * SETUP_SECONDS:
            running = process.poll() is None
            *lines, text = (text + stream.read()).split("\n")  # the last one may be half written
            for line in lines:
                heard = time.monotonic()
                yield json.loads(line)
            time.sleep(0.05)
