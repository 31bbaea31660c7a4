"""The grader on a toy lab: what a learner may do to a notebook, and what nbval alone would not survive."""

import random
import re

import pytest
from nbformat.v4 import new_code_cell

from minillm.course import grader
from minillm.course.grader import run_nbval
from tests.notebooks.toy_lab import NAMES, cell_of, check, checks_of, grade, learner, solution, solved


@pytest.fixture
def lab():
    return solution()


def test_solved_unsolved_and_in_between(lab):
    assert grade(solved(lab), lab)[1] == 5
    unsolved, points = grade(learner(lab), lab)
    assert points == 0 and unsolved["9.2"] == ("todo", 0, "Exercise 9.2: return 2")
    mixed, points = grade(
        learner(lab, {"9.1": "def one():\n    return 1.0", "9.2": "def two():\n    return 1 / 0"}), lab
    )
    assert mixed["9.1"] == ("FAIL", 1, "one() must be whole"), "plain and edges are scored apart"
    assert mixed["9.2"] == ("error", 0, "ZeroDivisionError: division by zero, at `return 1 / 0`")
    assert points == 1


# -- whatever was done to the checks is dropped ------------------------------------------------------------------------


def edited(notebook):
    for cell in checks_of(notebook):
        cell.source = cell.source.replace("assert", "print")


def deleted(notebook):
    notebook.cells = [cell for cell in notebook.cells if cell not in checks_of(notebook)]


def emptied(notebook):
    for cell in checks_of(notebook):
        cell.source = ""


def copied(notebook):
    for cell in checks_of(notebook):
        notebook.cells.append(new_code_cell(cell.source, id=f"{cell.id}-copy", metadata=cell.metadata))


def untagged(notebook):
    for cell in notebook.cells:
        cell.metadata = {}


def skipped_by_a_tag(notebook):
    for cell in notebook.cells:
        cell.metadata["tags"] = ["nbval-skip", "raises-exception"]


def made_to_check_nothing(notebook):
    for cell in checks_of(notebook):
        cell.source = "# NBVAL_IGNORE_OUTPUT\n# NBVAL_RAISES_EXCEPTION\n" + cell.source


def with_new_ids(notebook):
    for i, cell in enumerate(notebook.cells):
        cell.id = f"n{i}"


def with_new_ids_and_edited(notebook):
    with_new_ids(notebook)
    edited(notebook)


def with_new_first_lines_and_ids(notebook):
    with_new_ids(notebook)
    for cell in checks_of(notebook):
        cell.source = "print('mine')\n" + cell.source


def shuffled_checks(notebook):
    places = [i for i, cell in enumerate(notebook.cells) if cell in checks_of(notebook)]
    cells = [notebook.cells[i] for i in places]
    random.Random(1).shuffle(cells)
    for i, cell in zip(places, cells, strict=True):
        notebook.cells[i] = cell


def above_everything(notebook):
    checks = checks_of(notebook)
    notebook.cells = checks + [cell for cell in notebook.cells if cell not in checks]


def turned_into_text(notebook):
    for cell in checks_of(notebook):
        cell.cell_type = "markdown"
        del cell["outputs"], cell["execution_count"]


MEDDLING = [
    edited,
    deleted,
    emptied,
    copied,
    untagged,
    skipped_by_a_tag,
    made_to_check_nothing,
    with_new_ids,
    with_new_ids_and_edited,
    with_new_first_lines_and_ids,
    shuffled_checks,
    above_everything,
    turned_into_text,
]


@pytest.mark.parametrize("meddle", MEDDLING, ids=lambda f: f.__name__)
def test_meddling_with_checks_changes_no_grade(lab, meddle):
    right, wrong = solved(lab), learner(lab, {f"9.{i}": f"def {NAMES[i - 1]}():\n    return 7" for i in (1, 2, 3)})
    meddle(right)
    meddle(wrong)
    assert grade(right, lab)[1] == 5
    states, points = grade(wrong, lab)
    # 7 is a whole number: the second check of 9.1 is passed, with its two points.
    assert points == 2 and [state for state, *_ in states.values()] == ["FAIL"] * 3


def test_every_check_is_run_once_and_pristine(lab):
    notebook = solved(lab)
    for meddle in (copied, edited, with_new_ids):
        meddle(notebook)
    cells = grader.overlay(notebook, lab)
    assert [cell for cell in cells if grader.is_check(cell)] == checks_of(lab)
    assert all(not cell.outputs and not cell.execution_count for cell in cells if not grader.is_check(cell))


def test_saved_outputs_are_no_reference(lab):
    """A check that compares what is printed: the learner's notebook holds the learner's own output for it."""
    cell_of(lab, "test2-value").source = "# test 9.2 value\n# NBVAL_CHECK_OUTPUT\nprint(f'9.{two()} value ok')"
    notebook = learner(lab, {"9.2": "def two():\n    return 3"})
    cell_of(notebook, "test2-value").outputs = [{"output_type": "stream", "name": "stdout", "text": "9.3 value ok\n"}]
    cell_of(notebook, "test2-value").execution_count = 1
    states, _ = grade(notebook, lab)
    assert states["9.2"] == ("FAIL", 0, "the check did not print the line '9.2 value ok'")


def test_helper_cells_and_prints_of_ones_own_do_no_harm(lab):
    notebook = solved(lab)
    notebook.cells.insert(2, new_code_cell("def helper():\n    print('here')\n    return 2", id="mine"))
    cell_of(notebook, "ex2").source = "def two():\n    print('debugging')\n    return helper()"
    assert grade(notebook, lab)[1] == 5


def test_a_lost_helper_says_restart_and_run_all(lab):
    states, _ = grade(learner(lab, {"9.2": "def two():\n    return helper()"}), lab)
    assert states["9.2"][0] == "error" and "`helper` is not defined" in states["9.2"][2]
    assert "restart and run all" in states["9.2"][2]


def test_what_failed_further_up_is_named(lab):
    states, _ = grade(learner(lab, {"9.2": "def two(:\n    return 2", "9.3": "three = four"}), lab)
    assert states["9.2"][0] == "error" and states["9.2"][2].endswith("line 1 of the cell")
    assert "`four` is not defined" in states["9.3"][2]
    notebook = learner(lab, {"9.2": "def two():\n    return table[2]"})
    notebook.cells.insert(2, new_code_cell("table = [0, 1, 2][5]", id="mine"))
    message = grade(notebook, lab)[0]["9.2"][2]
    assert "`table` is not defined" in message and "A cell above failed: IndexError" in message


def test_no_check_is_an_error_not_a_grade(lab):
    with pytest.raises(RuntimeError, match="no check ran"):
        grade(solved(lab), lab, run=lambda notebook, folder: iter(()))
    del lab.cells[2:]
    with pytest.raises(RuntimeError, match="no check ran"):
        grade(lab, lab)


def test_a_check_that_did_not_run_gives_nothing(lab):
    def all_but_one(notebook, folder):
        yield from [(c.id, grader.Outcome(printed="".join(o.text for o in c.outputs))) for c in notebook.cells][:-1]

    states, points = grade(solved(lab), lab, run=all_but_one)
    assert points == 4 and states["9.3"] == ("error", 0, "the check did not run")


def test_what_is_no_notebook_is_refused(tmp_path):
    for text in ("", "{}", "[1]", '{"nbformat": 4, "cells": 3}'):
        (tmp_path / "lab09_x.ipynb").write_text(text)
        with pytest.raises(ValueError, match="is not a readable notebook"):
            grader.read(tmp_path / "lab09_x.ipynb")


# -- forbidden names ---------------------------------------------------------------------------------------------------

FORBID = ["math.gamma", "statistics", "softmax"]
USES = {
    "called": "import math\ndef two():\n    return math.gamma(3)",
    "under another name": "import math as m\ndef two():\n    return m.gamma(3)",
    "imported": "from math import gamma\ndef two():\n    return gamma(3)",
    "imported under another name": "def two():\n    from math import gamma as g\n    return g(3)",
    "imported as the answer": "from math import gamma as two",
    "all imported": "from math import *\ndef two():\n    return 2",
    "handed on": "import math\nf = math.gamma\ndef two():\n    return f(3)",
    "module handed on": "import math\nm = math\ng = m.gamma\ntwo = lambda: g(3)",
    "module": "import statistics\ndef two():\n    return 2",
    "from a module": "from statistics import mean\ndef two():\n    return mean([2])",
    "any attribute": "def two():\n    return object().softmax()",
    "under a magic": "%time\nimport math\ndef two():\n    return math.gamma(3)",
}
HARMLESS = {
    "another of the module": "import math\ndef two():\n    return math.floor(2.5)",
    "a word": "def two():\n    'math.gamma'\n    return 2",
    "one's own of that name": "def softmax():\n    return 2\ndef two():\n    return softmax()",
}


@pytest.mark.parametrize("case", USES)
def test_forbidden_use_costs_the_exercise(case):
    lab = solution(forbid=FORBID)
    states, points = grade(learner(lab, {"9.2": USES[case], "9.3": "def three():\n    return 3"}), lab)
    assert points == 1 and states["9.2"][:2] == ("FAIL", 0) and states["9.2"][2].startswith("uses ")


@pytest.mark.parametrize("case", HARMLESS)
def test_what_is_not_forbidden(case):
    lab = solution(forbid=FORBID)
    assert grade(learner(lab, {"9.2": HARMLESS[case]}), lab)[0]["9.2"] == ("ok", 1, "")


def test_forbidden_use_is_followed_into_helper_cells_but_not_into_others():
    lab = solution(forbid=FORBID)
    helpers = ["from math import gamma, floor", "def h(x):\n    return gamma(x)", "scratch = gamma(4)"]
    for answer, state in {"h(3)": "FAIL", "floor(2.5)": "ok", "scratch // 3": "FAIL"}.items():
        notebook = learner(lab, {"9.2": f"def two():\n    return {answer}"})
        notebook.cells[2:2] = [new_code_cell(source, id=f"h{i}") for i, source in enumerate(helpers)]
        assert grade(notebook, lab)[0]["9.2"][0] == state, answer


def test_names_that_the_lab_itself_imports_are_known():
    lab = solution(forbid=FORBID)
    cell_of(lab, "imports").source = "import math as m\nfrom statistics import mean\nfive = m.gamma(3)"
    for answer, state in {"m.gamma(3)": "FAIL", "mean([2])": "FAIL", "m.floor(2.5)": "ok", "five": "ok"}.items():
        notebook = learner(lab, {"9.2": f"def two():\n    return {answer}"})
        assert grade(notebook, lab)[0]["9.2"][0] == state, answer


# -- nbval -------------------------------------------------------------------------------------------------------------


def test_both_runners_agree(tmp_path):
    lab = solution(6)
    answers = {
        "9.1": "def one():\n    print('debugging')\n    return 1",
        "9.2": "def two():\n    return 3",
        "9.3": "def three():\n    import json\n    return json.loads('{')",
        "9.4": "def four(:",
        "9.5": "def five():\n    return helper()",
    }
    notebook = learner(lab, answers)
    notebook.cells.insert(2, new_code_cell("import sys\nprint('a warning', file=sys.stderr)\n1 / 0", id="mine"))
    cell_of(lab, "test1-kind").source += "\nimport sys\nprint('a warning', file=sys.stderr)"
    warm = grade(notebook, lab)
    assert [state for state, *_ in warm[0].values()] == ["ok", "FAIL", "error", "error", "error", "todo"]
    assert grade(notebook, lab, tmp_path, run_nbval) == warm


def test_endless_loops_and_dead_kernels_cost_their_exercise_only(tmp_path, monkeypatch):
    monkeypatch.setattr(grader, "CELL_SECONDS", 1.5)
    lab = solution(6)
    # A check of the lab's own may hang on what the learner gives it.
    lab.cells.append(check(6, "while six() == 6: pass", 1, "loop"))
    answers = {
        "9.1": "def one():\n    while True: pass",
        "9.2": "import os\ndef two():\n    os._exit(1)",
        "9.3": (
            "def three():\n    while True:\n        try:\n            print('no end')\n"
            "        except BaseException:\n            pass"
        ),
        "9.4": "def four():\n    return number + 1\nwhile True: pass",
        "9.5": "from helper import five  # a module beside the notebook",
        "9.6": "def six():\n    return 6",
    }
    (tmp_path / "helper.py").write_text("def five():\n    return 5\n")
    notebook = learner(lab, answers)
    notebook.cells.insert(2, new_code_cell("number = 3", id="mine"))
    states, points = grade(notebook, lab, tmp_path, run_nbval)
    states = {i: (*rest, re.sub(r"after \d+ s", "after 2 s", says)) for i, (*rest, says) in states.items()}
    loop = "still running after 2 s, so it was stopped: an endless loop? Or the machine is busy: then grade again."
    assert states["9.1"] == ("error", 0, loop), "and its second check was not waited for"
    assert states["9.2"] == ("error", 0, "the kernel died (out of memory, or a crash in compiled code)")
    assert states["9.3"] == ("error", 0, loop)
    assert states["9.4"] == ("ok", 1, ""), "the new kernel has what the old one had"
    assert states["9.5"] == ("ok", 1, ""), "the kernel runs in the notebook's folder"
    assert states["9.6"] == ("error", 1, loop) and points == 3


def test_a_busy_machine_is_no_endless_loop(monkeypatch):
    """A cell that gets half a processor may take twice as long; one that sleeps is stopped all the same."""
    from queue import Empty

    from minillm.course import grader_plugin

    def seconds_waited(share: float, ends: float) -> float:
        """A kernel that gets this share of a processor and replies after so many seconds."""
        now = [0.0]

        class Kernel(grader_plugin.WatchedKernel):
            def __init__(self):
                pass

            def is_alive(self):
                return True

            def processor_seconds(self):
                return 100 + share * now[0]

            def get_message(self, stream, timeout=None):
                now[0] += timeout
                if now[0] < ends:
                    raise Empty
                return {"parent_header": {"msg_id": "m"}, "content": {"status": "ok"}}

        monkeypatch.setattr(grader_plugin.time, "monotonic", lambda: now[0])
        try:
            Kernel().await_reply("m", timeout=12)
        except Empty:
            return now[0]
        return -now[0]

    assert seconds_waited(share=1.0, ends=11) == -11 and 12 < seconds_waited(share=1.0, ends=99) < 13
    assert seconds_waited(share=0.5, ends=23) == -23 and 24 < seconds_waited(share=0.5, ends=99) < 25
    assert 24 < seconds_waited(share=0.0, ends=99) < 25, "asleep, or on a machine that grants nothing"
    assert 12 < seconds_waited(share=4.0, ends=99) < 13, "four threads use four seconds in one"


def test_the_kernel_has_one_thread_unless_the_user_says_otherwise(tmp_path, monkeypatch):
    lab = solution()
    notebook = learner(lab, {"9.1": "import os\ndef one():\n    return int(os.environ['OMP_NUM_THREADS'])"})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert grade(notebook, lab, tmp_path, run_nbval)[0]["9.1"][0] == "ok"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert grade(notebook, lab, tmp_path, run_nbval)[0]["9.1"][0] == "FAIL"


def test_a_lab_that_cannot_be_run_says_so(tmp_path, lab):
    with pytest.raises(RuntimeError, match="could not be run"):
        grade(solved(lab), lab, tmp_path / "nowhere", run_nbval)
