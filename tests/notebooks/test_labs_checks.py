"""What check cells are written with: finding the first difference, naming the likely mistake."""

import traceback

import numpy as np
import pytest
import torch

from minillm.course import checks
from minillm.course.checks import Check, CheckFailed, first_difference, load_mistakes, show

SAME = [
    (3, 3),
    (3.0, 3),
    (1.0, 1.0 + 1e-9),
    ([1, (2, 3)], (1, [2, 3])),
    ({"a": [1.0]}, {"a": [1]}),
    ("x", "x"),
    (None, None),
    (float("inf"), float("inf")),
    (torch.ones(2, dtype=torch.bfloat16), torch.ones(2)),
    (torch.tensor([1, 2]), np.array([1, 2])),
    ([torch.ones(2), 1], [torch.ones(2), 1]),
    (torch.tensor(2.0), torch.tensor(2.0, dtype=torch.float64)),
    (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0])),
]
DIFFERENT = [
    (3, 4, ("", 3, 4)),
    (True, 1, ("", True, 1)),
    (None, 0, ("", None, 0)),
    (float("nan"), 1.0, None),
    ("1.0", 1.0, ("", "1.0", 1.0)),
    ([1, [2, 3]], [1, [2, 4]], ("[1][1]", 3, 4)),
    ([1], [1, 2], ("its length", 1, 2)),
    ({"a": 1}, {"a": 1, "b": 2}, ("['b']", "nothing", 2)),
    ({"a": 1, "c": 2}, {"a": 1}, ("['c']", 2, "nothing")),
    (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.0], [5.0, 0.0]]), ("[1, 0]", 3.0, 5.0)),
    (torch.tensor([1, 2**60 + 1]), torch.tensor([1, 2**60]), ("[1]", 2**60 + 1, 2**60)),
    (torch.tensor(float("nan")), torch.tensor(1.0), None),
    (torch.ones(2), torch.ones(3), None),
    ([1.0, 2.0], torch.ones(2), None),
]


@pytest.mark.parametrize(("got", "want"), SAME)
def test_same(got, want):
    assert first_difference(got, want, rtol=1e-5, atol=1e-6) is None


@pytest.mark.parametrize(("got", "want", "difference"), DIFFERENT)
def test_first_difference(got, want, difference):
    found = first_difference(got, want, rtol=1e-5, atol=1e-6)
    assert found is not None and (difference is None or found == difference)


def test_values_are_shown_short():
    assert show(1234567) == "1,234,567" and show(0.1 + 0.2) == "0.3" and show(True) == "True"
    assert show(torch.zeros(2, 3)) == "shape [2, 3] float32" == show(np.zeros((2, 3), "float32"))
    assert len(show(list(range(1000)))) <= 120


WRONG = """
from minillm.course.checks import mistake

ABOUT = {"exercise": "98.1", "name": "half", "check": "value"}

@mistake(**ABOUT, says="it rounds down.")
def rounds_down(x):
    return x // 2

@mistake(**ABOUT, says="it is doubled.")
def doubles(x):
    return x * 2

@mistake(**ABOUT, says="it indexes a number.")
def indexes(x):
    return x[0]

@mistake(exercise="98.1", name="other", check="value", says="of another function.")
def other(x):
    return x * 2
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    (tmp_path / "lab98.py").write_text(WRONG)
    monkeypatch.setattr(checks, "WRONG", tmp_path)
    return Check("98.1", reread='chapter 98, "Halves"')


def message(check, half, *args, want):
    with pytest.raises(CheckFailed) as caught:
        check.call(half, *args, want=want)
    return str(caught.value)


def test_a_failure_says_four_things(check):
    def half(x):
        return x + x

    assert message(check, half, 1024, want=512) == (
        "Exercise 98.1 fails for half(1,024)\ngot 2,048; wanted 512\nLikely mistake: it is doubled.\n"
        'Reread: chapter 98, "Halves"'
    )


def test_what_went_well_rules_mistakes_out(check):
    def half(x):
        return x * 2

    assert "Or:" in message(check, half, 0, want=1), "on 0 all of them look alike"
    check.call(half, 4, want=8)
    assert "none of those that are known" in message(check, lambda x: 0, 3, want=1.5)

    def half(x):
        return int(x / 2)

    later = Check("98.1", reread="…")
    later.call(half, 4, want=2)
    assert "it rounds down" in message(later, half, 3, want=1.5) and "doubled" not in message(later, half, 3, want=1.5)


def test_an_error_is_named_if_it_is_a_known_mistake_and_passes_through_if_not(check):
    def half(x):
        return x[0]

    assert "it indexes a number" in message(check, half, 3, want=1.5)

    def half(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        check.call(half, 3, want=1.5)
    ours = [f.f_locals for f, _ in traceback.walk_tb(caught.tb) if f.f_code.co_filename == checks.__file__]
    assert ours and all(frame.get("__tracebackhide__") for frame in ours)


def test_the_stub_stays_a_stub(check):
    def half(x):
        raise NotImplementedError("Exercise 98.1: halve")

    with pytest.raises(NotImplementedError):
        check.call(half, 3, want=1.5)


def _in_the_engine(f):
    """What the engine makes of an error in a part of it: one of its own."""
    from minillm.engine.engine import EngineDeadError

    try:
        return f(3)
    except Exception as error:
        raise EngineDeadError("the engine is dead") from error


def test_an_error_that_the_engine_wrapped_is_the_learners_own(check):
    def half(x):
        raise NotImplementedError("Exercise 98.1: halve")

    with pytest.raises(NotImplementedError, match=r"Exercise 98\.1"):
        check.run(_in_the_engine, half, want=1.5, given="the engine")

    def half(x):
        return halved  # noqa: F821

    with pytest.raises(NameError, match="halved"):
        check.run(_in_the_engine, half, want=1.5, given="the engine")

    def half(x):
        return x[0]

    with pytest.raises(CheckFailed, match=r"got TypeError: .*\n.*it indexes a number"):
        check.run(_in_the_engine, half, want=1.5, given="the engine")


def test_a_diagnosis_ends(check, monkeypatch):
    def half(x):
        return x * 2

    monkeypatch.setattr(checks, "DIAGNOSIS_SECONDS", 0.0)
    assert "none of those that are known" in message(check, half, 4, want=2)


def test_an_answer_that_writes_into_its_input_does_not_spoil_the_diagnosis(check):
    def half(x):
        x *= 2
        return x

    x = torch.tensor([1.0, 3.0])
    assert "it is doubled" in message(check, half, x, want=x / 2) and x.tolist() == [1.0, 3.0]


def test_a_scenario_is_run_on_the_wrong_versions_too(check):
    def half(x):
        return x * 2

    with pytest.raises(
        CheckFailed, match=r"fails for four and six\ngot 8; wanted 2 \(first difference at \[0\]\)\n.*doubled"
    ):
        check.run(lambda f: [f(4), f(6)], half, want=[2, 3], given="four and six")


def test_a_hidden_answer_is_told_by_no_message(check):
    def half():
        return {"of 4": 8, "of 6": 3}

    for hide, wanted in ((False, "wanted 2"), (True, "wanted the right one")):
        with pytest.raises(CheckFailed) as caught:
            check.entries(half, {"of 6": 3, "of 4": 2}, "four and six", hide)
        assert f"fails for 'of 4', four and six\ngot 8; {wanted}\n" in str(caught.value)


def test_an_answer_that_is_an_input_is_judged_complaint_by_complaint(check):
    complaints = {"it must be a list": lambda them: not isinstance(them, list), "it is empty": lambda them: not them}

    def judge(half):
        check.complaints(half, complaints, lambda them: f"your list {them}")

    judge(lambda: [1])
    for answer, complaint in ((None, "it must be a list"), ([], "it is empty")):
        with pytest.raises(CheckFailed) as caught:
            judge(lambda answer=answer: answer)
        assert f"fails for your list {answer}\ngot '{complaint}'; wanted 'no complaint'\n" in str(caught.value)
    with pytest.raises(ZeroDivisionError):
        judge(lambda: 1 / 0)


def test_a_lab_without_stored_mistakes_has_none():
    assert load_mistakes("97") == {}
