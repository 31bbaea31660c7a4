"""Quizzes: the stored ones say only what can be recomputed, and every way to ask them works."""

import io
import json
import math
import re
import statistics
from copy import deepcopy
from pathlib import Path

import ipywidgets
import nbformat
import pytest

from minillm.cli import main
from minillm.core import cost
from minillm.core.presets import DEVICES, MODELS
from minillm.course import interview, notes, progress, quiz
from minillm.course.glossary import early_terms, load_glossary
from minillm.course.quiz import Attempt, QuizError, load_quiz, parse_quiz, quiz_chapters, wrong_numbers

CHAPTERS = Path(__file__).parents[2] / "chapters"
# Headings that questions link to and that the notebook still lacks. A chapter drops its line as it writes them.
PENDING: dict[str, set[str]] = {}


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A work folder of the test's own."""
    monkeypatch.setattr(progress, "work_folder", lambda: tmp_path)
    monkeypatch.setattr(notes, "work_folder", lambda: tmp_path)
    return tmp_path


def a_question(place: int, kind: str, **more) -> dict:
    common = {"id": f"q-{place}", "kind": kind, "objective": "one", "section": "Somewhere", "question": f"Why {place}?"}
    if kind == "open":
        return {**common, "answer": f"Because {place}, see `vllm/x.py` and f.", "rubric": ["a", "b", "c", "d"], **more}
    options = [{"text": f"{word} {place}", "reason": f"since {word}"} for word in ("yes", "no", "perhaps")]
    options[place % 3]["right"] = True
    return {**common, "options": options, **more}


@pytest.fixture
def data():
    """A whole quiz, as small as one may be: choices q-0, q-2, q-4 with right options a, c, b, and three open."""
    questions = [a_question(place, ("choice", "open")[place % 2]) for place in range(6)]
    questions[1]["vllm"] = {"path": "vllm/x.py", "search": "f", "checked": "0.33.0"}
    questions[1]["objective"], questions[2]["objective"] = "two", "three"
    questions[3]["numbers"] = [
        {"function": "minillm.course.quiz.forward_passes", "arguments": {"output_tokens": 3}, "format": "{:.0f}"}
    ]
    objectives = {"one": "Say one.", "two": "Say two.", "three": "Say three."}
    return {"chapter": "03", "title": "Three", "objectives": objectives, "questions": questions}


# -- the stored quizzes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chapter", quiz_chapters())
def test_a_stored_quiz_holds_and_every_number_comes_out_as_printed(chapter):
    stored = load_quiz(chapter)
    assert not wrong_numbers(stored)
    places = {question.right for question in stored.questions if question.is_choice}
    assert len(places) > 2, "the right option is always at the same place"


@pytest.mark.parametrize("chapter", quiz_chapters())
def test_a_quiz_uses_no_term_of_a_later_chapter(chapter):
    glossary = load_glossary()
    for question in load_quiz(chapter).questions:
        texts = [question.question, question.answer, *question.rubric]
        texts += [text for option in question.options for text in (option.text, option.reason)]
        early = early_terms("\n\n".join(texts), int(chapter), glossary)
        assert not early, f"{question.id}: {[term.term for term in early]}"


@pytest.mark.parametrize("chapter", quiz_chapters())
def test_every_question_links_to_a_heading_of_its_chapter(chapter):
    notebook = next(CHAPTERS.glob(f"{chapter}_*.ipynb"), None)
    if notebook is None:
        pytest.skip(f"chapter {chapter} is not written yet")
    cells = [c.source for c in nbformat.read(notebook, as_version=4).cells if c.cell_type == "markdown"]
    headings = {text.strip() for source in cells for text in re.findall(r"^#{2,4} (.+)$", source, re.MULTILINE)}
    missing = {question.section for question in load_quiz(chapter).questions} - headings
    assert missing <= PENDING.get(chapter, set()), f"{chapter}.json links to headings that {notebook.name} lacks"
    assert missing >= PENDING.get(chapter, set()), "written by now: take them out of PENDING in this file"


def test_wrong_options_are_the_mistakes_that_their_reasons_name():
    """A wrong number teaches something only if it is what that mistake gives."""
    kib = 1024
    one_head = 2 * 128 * 2  # K and V of one head of one layer, in bytes
    assert one_head * 32 * 32 == quiz.kv_bytes_per_token(MODELS["Llama-2-7B"], "float16") == 512 * kib
    assert one_head * 32 * 8 == 128 * kib and one_head // 2 * 32 * 8 == 64 * kib and one_head * 8 == 4 * kib
    assert round(2 * quiz.tokens_at_ridge(DEVICES["A100 80GB"], 2)) == 306
    lengths = [20, 40, 60, 400]
    assert 100 * statistics.median(lengths) / max(lengths) == 12.5 and 100 * max(lengths) / (4 * 400) == 25
    assert (1.25 + 1, 1.25 * 8 / 4 + 1, 4 + 1 + 8) == (2.25, 3.5, 13)
    assert quiz.traffic_in_nd("naive", 1024, 64) == 68 and quiz.traffic_in_nd("Q outside", 1024, 64, 64) == 34
    assert round(4 * 1024 * 64 * 1024 * 2 / 1e9, 2) == 0.54
    assert round(cost.attention_traffic("naive", 1024, 64, heads=1024, itemsize=2) / 1e9, 2) == 9.13


# -- the functions behind the numbers ---------------------------------------------------------------------------------


def test_passes_slots_and_tokens_are_the_engines(engine_factory):
    from minillm.core.sampling_params import SamplingParams

    engine = engine_factory()
    engine.add_request("r", {"prompt_token_ids": list(range(1, 13))}, SamplingParams(max_tokens=20, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.metrics.forward_passes == quiz.forward_passes(20) == 20
    assert engine.metrics.kv_slots_used == quiz.kv_slots_used(12, 20) == 31
    assert engine.metrics.tokens_computed == quiz.tokens_computed(12, 20, kv_cache=True) == 31
    assert quiz.tokens_computed(12, 20, kv_cache=False) == sum(range(12, 32))


def test_traffic_is_what_the_counting_memory_counts():
    torch = pytest.importorskip("torch")
    flash = pytest.importorskip("minillm.compute.attention.flash")
    n, d = 256, 64
    q, k, v = torch.randn(3, n, d, generator=torch.Generator().manual_seed(0))
    exact = flash.naive_attention(q.double(), k.double(), v.double(), flash.HBM())
    errors = {}
    for block in (16, 48, 64, 128):
        runs = {
            "naive": lambda hbm: flash.naive_attention(q, k, v, hbm),
            "K/V outside": lambda hbm, b=block: flash.flash_attention_kv_outer(q, k, v, hbm, b, b),
            "Q outside": lambda hbm, b=block: flash.flash_attention_q_outer(q, k, v, hbm, b, b)[0],
        }
        assert set(runs) == set(quiz.ATTENTION_ORDERS)
        for order, run in runs.items():
            hbm = flash.HBM()
            errors[order] = (run(hbm) - exact).abs().max().item()
            assert hbm.bytes["matrices"] == cost.attention_traffic(order, n, d, block, itemsize=4)
    assert max(errors.values()) < 4 * min(errors.values()), "errors to float64 are of one size"


def test_tiles_pay_from_half_the_head_dim_on():
    for order, share in (("Q outside", 1 / 2), ("K/V outside", 3 / 4)):
        for d in (64, 128):
            naive = cost.attention_traffic("naive", 4096, d)
            winning = [b for b in range(1, 257) if cost.attention_traffic(order, 4096, d, b) < naive]
            assert winning[0] == pytest.approx(share * d, abs=2)


def test_running_sum_is_that_of_the_online_softmax():
    assert [quiz.running_sum([4, 1, 8, 2][:n]) for n in (1, 2, 3, 4)] == pytest.approx([1, 1.25, 1.625, 1.875])


def test_roofline_numbers_by_hand():
    model, device = MODELS["Llama-2-7B"], DEVICES["A100 80GB"]
    assert model.num_parameters == 6_738_415_616
    weights = 2 * (6_738_415_616 - 32_000 * 4096)  # rows of the embedding are looked up, not read as a whole
    kv = 1001 * 512 * 1024
    flops = weights + 4 * 32 * 128 * 1000 * 32  # two operations a weight of two bytes; scores and their sum of values
    assert quiz.ridge_point(device) == pytest.approx(153.02, abs=0.01)
    for batch in (1, 32):
        by_hand = 100 * batch * flops / (weights + batch * kv) / quiz.ridge_point(device)
        assert quiz.decode_share(model, device, "float16", batch, 1000) == pytest.approx(by_hand, rel=1e-3)
    assert round(flops / 1e9, 1) == 13.7 == round((weights + kv) / 1e9, 1) and round(weights / 1e9, 1) == 13.2
    assert round(flops / kv) == 26
    limit = quiz.decode_share_limit(model, device, "float16", 1000)
    shares = [quiz.decode_share(model, device, "float16", batch, 1000) for batch in (1, 32, 126, 10**6)]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(limit, rel=1e-3)


def test_masks_and_tiles_by_brute_force():
    n, block = 256, 32
    kinds = {"skipped": 0, "whole": 0, "diagonal": 0}
    for row in range(0, n, block):
        for column in range(0, n, block):
            seen = {c <= r for r in range(row, row + block) for c in range(column, column + block)}
            kinds["diagonal" if len(seen) == 2 else "whole" if seen == {True} else "skipped"] += 1
    assert kinds == {kind: quiz.causal_tiles(n, block, kind) for kind in kinds}
    assert [quiz.last_visible_key(row, 3, 8) for row in range(3)] == [5, 6, 7]
    assert quiz.kernel_programs(8, 1024, 64) == 128 and quiz.kernel_programs(8, 1025, 64) == 136
    assert quiz.static_batch_utilisation([8] * 7 + [64]) == pytest.approx(100 * 120 / 512)


# -- reading a file ---------------------------------------------------------------------------------------------------


def question(n: int):
    return lambda data: data["questions"][n]


@pytest.mark.parametrize(
    ("where", "change", "message"),
    [
        (lambda d: d, {"chapter": "04"}, "chapter is '04'; the file's name says '03'"),
        (lambda d: d, {"titel": "x"}, "titel is unknown here"),
        (lambda d: d, {"questions": []}, "questions has 0; it must have 6 to 10"),
        (lambda d: d["objectives"], {"four": "Say four."}, "objectives has 'four', which no question asks for"),
        (question(0), {"id": "Q 0"}, "question Q 0: id is 'Q 0'"),
        (question(0), {"id": "q-1"}, "questions has the id 'q-1' twice"),
        (question(0), {"id": 7}, "question 1: id is 7; it must be a text"),
        (question(0), {"kind": "puzzle"}, "question q-0: kind is 'puzzle'"),
        (question(0), {"objective": "five"}, "question q-0: objective is 'five'; it must be one of one, two, three"),
        (question(0), {"section": " "}, "question q-0: section is ' '"),
        (question(0), {"answer": "x"}, "question q-0: answer is unknown here"),
        (question(0), {"question": "a ` b"}, "question q-0: question has a backtick without its partner"),
        (question(0), {"options": []}, "question q-0: options has 0; it must have 3 to 5"),
        (lambda d: d["questions"][0]["options"][1], {"right": True}, "question q-0: options has 2 right ones"),
        (lambda d: d["questions"][0]["options"][1], {"text": "yes 0"}, "question q-0: options has two of the same"),
        (lambda d: d["questions"][0]["options"][1], {"reason": ""}, "question q-0: option b: reason is ''"),
        (question(1), {"rubric": ["a", "b"]}, "question q-1: rubric has 2 points; it must have 3 to 5"),
        (question(1), {"rubric": ["a", "b", 3]}, "question q-1: rubric: 3 is 3; it must be a text"),
        (question(1), {"answer": "See f."}, "question q-1: vllm: path is 'vllm/x.py', which the answer does not name"),
        (question(3), {"numbers": []}, "questions has no question with numbers"),
        (lambda d: d["questions"][3]["numbers"][0], {"function": "os.getpid"}, "numbers: function is 'os.getpid'"),
        (lambda d: d["questions"][3]["numbers"][0], {"arguments": {"n": 1}}, "arguments do not fit"),
        (lambda d: d["questions"][3]["numbers"][0], {"format": "{:q}"}, "numbers: format or arguments do not give"),
        (lambda d: d["questions"][3]["numbers"][0], {"divide": 0}, "numbers: divide is 0"),
    ],
)
def test_a_fault_is_one_error_that_names_file_question_and_field(data, where, change, message):
    parse_quiz(deepcopy(data), "quiz/03.json", "03")  # without the fault all is well
    where(data).update(change)
    with pytest.raises(QuizError) as raised:
        parse_quiz(data, "quiz/03.json", "03")
    assert message in str(raised.value) and str(raised.value).startswith("quiz/03.json: ")
    assert "\n" not in str(raised.value)


def test_missing_fields_and_wrong_balance_are_refused(data):
    for name in ("question", "options", "section"):
        broken = deepcopy(data)
        del broken["questions"][0][name]
        with pytest.raises(QuizError, match=f"question q-0: {name} is missing"):
            parse_quiz(broken, "f", "03")
    data["questions"][1] = a_question(1, "choice", objective="two")
    data["questions"][5] = a_question(5, "choice")
    with pytest.raises(QuizError, match="5 choices among 6; half must be choices"):
        parse_quiz(data, "f", "03")


def test_a_wrong_number_is_found(data):
    number = data["questions"][3]["numbers"][0]
    assert not wrong_numbers(parse_quiz(data, "f", "03"))
    number["arguments"] = {"output_tokens": 4}
    assert "gives 4, which the right answer does not say" in wrong_numbers(parse_quiz(data, "f", "03"))[0]
    data["questions"][3]["answer"] = "It is 1,424 or 4.5 or 14."  # a 4 in other numbers does not count
    assert wrong_numbers(parse_quiz(data, "f", "03"))
    number = {**number, "arguments": {"output_tokens": 2}}
    data["questions"][2]["numbers"] = [number]
    data["questions"][2]["options"][0]["text"] = "it is 2"
    assert len([w for w in wrong_numbers(parse_quiz(data, "f", "03")) if "wrong option" in w]) == 1


def test_files_that_are_not_there_or_not_json(tmp_path):
    (tmp_path / "02.json").write_text("{")
    with pytest.raises(QuizError, match=r"02\.json: is not readable JSON"):
        load_quiz(2, tmp_path)
    with pytest.raises(ValueError, match="chapter 04 has no quiz yet; chapters that have one: 02"):
        load_quiz("4", tmp_path)
    with pytest.raises(ValueError, match="chapter '16' is unknown"):
        load_quiz("16", tmp_path)


# -- page and widget --------------------------------------------------------------------------------------------------


def test_static_page_has_all_text_and_answers_below_all_questions():
    for chapter in quiz_chapters():
        page = quiz.static_quiz(chapter).data
        assert page.count("<details>") == page.count("</details>") == len(load_quiz(chapter).questions)
        for tag in ("p", "b", "ul", "li", "a", "code", "summary"):
            assert len(re.findall(rf"<{tag}[ >]", page)) == page.count(f"</{tag}>"), tag
        questions, _, answers = page.partition("<b>Answers</b>")
        assert "<details>" not in questions and "`" not in page
        assert page.count("\n") < 30 and "\n\n" not in page, "an empty line would end the HTML block"
        for one in load_quiz(chapter).questions:
            assert quiz.inline_html(one.question) in questions
            for text in (*one.rubric, *(option.reason for option in one.options)):
                assert quiz.inline_html(text) in answers
            assert f'href="{quiz.section_anchor(one.section)}"' in answers
    assert quiz.section_anchor("What does `m` cost?") == "#What-does-m-cost%3F"
    assert quiz.inline_html("a < b, `x<y>` & c\n\nnext") == "a &lt; b, <code>x&lt;y&gt;</code> &amp; c<br><br>next"


@pytest.fixture
def shell(data, monkeypatch):
    """The widget of the small quiz, what it records, and a function that finds a control by its label."""
    monkeypatch.setattr(quiz, "load_quiz", lambda chapter: parse_quiz(data, "f", chapter))
    recorded = []
    widget = quiz.quiz_widget("03", record=lambda *score: recorded.append(score))

    def controls(box=widget):
        for child in box.children:
            yield from controls(child) if isinstance(child, ipywidgets.Box) else [child]

    def control(label: str):
        return next(c for c in controls() if getattr(c, "description", None) == label)

    def view() -> str:
        return next(c for c in controls() if isinstance(c, ipywidgets.HTML)).value

    return widget, control, view, recorded


def test_widget_gives_the_reason_of_an_option_and_counts_the_first(shell):
    _, control, view, recorded = shell
    assert "Question 1 of 6" in view() and "Why 0?" in view() and "since" not in view()
    control("Option:").index = 1
    assert "✗ No. <i>since no</i>" in view() and "score so far 0 of 1" in view() and "Somewhere" in view()
    control("Option:").index = 0
    assert "✓ Right. <i>since yes</i>" in view() and "since no" in view() and "score so far 0 of 1" in view()
    assert recorded == [("03", "q-0", 0.0)]


def test_widget_shows_answer_and_rubric_and_counts_the_points_ticked(shell):
    _, control, view, recorded = shell
    control("Next").click()
    assert "Why 1?" in view() and "Because" not in view() and control("Option:").layout.display == "none"
    control("Show answer").click()
    assert "Because 1" in view() and "<li>c</li>" in view() and control("Show answer").layout.display == "none"
    control("Point 2").value = control("Point 3").value = True
    assert "score so far 0.5 of 1" in view()
    control("Point 2").value = False
    assert recorded == [("03", "q-1", points) for points in (0.0, 0.25, 0.5, 0.25)]
    control("Next").click()
    control("Back").click()
    assert control("Point 3").value and not control("Point 2").value and "Because 1" in view()
    assert len(recorded) == 4, "turning pages is no answer"


def test_widget_keeps_answers_while_pages_turn_and_ends_at_both_ends(shell):
    widget, control, view, recorded = shell
    assert control("Back").disabled and not control("Next").disabled
    control("Option:").index = 0
    for _ in range(5):
        control("Next").click()
    assert control("Next").disabled and "Question 6 of 6" in view() and "score so far 1 of 1" in view()
    for _ in range(5):
        control("Back").click()
    assert control("Option:").index == 0 and "✓ Right" in view() and recorded == [("03", "q-0", 1.0)]
    kinds = {type(child).__name__ for box in (widget, *widget.children) for child in getattr(box, "children", ())}
    assert "Output" not in kinds and "HTML" in kinds


def test_widget_says_when_a_score_cannot_be_kept(data, monkeypatch):
    monkeypatch.setattr(quiz, "load_quiz", lambda chapter: parse_quiz(data, "f", chapter))

    def refuse(*_):
        raise OSError("read-only <disk>")

    widget = quiz.quiz_widget("03", record=refuse)
    widget.children[1].index = 0
    assert "Not recorded: read-only &lt;disk&gt;" in widget.children[0].value and "✓ Right" in widget.children[0].value


def test_model_behind_the_widget_is_a_function_of_its_arguments(data):
    small = parse_quiz(data, "f", "03")
    attempts = {"q-0": Attempt(chosen=(0,)), "q-1": Attempt(revealed=True, ticked=frozenset({0, 1, 3}))}
    assert "score so far 1.75 of 2" in quiz.quiz_view(small, 2, attempts)
    assert quiz.quiz_view(small, 2, attempts) == quiz.quiz_view(small, 2, dict(attempts))
    assert quiz.score(small.questions[2], Attempt()) is None and quiz.score(small.questions[1], Attempt()) is None


# -- in a terminal ----------------------------------------------------------------------------------------------------


def piped(monkeypatch, capsys, lines: str, *args: str) -> tuple[int, str, str]:
    """Run the command with ``lines`` as its standard input."""
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    status = main(["quiz", *args])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def right_answers(questions) -> str:
    return "".join("abcde"[q.right] + "\n" if q.is_choice else "\nall\n" for q in questions)


@pytest.mark.parametrize("chapter", quiz_chapters())
def test_a_chapters_quiz_through_a_pipe(work, monkeypatch, capsys, chapter):
    stored = load_quiz(chapter)
    status, out, err = piped(monkeypatch, capsys, right_answers(stored.questions), chapter)
    total = len(stored.questions)
    assert (status, err) == (0, "") and f"Score {total} of {total}." in out and "Missed" not in out
    kept = json.loads((work / "progress.json").read_text())
    assert kept == {"quiz": {chapter: {question.id: 1.0 for question in stored.questions}}}


def held(data, lines: list[str], **more):
    small = parse_quiz(data, "f", "03")
    replies, said, recorded = iter(lines), [], []
    result = interview.hold(
        [(small, question) for question in small.questions],
        lambda prompt: next(replies, None),
        said.append,
        lambda *score: recorded.append(score),
        **more,
    )
    return result, "\n".join(said), recorded


def test_missed_questions_come_back_later_and_their_first_score_counts(data):
    # q-0 wrong, q-1 three of four points, q-2 right, q-3 one point, then q-0 again and right
    lines = ["b", "aloud", "1 2,4", "c", "", "4", "a", "b", "", "all", "", ""]
    result, said, recorded = held(data, lines)
    asked = re.findall(r"Why (\d)\?", said)
    assert asked == ["0", "1", "2", "3", "0", "4", "5", "3"], "each after three others, if there are three"
    assert result.scores == {("03", f"q-{n}"): s for n, s in enumerate([0, 0.75, 1, 0.25, 1, 1])}
    assert [question.id for _, question in result.missed] == ["q-0", "q-3"] and result.mended == 1
    assert "Score 4 of 6." in said and "Missed 2, 1 right the second time." in said
    assert said.count("again · chapter 03") == 2 and "read again: " in said and "section “Somewhere”" in said
    assert recorded[0] == ("03", "q-0", 0.0) and ("03", "q-0", 1.0) in recorded


def test_reasons_are_told_and_unusable_answers_asked_again(data):
    _, said, _ = held(data, ["z", "", "", "0", "1 5", "none", "2", "q"])
    assert "'z' is none of a, b, c." in said and "It is a. since yes" in said, "Enter is: I don't know"
    assert said.count("is not understood; the points are 1 to 4.") == 3 and "1 of 4 points" in said
    assert "Stopped after 2 of 6 questions." in said


def test_the_end_of_input_ends_the_session_with_the_score_so_far(data):
    result, said, _ = held(data, ["a", "", "all"], bring_back=False)
    assert result.total == 2 and "Score 2 of 2." in said and "Stopped after 2 of 6" in said
    result, said, recorded = held(data, [])
    assert "No question was answered." in said and recorded == []


def test_an_interview_mixes_chapters_evenly_and_is_repeatable():
    quizzes = [load_quiz(chapter) for chapter in quiz_chapters()]
    drawn = interview.draw_questions(quizzes, 2 * len(quizzes), seed=1)
    names = [(q.chapter, question.id) for q, question in drawn]
    assert len(set(names)) == len(names) and all([c for c, _ in names].count(q.chapter) == 2 for q in quizzes)
    again = interview.draw_questions(quizzes, 2 * len(quizzes), seed=1)
    assert names == [(q.chapter, question.id) for q, question in again]
    others = [interview.draw_questions(quizzes, 2 * len(quizzes), seed=s) for s in range(2, 6)]
    assert any(names != [(q.chapter, question.id) for q, question in other] for other in others)
    assert len(interview.draw_questions(quizzes, 1000)) == sum(len(q.questions) for q in quizzes)


def test_an_interview_through_a_pipe(work, monkeypatch, capsys):
    quizzes = [load_quiz(chapter) for chapter in quiz_chapters()]
    drawn = [question for _, question in interview.draw_questions(quizzes, 4, seed=7)]
    status, out, err = piped(monkeypatch, capsys, right_answers(drawn), "--interview", "4", "--seed", "7")
    assert (status, err) == (0, "") and "Score 4 of 4." in out
    assert sum(len(scores) for scores in json.loads((work / "progress.json").read_text())["quiz"].values()) == 4
    status, out, _ = piped(monkeypatch, capsys, "q\n", "--interview", "500", "--chapters", "0")
    assert status == 0 and f"There are {len(quizzes[0].questions)} questions in chapters 00" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "say which chapter"),
        (["01", "--interview", "3"], "exclude each other"),
        (["01", "--chapters", "1-2"], "say which chapter"),
        (["99"], "chapter '99' is unknown"),
        (["--interview", "0"], "ask for at least 1"),
        (["--interview", "2", "--chapters", "3-1"], "is not understood"),
        (["--interview", "2", "--chapters", "0,x"], "is not understood"),
    ],
)
def test_unusable_arguments_get_one_line(work, monkeypatch, capsys, args, message):
    status, out, err = piped(monkeypatch, capsys, "", *args)
    assert status == 1 and out == "" and message in err and err.count("\n") == 1


def test_chapters_are_ranges_and_lists():
    there = ["00", "01", "03", "10"]
    assert interview.parse_chapters("1-7", there) == ["01", "03"]
    assert interview.parse_chapters("0, 3,9-15", there) == ["00", "03", "10"]
    with pytest.raises(ValueError, match="no chapter of '5' has a quiz yet; those that have one: 00, 01, 03, 10"):
        interview.parse_chapters("5", there)


# -- progress and notes -----------------------------------------------------------------------------------------------


def test_progress_keeps_what_others_wrote_and_is_never_half_written(work):
    progress.update_progress(lambda p: p.setdefault("labs", {}).update({"06": 12}))
    quiz.record_score("01", "rescale", 1 / 3)
    quiz.record_score("01", "mask", 1.0)
    assert progress.load_progress() == {"labs": {"06": 12}, "quiz": {"01": {"rescale": 0.333, "mask": 1.0}}}

    def fail(_):
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        progress.update_progress(fail)
    with pytest.raises(TypeError):
        progress.update_progress(lambda p: p.update(bad=object()))
    assert progress.load_progress()["quiz"]["01"]["mask"] == 1.0
    assert {path.name for path in work.iterdir()} <= {"progress.json", ".progress.lock"}, "no temporary file is left"


def test_progress_that_cannot_be_read_is_named_and_left_alone(work):
    (work / "progress.json").write_text("{half")
    with pytest.raises(ValueError, match=r"progress\.json is not readable JSON .* delete it to start anew"):
        quiz.record_score("01", "rescale", 1.0)
    assert (work / "progress.json").read_text() == "{half"


def test_the_course_outside_a_clone_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(progress, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="the course runs from a git clone"):
        load_quiz("01")


def test_note_has_the_guides_four_headings_and_is_never_overwritten(work, capsys):
    assert main(["note", "1"]) == 0
    path = work / "notes" / "01.md"
    assert capsys.readouterr().out == f"{path}\n"
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# FlashAttention · NeurIPS'22 · read ")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings == ["Problem (问题)", "Method (方法)", "Check against the code (对账)", "What I learnt (我学到了)"]
    path.write_text("mine")
    assert main(["note", "01"]) == 0
    assert "stays as it is" in capsys.readouterr().out and path.read_text() == "mine"
    assert main(["note", "16"]) == 1 and "chapters are 00 to 15" in capsys.readouterr().err


def test_help_of_both_commands_explains_them(capsys):
    for command in ("quiz", "note"):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0 and len(capsys.readouterr().out) > 200


def test_a_terminal_that_ends_gives_none(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(" a \n"))
    ask, _ = interview.terminal()
    assert ask("? ") == "a" and ask("? ") is None
    assert math.isclose(sum(interview.parse_points("1 2,4", 4)), 0 + 1 + 3)
