"""Labs as they are committed, the commands round them, and start() and grade() in a notebook."""

import ast
import json
import re
import subprocess
import sys
import types
from collections.abc import Set
from copy import deepcopy
from functools import cache
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from minillm.cli import main
from minillm.course import grader, labs, mine, progress
from minillm.course.checks import load_mistakes
from minillm.course.grader import exercise_id, grade_notebook, is_check, is_exercise, read
from minillm.course.notebooks import clean
from tests.notebooks.toy_lab import learner, solution, solved
from tests.notebooks.warm import run_warm

ROOT = Path(__file__).parents[2]
SOLUTIONS = sorted((ROOT / "solutions").glob("lab*.ipynb"))
MISTAKES = [(path, key) for path in SOLUTIONS for key in load_mistakes(path.name[3:5])]
TAGS = {"setup", "exercise", "test", "triton", "slow", "gpu-optional", "nbval-check-output"}


# -- what is committed -------------------------------------------------------------------------------------------------


def test_labs_are_what_solutions_generate():
    """If this fails: python -m minillm.course.labs"""
    there = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "labs").glob("*.ipynb")}
    assert there == labs.generated() and there
    for text in there.values():
        assert "BEGIN SOLUTION" not in text and '"output_type"' not in text


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_a_solution_keeps_the_rules(path):
    notebook = read(path)
    assert clean(deepcopy(notebook)) == notebook
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "make notebooks"
    assert {tag for cell in notebook.cells for tag in cell.metadata.get("tags", [])} <= TAGS
    assert code[-1].source.endswith("grade()")

    lab = path.name[3:5]
    exercises = [cell for cell in code if is_exercise(cell)]
    ids = [exercise_id(cell) for cell in exercises]
    assert ids == [f"{int(lab)}.{i}" for i in range(1, len(ids) + 1)]
    assert all("has no hint" not in labs.hint(lab, i) for i in ids)
    checks = [cell for cell in code if is_check(cell)]
    assert {exercise_id(cell) for cell in checks} == set(ids)
    assert sum(cell.metadata["minillm"]["points"] for cell in checks) == (1 if lab == "00" else 20)
    assert len({cell.source.partition("\n")[0] for cell in checks}) == len(checks), "a first line marks a check"
    for cell in checks:
        # nbval passes a check cell without a stored output unseen.
        assert grader.CHECK_OUTPUT.search(cell.source) and [o.name for o in cell.outputs] == ["stdout"], cell.id
        reread = {n.value for n in ast.walk(ast.parse(cell.source)) if isinstance(n, ast.Constant)}
        found = [m for text in reread if (m := re.fullmatch(r'chapter (\w+), "(.+)"', str(text)))]
        assert found, f"{cell.id} names no section to reread"
        for match in found:
            (chapter,) = (ROOT / "chapters").glob(f"{match[1]}_*.ipynb")
            text = "\n".join(c.source for c in read(chapter).cells if c.cell_type == "markdown")
            assert re.search(rf"^#+ {re.escape(match[2])}$", text, re.MULTILINE), f"{chapter} has no {match[2]!r}"


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_every_solution_scores_full_points(path):
    grade = grade_notebook(read(path), read(path), path.parent)
    assert grade.points == grade.max > 0, grade
    assert grade.lab == path.name[3:5]


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_every_generated_lab_scores_nothing(path):
    grade = grade_notebook(read(ROOT / "labs" / path.name), read(path), path.parent, run=run_warm)
    assert grade.points == 0 and {exercise.state for exercise in grade.exercises} == {"todo"}, grade
    assert all(e.message.startswith(f"Exercise {e.id}: ") and "\n" not in e.message for e in grade.exercises), grade


# What a wrong version does to the lab is tried on the cells that can tell: those that the exercise's checks use, and
# with them the checks of every exercise that uses this one. The others never see it, which two tests show: the checks
# of an exercise pass among the cells they use, and in whole runs of a lab, every other exercise wrong, each check gives
# what it gives there.


@cache
def lab_of(path: Path):
    """A solution, read once: nobody here may change it."""
    return read(path)


@cache
def needed(lab: Path, exercise: str) -> frozenset[str]:
    """Ids of the cells that an exercise's checks use, themselves and the setup cells included."""
    code = [cell for cell in lab_of(lab).cells if cell.cell_type == "code"]
    checks = [cell for cell in code if is_check(cell) and exercise_id(cell) == exercise]
    names = {n.id for cell in checks for n in ast.walk(ast.parse(cell.source)) if isinstance(n, ast.Name)}
    setup = {cell.source for cell in code if "setup" in cell.metadata.get("tags", [])}
    used = mine.used_cells([cell for cell in code if not is_check(cell)], names, setup)
    return frozenset(cell.id for cell in [*used, *checks])


@cache
def exercises(lab: Path) -> list[str]:
    return [exercise_id(cell) for cell in lab_of(lab).cells if is_exercise(cell)]


@cache
def affected(lab: Path, exercise: str) -> list[str]:
    """The exercise itself and those whose checks use what it asks for."""
    (own,) = [cell.id for cell in lab_of(lab).cells if is_exercise(cell) and exercise_id(cell) == exercise]
    return [other for other in exercises(lab) if own in needed(lab, other)]


def verdicts(lab: Path, wrong: dict[str, str], only: Set[str] | None = None) -> dict[tuple[str, str], tuple[str, str]]:
    """(exercise, check) -> state and message, in the solution with some wrong versions, exercise -> name."""
    mistakes, kept = load_mistakes(lab.name[3:5]), [c for c in lab_of(lab).cells if only is None or c.id in only]
    reference = nbformat.v4.new_notebook(cells=kept)
    notebook = deepcopy(reference)
    for cell in notebook.cells:
        if is_exercise(cell) and (key := wrong.get(exercise_id(cell))):
            name = mistakes[key].name
            cell.source = (
                "from minillm.course.checks import load_mistakes\n"
                f"{name} = load_mistakes({lab.name[3:5]!r})[{key!r}].version\n"
                f"{name}.__name__ = {name!r}"
            )
    cells = grader.overlay(notebook, reference)
    outcomes = dict(run_warm(nbformat.v4.new_notebook(cells=cells), lab.parent))
    return {
        (exercise_id(cell), cell.metadata["minillm"]["check"]): grader.verdict(cell, cells, outcomes)
        for cell in cells
        if is_check(cell)
    }


@pytest.mark.parametrize(
    ("path", "exercise"),
    [(path, i) for path in SOLUTIONS for i in exercises(path)],
    ids=lambda v: getattr(v, "stem", v),
)
def test_an_exercise_is_checked_by_the_cells_it_uses(path, exercise):
    passed = verdicts(path, {}, needed(path, exercise))
    assert {i for i, _ in passed} == {exercise} and {state for state, _ in passed.values()} == {"ok"}, passed


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_a_wrong_version_is_seen_by_no_check_that_does_not_use_it(path, first):
    """Right and wrong exercises in turn, then the other way round: each gives in the whole lab what it gives alone."""
    mistakes = {m.exercise: key for key, m in load_mistakes(path.name[3:5]).items()}
    wrong = {i: mistakes[i] for i in exercises(path)[first::2] if i in mistakes}
    together = verdicts(path, wrong)
    for exercise in exercises(path):
        own = verdicts(path, wrong, needed(path, exercise))
        assert own == {check: verdict for check, verdict in together.items() if check[0] == exercise}
        if not set(wrong) & {i for i in exercises(path) if exercise in affected(path, i)}:
            assert {state for state, _ in own.values()} == {"ok"}


@pytest.mark.parametrize(("path", "key"), MISTAKES, ids=lambda value: getattr(value, "stem", value))
def test_every_wrong_version_loses_its_check_and_is_named(path, key):
    mistake = load_mistakes(path.name[3:5])[key]
    uses_it = affected(path, mistake.exercise)
    found = verdicts(path, {mistake.exercise: key}, frozenset().union(*(needed(path, i) for i in uses_it)))
    state, message = found[mistake.exercise, mistake.check]
    assert state == "FAIL" and mistake.says in message and "Reread: chapter" in message
    elsewhere = {check: verdict for check, verdict in found.items() if check[0] != mistake.exercise}
    assert all(state == "ok" for state, _ in elsewhere.values()), elsewhere


def test_there_are_wrong_versions():
    assert {path for path, _ in MISTAKES} == set(SOLUTIONS)


# -- the generator -----------------------------------------------------------------------------------------------------


def test_a_stub_stands_at_the_indent_of_its_marker_and_names_the_exercise():
    lab = labs.generate(solution(2))
    assert lab.cells[2].source == 'def one():\n    raise NotImplementedError("Exercise 9.1: return 1")'
    assert [cell.id for cell in lab.cells] == [cell.id for cell in solution(2).cells]
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in lab.cells)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("### BEGIN SOLUTION\nx = 1", "END SOLUTION is missing"),
        ("x = 1\n### END SOLUTION", "END SOLUTION out of place"),
        ("### BEGIN SOLUTION\n### BEGIN SOLUTION\n### END SOLUTION", "BEGIN SOLUTION out of place"),
        ("x = 1", "BEGIN SOLUTION is missing"),
    ],
)
def test_markers_astray_are_refused(source, message):
    notebook = solution(2)
    notebook.cells[2].source = source
    with pytest.raises(ValueError, match=f"cell ex1.*{message}"):
        labs.generate(notebook)


def test_a_solution_outside_an_exercise_is_refused():
    notebook = solution(2)
    notebook.cells[0].source = "### BEGIN SOLUTION\n42\n### END SOLUTION"
    with pytest.raises(ValueError, match="not the tag 'exercise'"):
        labs.generate(notebook)


# -- the commands ------------------------------------------------------------------------------------------------------


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A course whose only lab is the toy one, graded in this process."""
    for name in ("solutions", "labs"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(labs, name.upper(), tmp_path / name)
    monkeypatch.setattr(labs, "WORK", tmp_path / "work")
    monkeypatch.setattr(grader, "run_nbval", run_warm)
    source = solution()
    source.cells[2:2] = [
        nbformat.v4.new_markdown_cell("Count.\n<details><summary>Hint</summary>\n\nOne.\n\n</details>")
    ]
    nbformat.write(source, tmp_path / "solutions" / "lab09_toy.ipynb")
    labs.main()
    return tmp_path


def run(capsys, *args) -> tuple[int, str, str]:
    status = main(["lab", *args])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_start_copies_once_and_reset_keeps_the_old(toy, capsys):
    copy = toy / "work" / "lab09_toy.ipynb"
    assert run(capsys, "start", "9") == (0, f"{copy}\n", "")
    assert copy.read_bytes() == (toy / "labs" / copy.name).read_bytes()
    copy.write_text("mine")
    status, _, error = run(capsys, "start", "09")
    assert status == 1 and "left alone; --force" in error and copy.read_text() == "mine"
    assert run(capsys, "start", "09", "--force")[0] == 0 and copy.read_text() != "mine"
    assert copy.with_suffix(".old.ipynb").read_text() == "mine"
    copy.write_text("mine again")
    assert run(capsys, "reset", "09")[0] == 0 and copy.with_suffix(".old.ipynb").read_text() == "mine again"


def test_grade_prints_exercises_and_total_and_is_0_only_at_full_points(toy, capsys):
    status, _, error = run(capsys, "grade", "09")
    assert status == 1 and "minillm lab start 09" in error
    run(capsys, "start", "09")
    source = read(toy / "solutions" / "lab09_toy.ipynb")
    nbformat.write(learner(source, {"9.1": "def one():\n    return 2"}), toy / "work" / "lab09_toy.ipynb")
    status, out, _ = run(capsys, "grade", "09")
    expected = (
        "9.1   FAIL  2/3\n      one() must be 1\n9.2   todo  0/1\n      Exercise 9.2: return 2\n"
        "9.3   todo  0/1\n      Exercise 9.3: return 3\ntotal 2/5\n"
    )
    assert (status, out) == (1, expected)
    assert run(capsys, "progress") == (
        0,
        "lab09_toy                        2/5          still open: 9.1, 9.2, 9.3\n",
        "",
    )

    nbformat.write(solved(source), toy / "work" / "lab09_toy.ipynb")
    status, out, _ = run(capsys, "grade", "09", "--json")
    exercises = [
        {"id": f"9.{i}", "state": "ok", "points": p, "max": p, "message": ""} for i, p in ((1, 3), (2, 1), (3, 1))
    ]
    assert status == 0 and json.loads(out) == {"lab": "09", "points": 5, "max": 5, "exercises": exercises}
    stored = json.loads((toy / "work" / "progress.json").read_text())["labs"]["09"]
    assert stored == {"points": 5, "max": 5, "exercises": {"9.1": "ok", "9.2": "ok", "9.3": "ok"}}


def test_another_file_is_graded_without_a_note(toy, capsys):
    elsewhere = toy / "renamed.ipynb"
    nbformat.write(solved(read(toy / "solutions" / "lab09_toy.ipynb")), elsewhere)
    status, out, _ = run(capsys, "grade", "09", str(elsewhere))
    assert status == 0 and out.endswith("Not kept: points and parts are stored only for the copy in work/.\n")
    assert run(capsys, "progress")[1].split() == ["lab09_toy", "not", "started"]


def test_hint_and_solution(toy, capsys):
    assert run(capsys, "hint", "09", "1") == (0, "One.\n", "")
    assert run(capsys, "hint", "09", "9.2") == (0, "This exercise has no hint.\n", "")
    assert run(capsys, "solution", "9", "2") == (0, "def two():\n    return 2\n", "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["start", "7"], "there is no lab 7; there are 09"),
        (["start", "x"], "there is no lab x"),
        (["hint", "9", "8"], "lab 09 has no exercise 8; it has 9.1, 9.2, 9.3"),
    ],
)
def test_errors_are_one_line(toy, capsys, args, message):
    status, out, error = run(capsys, *args)
    assert status == 1 and message in error and error.count("\n") == 1 and not out


@pytest.mark.parametrize("args", [["start", "00"], ["grade", "00"], ["hint", "00", "1"], ["progress"]])
def test_without_a_clone_it_says_so(tmp_path, monkeypatch, capsys, args):
    monkeypatch.setattr(progress, "ROOT", tmp_path)
    status, _, error = run(capsys, *args)
    assert status == 1 and "clone" in error and error.count("\n") == 1


# -- in a notebook -----------------------------------------------------------------------------------------------------


@pytest.fixture
def front_end(monkeypatch, toy):
    """What start() and grade() see of the notebook they run in, and what they show there."""

    class FrontEnd:
        shown: list = []  # noqa: RUF012
        user_ns: dict = {}  # noqa: RUF012
        history_manager = types.SimpleNamespace(input_hist_raw=[])

        def display(self, data, **_):
            self.shown.append(data.data)
            return types.SimpleNamespace(update=lambda data: self.shown.append(data.data))

    shell = FrontEnd()
    shell.shown, shell.user_ns, shell.history_manager.input_hist_raw = [], {}, []
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    monkeypatch.setattr("IPython.display.display", shell.display)
    for name in ("JPY_SESSION_NAME", "MINILLM_GRADING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(toy / "labs")
    return shell


@pytest.fixture
def copy(toy):
    """A solved copy in work/."""
    labs.start_lab("09")
    nbformat.write(solved(read(toy / "solutions" / "lab09_toy.ipynb")), toy / "work" / "lab09_toy.ipynb")
    return toy / "work" / "lab09_toy.ipynb"


def test_start_links_the_copy_and_leaves_it_alone(front_end, toy):
    labs.start("09")
    assert '<a href="../work/lab09_toy.ipynb">' in front_end.shown[0]
    (toy / "work" / "lab09_toy.ipynb").write_text("mine")
    labs.start("9")
    assert front_end.shown[1] == front_end.shown[0] and (toy / "work" / "lab09_toy.ipynb").read_text() == "mine"


def test_grade_finds_its_file(front_end, copy, monkeypatch, capsys):
    def graded():
        front_end.shown.clear()
        labs.grade()
        return bool(front_end.shown) and "5 of 5 points" in front_end.shown[-1]

    assert not graded() and 'grade("work/' in capsys.readouterr().out
    monkeypatch.setenv("JPY_SESSION_NAME", "console-1")  # a console has no file
    assert not graded()
    monkeypatch.setenv("JPY_SESSION_NAME", str(copy))
    assert graded()
    monkeypatch.delenv("JPY_SESSION_NAME")
    front_end.user_ns["__vsc_ipynb_file__"] = str(copy)
    assert graded()
    front_end.user_ns.clear()

    live = json.loads(copy.read_text())
    message = types.SimpleNamespace(blocking_request=lambda *_, **__: {"ipynb": live})
    for name, module in {"google": {}, "google.colab": {"_message": message}}.items():
        fake = types.ModuleType(name)
        fake.__dict__.update(module)
        monkeypatch.setitem(sys.modules, name, fake)
    assert graded()

    front_end.shown.clear()
    labs.grade(copy)
    assert "5 of 5" in front_end.shown[-1] and "<td>9.3</td><td><b>ok</b></td>" in front_end.shown[-1]


def test_grade_under_the_grader_does_nothing(front_end, copy, monkeypatch):
    monkeypatch.setenv("MINILLM_GRADING", "1")
    labs.grade(copy)
    assert not front_end.shown


def test_grade_says_save_first(front_end, copy, capsys):
    def graded(*history):
        front_end.shown.clear()
        front_end.history_manager.input_hist_raw = ["", *history]
        labs.grade(copy)
        return bool(front_end.shown)

    saved = next(cell.source for cell in read(copy).cells if cell.id == "ex1")
    assert graded(saved, "one()")
    assert not graded(saved, "def one():\n    return 11", "one()")
    assert "Save first: exercise 9.1" in capsys.readouterr().out
    assert graded("def one():\n    return 11", saved), "the version run last is the one that counts"


def test_what_goes_wrong_is_a_sentence(front_end, toy, capsys):
    (toy / "other.ipynb").write_text(nbformat.writes(nbformat.v4.new_notebook()))
    labs.grade(toy / "other.ipynb")
    labs.grade(toy / "nowhere.ipynb")
    out = capsys.readouterr().out
    assert "other.ipynb is not a lab" in out and "nowhere.ipynb is not a readable notebook" in out


def test_grade_in_a_real_kernel_shows_the_table(tmp_path, monkeypatch):
    path = tmp_path / "mine.ipynb"
    notebook = read(ROOT / "solutions" / "lab00_start_here.ipynb")
    notebook.cells[2].source = notebook.cells[2].source.replace("2 *", "")
    nbformat.write(notebook, path)
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    client = NotebookClient(notebook, timeout=60, allow_errors=True, resources={"metadata": {"path": tmp_path}})
    client.execute()
    (failure,) = notebook.cells[3].outputs
    assert len(failure.traceback) == 1 and "only one vector a head" in failure.traceback[0], "no frame of ours"
    table = notebook.cells[-1].outputs[-1].data["text/html"]
    assert "0 of 1 points" in table and "only one vector a head" in table


def test_the_course_package_is_light():
    code = """
import sys, minillm.course, minillm.course.checks
heavy = {"torch", "numpy", "nbformat", "IPython", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
from minillm.course import grade, start
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
