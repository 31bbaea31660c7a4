"""A small lab with an exercise for everything that can go wrong in one, and a learner who fills it in."""

from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from minillm.course.grader import exercise_id, grade_notebook, is_check, is_exercise
from minillm.course.labs import generate
from tests.notebooks.warm import run_warm

NAMES = ("one", "two", "three", "four", "five", "six")


def solution(exercises: int = 3, forbid=()):
    """``one()`` must return 1, ``two()`` 2, and so on. The first exercise has a second check, worth 2."""
    cells = [
        new_markdown_cell("# Toy", id="title"),
        new_code_cell("import math", id="imports", metadata={"tags": ["setup"]}),
    ]
    for i, name in enumerate(NAMES[:exercises], start=1):
        source = f"def {name}():\n    ### BEGIN SOLUTION\n    return {i}\n    ### END SOLUTION"
        about = {"exercise": f"9.{i}", "title": f"return {i}", "forbid": list(forbid)}
        cells.append(
            new_code_cell(source, id=f"ex{i}", execution_count=1, metadata={"tags": ["exercise"], "minillm": about})
        )
        cells.append(check(i, f"assert {name}() == {i}, '{name}() must be {i}'", 1))
        if i == 1:
            cells.append(check(1, "assert type(one()) is int, 'one() must be whole'", 2, "kind"))
    return new_notebook(cells=cells)


def check(i: int, test: str, points: int, name: str = "value"):
    return new_code_cell(
        f"# test 9.{i} {name}\n# NBVAL_CHECK_OUTPUT\n{test}\nprint('9.{i} {name} ok')",
        id=f"test{i}-{name}",
        execution_count=1,
        outputs=[new_output("stream", name="stdout", text=f"9.{i} {name} ok\n")],
        metadata={"tags": ["test"], "minillm": {"exercise": f"9.{i}", "check": name, "points": points}},
    )


def learner(source, answers: dict[str, str] | None = None):
    """The generated lab, with some exercise cells ("9.2") rewritten; the others stay stubs."""
    notebook = generate(source)
    for cell in notebook.cells:
        if is_exercise(cell):
            cell.source = (answers or {}).get(exercise_id(cell), cell.source)
    return notebook


def solved(source):
    """The lab, rightly solved."""
    return learner(source, {exercise_id(cell): cell.source for cell in source.cells if is_exercise(cell)})


def grade(notebook, source, folder=".", run=run_warm):
    """exercise -> (state, points, message), and the sum."""
    result = grade_notebook(notebook, source, folder, run=run)
    return {e.id: (e.state, e.points, e.message) for e in result.exercises}, result.points


def cell_of(notebook, cell_id: str):
    return next(cell for cell in notebook.cells if cell.id == cell_id)


def checks_of(notebook):
    return [cell for cell in notebook.cells if is_check(cell)]
