"""Your engine: passed exercises become parts, and the engine runs on them."""

import importlib
import json
from pathlib import Path

import nbformat
import pytest

from minillm import LLM, EngineConfig, SamplingParams
from minillm.bench import scoreboard as bench
from minillm.cli import main
from minillm.core import parts
from minillm.core.config import LAST_BUILT
from minillm.core.workloads import Fixed, Uniform, random_workload
from minillm.course import mine
from minillm.course.grader import ExerciseResult, Grade, exercise_id, is_exercise, read
from minillm.models.fetch import resolve
from minillm.models.tokenizer import Tokenizer
from tests.notebooks.toy_lab import cell_of, learner, solution, solved

ROOT = Path(__file__).parents[2]
SOLUTIONS = {int(path.name[3:5]): read(path) for path in sorted((ROOT / "solutions").glob("lab*.ipynb"))}
PROMPTS = ["And it came to pass", "In the beginning God created", "Once"]
BUILT = [part for part in parts.PARTS if part.chapter <= LAST_BUILT]


def graded(lab: str, notebook, passed=None) -> Grade:
    """A grading in which some exercises, or all, were passed."""
    ids = [exercise_id(cell) for cell in notebook.cells if is_exercise(cell)]
    return Grade(lab, tuple(ExerciseResult(i, "ok" if i in (passed or ids) else "FAIL", 0, 1) for i in ids))


@pytest.fixture
def solved_labs(tmp_path, monkeypatch):
    """Stores the solutions of labs 1 to n as parts, where LLM(parts="mine") looks for them."""
    folder = tmp_path / "mine"
    monkeypatch.setattr(parts, "MINE", folder)

    def store(upto: int) -> Path:
        for lab, notebook in SOLUTIONS.items():
            if lab <= upto:
                mine.store_parts(notebook, notebook, graded(f"{lab:02}", notebook), folder)
        return folder

    return store


def tokens(config, **chosen):
    with LLM("tiny", config=config, dtype="float32", **chosen) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
        return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("chapter", range(1, LAST_BUILT + 1))
def test_solutions_as_parts_give_the_chapters_tokens(solved_labs, chapter):
    solved_labs(chapter)
    config = EngineConfig.at_chapter(chapter)
    chosen = parts.my_parts()
    assert chosen.keys() == {part.name for part in BUILT if part.chapter <= chapter}
    made = []

    def watched(factory):
        return lambda *args: made.append(factory) or factory(*args)

    assert tokens(config, parts={name: watched(part) for name, part in chosen.items()}) == tokens(config)
    assert set(made) == set(chosen.values()), "each of them was used"


@pytest.mark.parametrize("upto", [3, 4])
def test_a_scheduler_of_an_earlier_lab_serves_prompts_longer_than_a_later_engines_budget(solved_labs, upto):
    solved_labs(upto)
    config = EngineConfig.latest(max_num_seqs=2, max_num_batched_tokens=3)
    assert all(len(encoded) > 3 for encoded in map(Tokenizer(resolve("tiny")).encode, PROMPTS[:2]))
    mine = {"scheduler": parts.my_parts()["scheduler"]}
    assert tokens(config, parts=mine) == tokens(config)


def test_exercises_and_the_table_name_each_other():
    """A part in a solution's metadata is in the table, and the other way round; its names exist."""
    told = {
        (name, exercise_id(cell))
        for notebook in SOLUTIONS.values()
        for cell in notebook.cells
        if is_exercise(cell)
        for name in cell.metadata["minillm"].get("part", {})
    }
    assert told == {(part.name, part.exercise) for part in BUILT}
    for part in BUILT:
        assert part.exercise.startswith(f"{part.chapter}.")
        for name in (part.interface, part.default):
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name


def test_scoreboard_row_yours_and_the_command(solved_labs, monkeypatch, capsys):
    assert main(["mine"]) == 0 and "not passed yet" in capsys.readouterr().out
    assert main(["generate", "And", "--mine"]) == 1 and "no part of yours" in capsys.readouterr().err
    folder = solved_labs(1)
    main(["mine", "--json"])
    (row,) = [row for row in json.loads(capsys.readouterr().out) if row["part"] == "attention"]
    assert row["yours"].endswith("mine/01.py") and (folder / "01.py").exists() and row["exercise"] == "1.6"

    monkeypatch.setattr(bench, "scoreboard", lambda vocab: random_workload(3, (Uniform(4, 9), Fixed(5))))
    assert main(["bench", "--mine", "--chapters", "1", "--json"]) == 0
    ours, yours = json.loads(capsys.readouterr().out)["rows"]
    assert (ours["chapter"], yours["chapter"]) == (1, "yours")
    assert yours["tokens_generated"] == ours["tokens_generated"] == 15


# -- what is stored ----------------------------------------------------------------------------------------------------


@pytest.fixture
def lab():
    """The toy lab, two exercises of which are parts."""
    notebook = solution()
    cell_of(notebook, "ex1").metadata["minillm"]["part"] = {"attention": "one"}
    cell_of(notebook, "ex2").metadata["minillm"]["part"] = {"scheduler": "two"}
    return notebook


def run(file: Path) -> dict:
    namespace: dict = {}
    exec(file.read_text(), namespace)
    return namespace["PARTS"]


def test_helpers_come_along_and_what_is_not_used_stays_behind(lab, tmp_path):
    notebook = solved(lab)
    for place, source in [
        (2, "unused = 1 / 0"),
        (2, "def helper():\n    return base\n"),
        (2, "base = math.floor(1.5)"),
        (len(notebook.cells), "raise SystemExit"),
    ]:
        notebook.cells.insert(place, nbformat.v4.new_code_cell(source))
    cell_of(notebook, "ex1").source = "def one():\n    return helper()"
    file = mine.store_parts(notebook, lab, graded("09", lab, ["9.1"]), tmp_path / "mine")
    assert file == tmp_path / "mine" / "09.py"
    own = run(file)
    assert own.keys() == {"attention"} and own["attention"]() == 1
    text = file.read_text()
    assert "import math" in text and "unused" not in text and "SystemExit" not in text and "test 9" not in text


def test_a_part_that_passed_once_is_not_lost(lab, tmp_path):
    both = mine.store_parts(solved(lab), lab, graded("09", lab), tmp_path)
    before = both.read_text()
    assert run(both).keys() == {"attention", "scheduler"}
    assert mine.store_parts(learner(lab), lab, graded("09", lab, ["9.1"]), tmp_path) is None
    assert mine.store_parts(learner(lab), lab, graded("09", lab, ["9.3"]), tmp_path) is None
    assert both.read_text() == before
    other = learner(lab, {"9.1": "def one():\n    return 1.0", "9.2": "def two():\n    return 2"})
    assert mine.store_parts(other, lab, graded("09", lab), tmp_path) and "1.0" in both.read_text()


def test_nothing_is_stored_for_a_lab_without_parts(tmp_path):
    assert mine.store_parts(solved(solution()), solution(), graded("09", solution()), tmp_path / "mine") is None
    assert not (tmp_path / "mine").exists()


def test_files_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(ValueError, match="no part of yours"):
        parts.my_parts(tmp_path)
    file = tmp_path / "01.py"
    for text, said in [
        ("PARTS = {'attention': nowhere}", "01.py cannot be used: NameError"),
        ("x = 1", "01.py cannot be used: it has no PARTS"),
        ("PARTS = {'attnetion': 1}", "has a part 'attnetion'; parts are attention"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            parts.my_parts(tmp_path)


def test_of_two_parts_of_one_name_the_later_chapters_serves(tmp_path):
    for lab in (1, 2):
        (tmp_path / f"{lab:02}.py").write_text(f"PARTS = {{'attention': {lab}}}")
    assert parts.my_parts(tmp_path) == {"attention": 2}
