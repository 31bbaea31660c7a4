"""Labs: generated from ``solutions/``, copied to ``work/``, graded there. Behind ``minillm lab`` and, in a notebook,
``start("06")`` and ``grade()``.

    solutions/lab06_….ipynb   the only hand-edited source, run by ``make notebooks``; its outputs are the reference
    labs/lab06_….ipynb        the same with stubs for solutions and no outputs: ``python -m minillm.course.labs``
    work/lab06_….ipynb        a learner's copy, which git ignores; work/progress.json has the points
    work/mine/06.py           the parts of the engine among the exercises passed (mine.py)
"""

from __future__ import annotations

import ast
import html
import json
import os
import re
import sys
import tempfile
from copy import deepcopy
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from minillm.course import grader
from minillm.course.forbidden import bound_names, parse
from minillm.course.grader import ExerciseResult, Grade, exercise_id, is_exercise, read
from minillm.course.mine import store_parts
from minillm.course.progress import ROOT, course_root, load_progress, update_progress

SOLUTIONS, LABS, WORK = ROOT / "solutions", ROOT / "labs", ROOT / "work"
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"


# -- generation -------------------------------------------------------------------------------------------------------


def generate(solution: NotebookNode) -> NotebookNode:
    """The lab of a solution: each marked region becomes a stub, outputs go. ValueError where a marker is astray."""
    lab = deepcopy(solution)
    for cell in lab.cells:
        if is_exercise(cell) or BEGIN in cell.source or END in cell.source:
            cell.source = _stub(cell)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return lab


def _stub(cell: NotebookNode) -> str:
    if not is_exercise(cell):
        raise ValueError(f"cell {cell.id} has a solution marker but not the tag 'exercise'")
    about = cell.metadata["minillm"]
    text = json.dumps(f"Exercise {about['exercise']}: {about['title']}", ensure_ascii=False)
    kept, inside, regions = [], False, 0
    for line in cell.source.splitlines():
        if line.strip() in (BEGIN, END):
            if (line.strip() == BEGIN) == inside:
                raise ValueError(f"cell {cell.id}: {line.strip()} out of place")
            inside = not inside
            if inside:
                kept.append(line[: line.index(BEGIN)] + f"raise NotImplementedError({text})")
                regions += 1
        elif not inside:
            kept.append(line)
    if inside or not regions:
        raise ValueError(f"cell {cell.id}: {END if inside else BEGIN} is missing")
    return "\n".join(kept)


def generated() -> dict[str, str]:
    """File name and text of every lab, as they must lie in ``labs/``."""
    return {path.name: nbformat.writes(generate(read(path))) + "\n" for path in sorted(SOLUTIONS.glob("lab*.ipynb"))}


def main() -> int:
    """Write ``labs/`` anew."""
    labs = generated()
    LABS.mkdir(exist_ok=True)
    for path in LABS.glob("*.ipynb"):
        if path.name not in labs:
            path.unlink()
    for name, text in labs.items():
        (LABS / name).write_text(text, encoding="utf-8")
    return 0


# -- finding ----------------------------------------------------------------------------------------------------------


def solution_path(lab: str) -> Path:
    """The source of a lab: "6" and "06" are the same. ValueError says which labs there are."""
    course_root()  # says so where there is no clone
    found = list(SOLUTIONS.glob(f"lab{int(lab):02}_*.ipynb")) if lab.isdecimal() else []
    if len(found) != 1:
        there = sorted(path.name[3:5] for path in SOLUTIONS.glob("lab*.ipynb"))
        raise ValueError(f"there is no lab {lab}; there are {', '.join(there)}")
    return found[0]


def lab_of(notebook: NotebookNode, path: Path) -> str:
    """Which lab a notebook is, by its exercises, or where an editor dropped their metadata, by its name."""
    ids = [exercise_id(cell) for cell in notebook.cells if is_exercise(cell) and exercise_id(cell)]
    name = re.match(r"lab(\d\d)", path.name)
    if not ids and not name:
        raise ValueError(f"{path} is not a lab: it has no exercise, and its name does not begin with labNN")
    return ids[0].split(".")[0] if ids else name[1]


def _exercise(lab: str, number: str) -> tuple[NotebookNode, int]:
    """A solution and where in it an exercise stands; ``number`` is "2" or "6.2"."""
    solution = read(solution_path(lab))
    there = {exercise_id(cell): i for i, cell in enumerate(solution.cells) if is_exercise(cell)}
    wanted = number if "." in number else f"{int(lab)}.{number}"
    if wanted not in there:
        raise ValueError(f"lab {int(lab):02} has no exercise {number}; it has {', '.join(there)}")
    return solution, there[wanted]


# -- what the commands do ---------------------------------------------------------------------------------------------


def start_lab(lab: str, force: bool = False) -> Path:
    """Copy a lab to ``work/``. What is there already stays unless ``force``, and then as ``….old.ipynb``."""
    source = LABS / solution_path(lab).name
    copy = WORK / source.name
    if copy.exists():
        if not force:
            raise ValueError(f"{_shown(copy)} is there already and was left alone; --force replaces it")
        copy.replace(copy.with_suffix(".old.ipynb"))
    WORK.mkdir(exist_ok=True)
    copy.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    return copy


def hint(lab: str, number: str) -> str:
    """The hints of an exercise: what its text folds into ``<details>``."""
    solution, at = _exercise(lab, number)
    text = ""
    for cell in reversed(solution.cells[:at]):
        if cell.cell_type == "code":
            break
        text = f"{cell.source}\n{text}"
    found = re.findall(r"<details>(?:\s*<summary>.*?</summary>)?(.*?)</details>", text, re.DOTALL)
    return "\n\n".join(part.strip() for part in found) or "This exercise has no hint."


def solution(lab: str, number: str) -> str:
    """The solution's source of an exercise."""
    solution, at = _exercise(lab, number)
    lines = solution.cells[at].source.splitlines()
    return "\n".join(line for line in lines if line.strip() not in (BEGIN, END))


def grade_file(lab: str | None = None, path: Path | None = None, each=lambda result: None) -> Grade:
    """Grade a notebook, by default the copy of ``lab`` in ``work/``, and note the points if it lies in ``work/``."""
    if path is None:
        path = WORK / solution_path(lab).name
        if not path.exists():
            raise ValueError(f"{_shown(path)} is not there; minillm lab start {lab} puts it there")
    learner = read(path)
    reference = read(solution_path(lab or lab_of(learner, path)))
    grade = grader.grade_notebook(learner, reference, path.resolve().parent, each)
    if WORK in path.resolve().parents:
        states = {result.id: result.state for result in grade.exercises}
        entry = {"points": grade.points, "max": grade.max, "exercises": states}
        update_progress(lambda progress: progress.setdefault("labs", {}).update({grade.lab: entry}), WORK)
        store_parts(learner, reference, grade, WORK / "mine")
    return grade


def progress() -> list[tuple[str, str, str]]:
    """(lab, points or how far it got, exercises not solved yet) of every lab there is."""
    course_root()
    noted, rows = load_progress(WORK).get("labs", {}), []
    for path in sorted(SOLUTIONS.glob("lab*.ipynb")):
        if entry := noted.get(path.name[3:5]):
            unsolved = [number for number, state in entry["exercises"].items() if state != "ok"]
            rows.append((path.stem, f"{entry['points']}/{entry['max']}", ", ".join(unsolved)))
        else:
            rows.append((path.stem, "started" if (WORK / path.name).exists() else "not started", ""))
    return rows


def _shown(path: Path) -> str:
    return os.path.relpath(path, ROOT) if ROOT in path.parents else str(path)


# -- in a notebook ----------------------------------------------------------------------------------------------------


def start(lab: str) -> None:
    """Put a lab into ``work/`` unless it is there, and show a link to it."""
    from IPython.display import HTML, display

    copy = WORK / solution_path(lab).name
    if not copy.exists():
        start_lab(lab)
    link = html.escape(Path(os.path.relpath(copy, Path.cwd())).as_posix())
    display(HTML(f'Lab {int(lab):02}: <a href="{link}">{_shown(copy)}</a>. Its last cell grades it.'))


def grade(notebook: str | Path | None = None) -> None:
    """Grade this lab, as saved, and show the table. ``notebook``: its path, where it cannot be found out."""
    if os.environ.get("MINILLM_GRADING"):
        return
    from IPython import get_ipython
    from IPython.display import HTML, display

    shell = get_ipython()
    try:
        with tempfile.TemporaryDirectory() as temp:
            path = Path(notebook) if notebook else _this_notebook(shell, Path(temp))
            if changed := _unsaved(read(path), shell.history_manager.input_hist_raw if shell else []):
                print(f"Save first: exercise {', '.join(changed)} was run in another version than the file has.")
                return
            results: list[ExerciseResult] = []
            table = display(HTML("grading …"), display_id=True)

            def each(result: ExerciseResult) -> None:
                results.append(result)
                table.update(HTML(_table(results)))

            graded = grade_file(path=path, each=each)
            table.update(HTML(_table(graded.exercises, f"{graded.points} of {graded.max} points")))
    except (ValueError, RuntimeError) as error:
        print(error)


def _this_notebook(shell, temp: Path) -> Path:
    """The file that the running kernel belongs to, by what each front end tells its kernels."""
    told = (shell.user_ns.get("__vsc_ipynb_file__") if shell else None) or os.environ.get("JPY_SESSION_NAME", "")
    if str(told).endswith(".ipynb") and Path(told).exists():
        return Path(told)
    if "google.colab" in sys.modules:  # Colab hands out the notebook itself, saved or not
        from google.colab import _message

        live = _message.blocking_request("get_ipynb", request="", timeout_sec=30)["ipynb"]
        path = temp / live.get("metadata", {}).get("colab", {}).get("name", "lab.ipynb")
        path.write_text(json.dumps(live), encoding="utf-8")
        return path
    raise ValueError('Which file is this? Save it and say: grade("work/lab….ipynb")')


def _unsaved(saved: NotebookNode, history: list[str]) -> list[str]:
    """Exercises that were last run in a version which the file does not have."""
    sources = {cell.source.strip() for cell in saved.cells}
    changed = []
    for cell in saved.cells:
        names = _defined(cell.source) if is_exercise(cell) else set()
        latest = next((run for run in reversed(history) if names & _defined(run)), None)
        if latest is not None and latest.strip() not in sources:
            changed.append(exercise_id(cell) or "?")
    return changed


def _defined(source: str) -> set[str]:
    statements = [s for s in parse(source) if not isinstance(s, ast.Import | ast.ImportFrom)]
    return {name for statement in statements for name in bound_names(statement)}


def _table(results, total: str = "grading …") -> str:
    rows = "".join(
        f"<tr><td>{r.id}</td><td><b>{r.state}</b></td><td>{r.points}/{r.max}</td>"
        f'<td style="text-align:left;white-space:pre-wrap">{html.escape(r.message)}</td></tr>'
        for r in results
    )
    head = "<tr><th>exercise</th><th></th><th>points</th><th></th></tr>"
    return f"<table>{head}{rows}</table><b>{total}</b>"


if __name__ == "__main__":
    sys.exit(main())
