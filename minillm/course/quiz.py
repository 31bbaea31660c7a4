"""Quizzes: ``chapters/quiz/NN.json``, read, checked, and shown on a page, in a widget and in a terminal.

    {
     "chapter": "01", "title": "Online softmax and FlashAttention",
     "objectives": {"algebra": "…", …},                 3 or 4, those of the chapter's *At a glance*
     "questions": [                                     6 to 10, half of each kind, every objective asked for
      {"id": "rescale", "kind": "choice", "objective": "algebra", "section": "a heading of the chapter",
       "question": "…",
       "options": [{"text": "…", "right": true, "reason": "…"}, …],       3 to 5, one right, a reason for each
       "numbers": [{"function": "minillm.course.quiz.running_sum", "arguments": {"weights": [4, 1, 8]},
                    "format": "{:.3f}"}]},
      {"id": "merge", "kind": "open", "objective": …, "section": …, "question": …,
       "answer": "…", "rubric": ["…", …],                                 a model answer and 3 to 5 points to tick
       "vllm": {"path": "vllm/…", "search": "a name to search for", "checked": "0.33.0"}}
     ]
    }

Text is plain, with `code` in backticks and an empty line between paragraphs; formulas are Unicode.

``numbers`` are recomputed: the function (here or in minillm.core.cost) is called with the arguments, ``divide`` scales
the result if given, and what ``format`` makes of it must stand in the right option or the model answer (and if it is
the question's only number, in no wrong option). ``model`` and ``device`` among the arguments are names from
minillm.core.presets. At least one question has numbers, and at least one asks where to look in vLLM.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from urllib.parse import quote

from minillm.core.cost import attention_traffic, kv_bytes_per_token, step_cost
from minillm.core.model_config import ModelConfig
from minillm.core.presets import DEVICES, MODELS, Device
from minillm.course.progress import course_root, update_progress

LETTERS = "abcde"
# Functions that a quiz file may name.
NUMBER_MODULES = ("minillm.course.quiz", "minillm.core.cost")
PRESETS = {"model": MODELS, "device": DEVICES}


class QuizError(ValueError):
    """A quiz file that does not hold what it must. The message names file, question and field."""


@dataclass(frozen=True)
class Option:
    text: str
    right: bool
    reason: str


@dataclass(frozen=True)
class Number:
    """A number of the answer, by the function that computes it."""

    function: str
    arguments: dict
    format: str
    divide: float = 1

    def text(self) -> str:
        """What the quiz must print: the function called, its result formatted."""
        module, _, name = self.function.rpartition(".")
        arguments = {key: PRESETS[key][value] if key in PRESETS else value for key, value in self.arguments.items()}
        return self.format.format(getattr(importlib.import_module(module), name)(**arguments) / self.divide)


@dataclass(frozen=True)
class Question:
    """``options`` are empty for an open question, ``answer`` and ``rubric`` for one with a choice."""

    id: str
    objective: str
    section: str
    question: str
    options: tuple[Option, ...] = ()
    answer: str = ""
    rubric: tuple[str, ...] = ()
    numbers: tuple[Number, ...] = ()
    vllm: dict | None = None

    @property
    def is_choice(self) -> bool:
        return bool(self.options)

    @property
    def right(self) -> int:
        """Index of the right option."""
        return next(i for i, option in enumerate(self.options) if option.right)


@dataclass(frozen=True)
class Quiz:
    chapter: str
    title: str
    objectives: dict[str, str]
    questions: tuple[Question, ...]


# -- reading ----------------------------------------------------------------------------------------------------------


def chapter_name(chapter: str | int) -> str:
    """1, "1" and "01" -> "01". ValueError for what is no chapter of the course."""
    text = str(chapter)
    if not re.fullmatch(r"\d{1,2}", text) or int(text) > 15:
        raise ValueError(f"chapter {chapter!r} is unknown; chapters are 00 to 15")
    return f"{int(text):02d}"


def quiz_folder() -> Path:
    return course_root() / "chapters" / "quiz"


def quiz_chapters(folder: Path | None = None) -> list[str]:
    """The chapters that have a quiz, in order."""
    return sorted(path.stem for path in (folder or quiz_folder()).glob("[0-9][0-9].json"))


def load_quiz(chapter: str | int, folder: Path | None = None) -> Quiz:
    """The quiz of a chapter. ValueError if there is none, QuizError if its file is not as it must be."""
    folder, name = folder or quiz_folder(), chapter_name(chapter)
    path = folder / f"{name}.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = ", ".join(quiz_chapters(folder)) or "none"
        raise ValueError(f"chapter {name} has no quiz yet; chapters that have one: {there}") from None
    except ValueError as error:
        raise QuizError(f"{path}: is not readable JSON ({error})") from None
    return parse_quiz(data, str(path), name)


def parse_quiz(data: dict, source: str, chapter: str) -> Quiz:
    """Check a quiz file's content and build from it. QuizError names ``source``, the question and the field."""
    read = _Reader(data, source)
    read.known("chapter", "title", "objectives", "questions")
    if read.text("chapter") != chapter:
        read.fail("chapter", f"is {data['chapter']!r}; the file's name says {chapter!r}")
    objectives = read.field("objectives", dict, "an object of names and sentences")
    if not 3 <= len(objectives) <= 4:
        read.fail("objectives", f"has {len(objectives)}; it must have 3 or 4")
    for name in objectives:
        _Reader(objectives, f"{source}: objectives").text(name)
    items = read.field("questions", list, "a list")
    if not 6 <= len(items) <= 10:
        read.fail("questions", f"has {len(items)}; it must have 6 to 10")
    questions = [_question(item, source, place, objectives) for place, item in enumerate(items, 1)]

    ids = [question.id for question in questions]
    if again := next((name for name in ids if ids.count(name) > 1), None):
        read.fail("questions", f"has the id {again!r} twice")
    choices = sum(question.is_choice for question in questions)
    if abs(2 * choices - len(questions)) > 1:
        read.fail("questions", f"has {choices} choices among {len(questions)}; half must be choices, half open")
    if unasked := objectives.keys() - {question.objective for question in questions}:
        read.fail("objectives", f"has {min(unasked)!r}, which no question asks for")
    if not any(question.numbers for question in questions):
        read.fail("questions", "has no question with numbers; at least one answer must be recomputed")
    if not any(question.vllm for question in questions):
        read.fail("questions", "has no question with vllm; at least one must ask where to look there")
    return Quiz(chapter, read.text("title"), dict(objectives), tuple(questions))


class _Reader:
    """Typed access to an object of the file; errors name file, question and field."""

    def __init__(self, data, source: str):
        self.data, self.source = data, source
        if not isinstance(data, dict):
            raise QuizError(f"{source}: is {data!r}; it must be an object")

    def fail(self, name: str, what: str):
        raise QuizError(f"{self.source}: {name} {what}")

    def known(self, *names: str) -> None:
        for name in self.data:
            if name not in names:
                self.fail(name, f"is unknown here; fields are {', '.join(names)}")

    def field(self, name: str, kind: type, words: str):
        if name not in self.data:
            self.fail(name, f"is missing; it must be {words}")
        if not isinstance(self.data[name], kind):
            self.fail(name, f"is {self.data[name]!r}; it must be {words}")
        return self.data[name]

    def text(self, name: str) -> str:
        value = self.field(name, str, "a text")
        if not value.strip() or value != value.strip():
            self.fail(name, f"is {value!r}; it must be a text with nothing empty round it")
        if value.count("`") % 2:
            self.fail(name, "has a backtick without its partner")
        return value


def _question(data, source: str, place: int, objectives: dict) -> Question:
    name = data.get("id") if isinstance(data, dict) else None
    read = _Reader(data, f"{source}: question {name if isinstance(name, str) else place}")
    common = ("id", "kind", "objective", "section", "question", "numbers", "vllm")
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", read.text("id")):
        read.fail("id", f"is {name!r}; it must be lower-case words joined by -")
    kind = read.text("kind")
    if kind not in ("choice", "open"):
        read.fail("kind", f"is {kind!r}; it must be 'choice' or 'open'")
    if read.text("objective") not in objectives:
        read.fail("objective", f"is {data['objective']!r}; it must be one of {', '.join(objectives)}")
    question = Question(name, data["objective"], read.text("section"), read.text("question"))
    if kind == "choice":
        read.known(*common, "options")
        question = replace(question, options=_options(read))
    else:
        read.known(*common, "answer", "rubric")
        rubric = read.field("rubric", list, "a list of texts")
        if not 3 <= len(rubric) <= 5:
            read.fail("rubric", f"has {len(rubric)} points; it must have 3 to 5")
        points = _Reader({str(i): point for i, point in enumerate(rubric, 1)}, f"{read.source}: rubric")
        question = replace(question, answer=read.text("answer"), rubric=tuple(map(points.text, points.data)))
    if "numbers" in data:
        numbers = read.field("numbers", list, "a list of numbers with their functions")
        question = replace(question, numbers=tuple(_number(item, read) for item in numbers))
    if "vllm" in data:
        vllm = _Reader(data["vllm"], f"{read.source}: vllm")
        vllm.known("path", "search", "checked")
        for field in ("path", "search", "checked"):
            vllm.text(field)
        shown = question.answer if kind == "open" else question.options[question.right].text
        for field in ("path", "search"):
            if data["vllm"][field] not in shown:
                vllm.fail(field, f"is {data['vllm'][field]!r}, which the answer does not name")
        question = replace(question, vllm=dict(data["vllm"]))
    return question


def _options(read: _Reader) -> tuple[Option, ...]:
    items = read.field("options", list, "a list of options")
    if not 3 <= len(items) <= len(LETTERS):
        read.fail("options", f"has {len(items)}; it must have 3 to {len(LETTERS)}")
    options = []
    for letter, item in zip(LETTERS, items, strict=False):
        one = _Reader(item, f"{read.source}: option {letter}")
        one.known("text", "right", "reason")
        right = one.field("right", bool, "true or false") if "right" in item else False
        options.append(Option(one.text("text"), right, one.text("reason")))
    if sum(option.right for option in options) != 1:
        read.fail("options", f"has {sum(option.right for option in options)} right ones; it must have one")
    if len({option.text for option in options}) != len(options):
        read.fail("options", "has two of the same text")
    return tuple(options)


def _number(data, question: _Reader) -> Number:
    read = _Reader(data, f"{question.source}: numbers")
    read.known("function", "arguments", "format", "divide")
    name = read.text("function")
    module, _, function = name.rpartition(".")
    found = getattr(importlib.import_module(module), function, None) if module in NUMBER_MODULES else None
    if not inspect.isfunction(found):
        read.fail("function", f"is {name!r}; it must be a function of {' or '.join(NUMBER_MODULES)}")
    arguments = read.field("arguments", dict, "an object")
    for key in PRESETS.keys() & arguments.keys():
        if arguments[key] not in PRESETS[key]:
            read.fail("arguments", f"has {key} {arguments[key]!r}; it must be one of {', '.join(PRESETS[key])}")
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        read.fail("arguments", f"do not fit {name}: {error}")
    divide = data.get("divide", 1)
    if isinstance(divide, bool) or not isinstance(divide, int | float) or divide <= 0:
        read.fail("divide", f"is {divide!r}; it must be a number above 0")
    number = Number(name, arguments, read.text("format"), divide)
    try:
        number.text()
    except (ValueError, TypeError, KeyError, IndexError) as error:
        read.fail("format", f"or arguments do not give a text: {type(error).__name__}: {error}")
    return number


def wrong_numbers(quiz: Quiz) -> list[str]:
    """One sentence for each number that the quiz does not print as it is recomputed; [] if all are right."""
    wrong = []
    for question in quiz.questions:
        shown = question.options[question.right].text if question.is_choice else question.answer
        others = [option.text for option in question.options if not option.right]
        for number in question.numbers:
            text, where = number.text(), f"quiz {quiz.chapter}: question {question.id}: {number.function}"
            if not _stands_in(text, shown):
                wrong.append(f"{where} gives {text}, which the right answer does not say")
            if len(question.numbers) == 1 and any(_stands_in(text, other) for other in others):
                wrong.append(f"{where} gives {text}, which a wrong option says too")
    return wrong


def _stands_in(number: str, text: str) -> bool:
    """Whether the text has the number, not as a piece of a longer one ("2" in "32" or in "2.5")."""
    return re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)", text) is not None


# -- scoring ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempt:
    """What a learner has done with one question. Of options chosen one after the other the first one counts."""

    chosen: tuple[int, ...] = ()
    revealed: bool = False
    ticked: frozenset[int] = frozenset()


def score(question: Question, attempt: Attempt) -> float | None:
    """Between 0 and 1; None if it is not answered yet. An open answer's score is the share of points ticked."""
    if question.is_choice:
        return float(attempt.chosen[0] == question.right) if attempt.chosen else None
    return len(attempt.ticked) / len(question.rubric) if attempt.revealed else None


def record_score(chapter: str, question: str, points: float) -> None:
    """Keep the last score of a question in work/progress.json."""

    def change(progress: dict) -> None:
        progress.setdefault("quiz", {}).setdefault(chapter, {})[question] = round(points, 3)

    update_progress(change)


# -- on a page --------------------------------------------------------------------------------------------------------


def inline_html(text: str) -> str:
    """Plain text with `code` as HTML; an empty line parts paragraphs."""
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text, quote=False))
    return re.sub(r"\n\s*\n", "<br><br>", text).replace("\n", " ")


def section_anchor(section: str) -> str:
    """The fragment under which JupyterLab finds a heading."""
    return "#" + quote(section.replace("`", "").replace(" ", "-"))


def quiz_markdown(quiz: Quiz) -> str:
    """All questions, then all answers, each folded away.

    One line a question and one an answer, as HTML, since not every renderer reads Markdown within <details>. GitHub
    has shown folded text of notebooks unfolded; for its sake the answers stand together, below all questions.
    """
    lines, answers = [], []
    for place, question in enumerate(quiz.questions, 1):
        options = "".join(
            f"<br><b>{letter}</b> {inline_html(option.text)}"
            for letter, option in zip(LETTERS, question.options, strict=False)
        )
        lines.append(f"<p><b>{place}.</b> {inline_html(question.question)}{options}</p>")
        link = f'<a href="{section_anchor(question.section)}">{inline_html(question.section)}</a>'
        answers.append(
            f"<details><summary>Answer {place}</summary>{_answer_html(question)}<p>See: {link}</p></details>"
        )
    return "\n".join([*lines, "<p><b>Answers</b></p>", *answers])


def _answer_html(question: Question) -> str:
    if question.is_choice:
        rows = (
            f"<li><b>{letter}</b> {'Right' if option.right else 'No'}. {inline_html(option.reason)}</li>"
            for letter, option in zip(LETTERS, question.options, strict=False)
        )
        return f"<p><b>{LETTERS[question.right]}</b></p><ul>{''.join(rows)}</ul>"
    points = "".join(f"<li>{inline_html(point)}</li>" for point in question.rubric)
    return f"<p>{inline_html(question.answer)}</p><p>A point for each:</p><ul>{points}</ul>"


def static_quiz(chapter: str | int):
    """What a ``static-fallback`` cell shows: questions and answers, readable on a page that runs nothing."""
    from IPython.display import Markdown

    return Markdown(quiz_markdown(load_quiz(chapter)))


# -- in a widget ------------------------------------------------------------------------------------------------------


def quiz_view(quiz: Quiz, place: int, attempts: dict[str, Attempt]) -> str:
    """What the widget shows of question ``place`` (from 0), as HTML: the model behind the controls."""
    question = quiz.questions[place]
    attempt = attempts.get(question.id, Attempt())
    points = [score(q, attempts.get(q.id, Attempt())) for q in quiz.questions]
    done = [p for p in points if p is not None]
    parts = [
        f"<p><b>Question {place + 1} of {len(quiz.questions)}</b> · score so far {sum(done):g} of {len(done)}</p>"
        f"<p>{inline_html(question.question)}</p>"
    ]
    for i, option in enumerate(question.options):
        line = f"<b>{LETTERS[i]}</b> {inline_html(option.text)}"
        if i in attempt.chosen:  # a mark and a word, so that colour is not needed
            line += f"<br>{'✓ Right.' if option.right else '✗ No.'} <i>{inline_html(option.reason)}</i>"
        parts.append(f"<p>{line}</p>")
    if attempt.revealed and not question.is_choice:
        rubric = "".join(f"<li>{inline_html(point)}</li>" for point in question.rubric)
        parts.append(f"<p><b>Answer.</b> {inline_html(question.answer)}</p><p>Tick the points you had:</p>")
        parts.append(f"<ol>{rubric}</ol>")
    if score(question, attempt) is not None:
        parts.append(f"<p>Section: {inline_html(question.section)}</p>")
    return f"<div style='max-width: 46em; line-height: 1.45'>{''.join(parts)}</div>"


def quiz_widget(chapter: str | int, record: Callable[[str, str, float], None] = record_score):
    """The quiz with buttons: choose an option and read its reason, or look at the answer and tick your points.

    ``record(chapter, question, score)`` is called whenever a score changes; by default it goes to work/progress.json.
    """
    import ipywidgets as w

    quiz = load_quiz(chapter)
    attempts: dict[str, Attempt] = {}
    place = 0
    filling = False  # controls are being set from an attempt, which is no answer

    back, forward = w.Button(description="Back"), w.Button(description="Next")
    options = w.RadioButtons(description="Option:", options=[], style={"description_width": "initial"})
    reveal = w.Button(description="Show answer")
    points = w.VBox([])
    view = w.HTML()

    def current() -> Question:
        return quiz.questions[place]

    def answer(**change) -> None:
        question = current()
        before = attempts.get(question.id, Attempt())
        after = attempts[question.id] = replace(before, **change)
        trouble = ""
        if (now := score(question, after)) is not None and now != score(question, before):
            try:
                record(quiz.chapter, question.id, now)
            except (OSError, ValueError) as error:
                trouble = f"<p>Not recorded: {escape(str(error))}</p>"
        show(trouble)

    def show(trouble: str = "") -> None:
        attempt = attempts.get(current().id, Attempt())
        view.value = quiz_view(quiz, place, attempts) + trouble
        back.disabled, forward.disabled = place == 0, place == len(quiz.questions) - 1
        reveal.layout.display = "none" if current().is_choice or attempt.revealed else ""
        points.layout.display = "" if attempt.revealed else "none"

    def turn(to: int) -> None:
        nonlocal place, filling
        place, filling = to, True
        question, attempt = current(), attempts.get(quiz.questions[to].id, Attempt())
        options.options = [(LETTERS[i], i) for i in range(len(question.options))]
        options.index = attempt.chosen[-1] if attempt.chosen else None
        options.layout.display = "" if question.is_choice else "none"
        points.children = [tick(i, i in attempt.ticked) for i in range(len(question.rubric))]
        filling = False
        show()

    def tick(i: int, ticked: bool) -> w.Checkbox:
        box = w.Checkbox(ticked, description=f"Point {i + 1}", indent=False)

        def changed(event) -> None:
            had = attempts[current().id].ticked
            answer(ticked=had | {i} if event["new"] else had - {i})

        box.observe(changed, "value")
        return box

    def choose(event) -> None:
        chosen = attempts.get(current().id, Attempt()).chosen
        if not filling and event["new"] is not None and event["new"] not in chosen:
            answer(chosen=(*chosen, event["new"]))

    back.on_click(lambda _: turn(place - 1))
    forward.on_click(lambda _: turn(place + 1))
    reveal.on_click(lambda _: answer(revealed=True))
    options.observe(choose, "value")
    turn(0)
    return w.VBox([view, options, reveal, points, w.HBox([back, forward])])


# -- the functions behind the numbers ---------------------------------------------------------------------------------


def forward_passes(output_tokens: int) -> int:
    """Of one request with a KV cache: the prompt's pass gives the first token, every further token takes one."""
    return 1 + (output_tokens - 1)


def kv_slots_used(prompt_tokens: int, output_tokens: int) -> int:
    """Rows of the KV cache that ever hold a token: the last one written is never put through the model."""
    return prompt_tokens + output_tokens - 1


def tokens_computed(prompt_tokens: int, output_tokens: int, kv_cache: bool) -> int:
    """Tokens put through the model: each once with a KV cache, else the whole text again for every new token."""
    if kv_cache:
        return prompt_tokens + output_tokens - 1
    return sum(prompt_tokens + i for i in range(output_tokens))


def kv_bytes(model: ModelConfig, dtype: str, tokens: int) -> int:
    """KV cache of so many tokens."""
    return tokens * kv_bytes_per_token(model, dtype)


def requests_that_fit(model: ModelConfig, dtype: str, slots: int, memory: float) -> int:
    """Requests whose reservation of ``slots`` tokens each fits into ``memory`` bytes."""
    return int(memory // kv_bytes(model, dtype, slots))


def used_share(used: int, reserved: int) -> float:
    """Percent of what was set aside that holds anything."""
    return 100 * used / reserved


def ridge_point(device: Device) -> float:
    """Operations a byte at which arithmetic and memory take equally long."""
    return device.ridge


def tokens_at_ridge(device: Device, itemsize: int) -> float:
    """Tokens in a pass at which arithmetic takes as long as reading the weights: 2 operations a weight and token."""
    return device.ridge * itemsize / 2


def decode_share(model: ModelConfig, device: Device, dtype: str, batch: int, context: int) -> float:
    """Percent of the device's arithmetic that a decode pass can use: ``batch`` requests, ``context`` rows each."""
    return 100 * step_cost(model, [(1, context)] * batch, "flash", dtype).arithmetic_share(device)


def decode_share_limit(model: ModelConfig, device: Device, dtype: str, context: int) -> float:
    """What ``decode_share`` tends to as the batch grows and the weights' bytes are shared by ever more requests."""
    one = step_cost(model, [(1, context)], "flash", dtype)
    return 100 * min(1.0, one.flops / one.kv_bytes / device.ridge)


def static_batch_utilisation(lengths: list[int]) -> float:
    """Percent of a static batch's places that hold a wanted token: mean length over the longest."""
    return 100 * sum(lengths) / (len(lengths) * max(lengths))


def running_sum(weights: list[float]) -> float:
    """l of the online softmax after scores ln(weight), one at a time."""
    m, total = -math.inf, 0.0
    for weight in weights:
        x = math.log(weight)
        m_new = max(m, x)
        total = total * math.exp(m - m_new) + math.exp(x - m_new)
        m = m_new
    return total


ATTENTION_ORDERS = ("naive", "K/V outside", "Q outside")


def traffic_in_nd(order: str, n: int, d: int, block: int = 64) -> float:
    """``attention_traffic`` in matrices of N × d."""
    return attention_traffic(order, n, d, block) / (n * d)


def growth_of_traffic(order: str, n: int, d: int, block: int) -> float:
    """By what factor the traffic grows when N doubles."""
    return attention_traffic(order, 2 * n, d, block) / attention_traffic(order, n, d, block)


def ratio(of: float, to: float) -> float:
    """Of two figures quoted from a paper."""
    return of / to


def naive_intensity(d: int, itemsize: int) -> float:
    """Operations per byte of naive attention for long rows: 4N²d operations, 4N² elements moved."""
    return d / itemsize


def causal_tiles(n: int, block: int, kind: str) -> int:
    """Square tiles of an N × N causal matrix that are "skipped", "diagonal" or "whole"."""
    tiles = -(-n // block)
    return {"skipped": tiles * (tiles - 1) // 2, "diagonal": tiles, "whole": tiles * (tiles - 1) // 2}[kind]


def last_visible_key(row: int, n_q: int, n_k: int) -> int:
    """Causal, aligned bottom right: the last key (from 0) that query ``row`` (from 0) sees."""
    return row + n_k - n_q


def kernel_programs(heads: int, queries: int, block: int) -> int:
    """Programs in the grid of the forward kernel, for one request."""
    return heads * -(-queries // block)


def paged_requests_that_fit(model: ModelConfig, dtype: str, tokens: int, block_size: int, memory: float) -> int:
    """Requests of ``tokens`` tokens each whose blocks fit into ``memory`` bytes."""
    blocks = int(memory // kv_bytes(model, dtype, block_size))
    return blocks // -(-tokens // block_size)


def cache_row(table: list[int], t: int, block_size: int) -> int:
    """Row of the cache in which a sequence's row ``t`` stands."""
    return table[t // block_size] * block_size + t % block_size


def copies_of_samples(n: int, prompt_tokens: int, block_size: int) -> int:
    """Blocks copied until each of n samples of a prompt has written a token: the last holder writes in place.

    The prompt's last token is computed again by each, so none is copied only where that token begins a block.
    """
    return n - 1 if (prompt_tokens - 1) % block_size else 0


def mean_waste(block_size: int) -> float:
    """Slots of a sequence's last block that hold nothing, mean over one block's life."""
    return (block_size - 1) / 2


def recompute_ms(model: ModelConfig, device: Device, dtype: str, tokens: int) -> float:
    """Milliseconds to compute so many tokens' KV again in a pass of their own, by the roofline."""
    return 1e3 * step_cost(model, [(tokens, tokens)], "flash", dtype).seconds(device)


def swap_ms(model: ModelConfig, dtype: str, tokens: int, gb_per_second: float) -> float:
    """Milliseconds to bring so many tokens' KV to host memory and back, by its bytes alone."""
    return 2e3 * kv_bytes(model, dtype, tokens) / (gb_per_second * 1e9)


def static_passes(lengths: list[int], seats: int) -> int:
    """Passes of static batching, for requests that come together."""
    return sum(max(lengths[start : start + seats]) for start in range(0, len(lengths), seats))


def iteration_passes(lengths: list[int], seats: int) -> int:
    """The same if whoever waits takes the seat that is free first."""
    ends = [0] * seats
    for length in lengths:
        ends[ends.index(min(ends))] += length
    return max(ends)


def admitted_at_once(n_slots: int, max_tokens: int, max_bs: int) -> int:
    """Requests that Orca's Algorithm 1 lets run together, if each reserves ``max_tokens`` slots."""
    return min(max_bs, n_slots // max_tokens)


def padded_rows(new: list[int]) -> int:
    """Rows of a batch whose requests are padded to the longest."""
    return len(new) * max(new)


def chunk_passes(prompt: int, budget: int, decoding: int) -> int:
    """Passes that compute a prompt, alone among so many that decode, under a budget of tokens."""
    return -(-prompt // (budget - decoding))


def rows_again(prompt: int, chunk: int) -> int:
    """KV rows that the chunks of a prompt read of chunks before them."""
    return sum(range(0, prompt, chunk))


def budget_for(step_ms: dict[str, float], target: float) -> int:
    """The largest budget whose pass, and every smaller one's, takes at most ``target`` milliseconds."""
    kept = 0
    for budget, ms in sorted((int(name), ms) for name, ms in step_ms.items()):
        if ms > target:
            break
        kept = budget
    return kept


def tree_edges(prompts: list[str]) -> int:
    """Edges of the radix tree of some prompts, a letter a token."""
    return len(_edges(prompts))


def tree_tokens(prompts: list[str]) -> int:
    """Tokens on those edges."""
    return sum(_edges(prompts))


def best_hit_rate(prompts: list[str]) -> float:
    """The best possible, in percent: 1 − Σ|edges| / Σ|prompts|."""
    return 100 * (1 - tree_tokens(prompts) / sum(map(len, prompts)))


def _edges(prompts: list[str]) -> list[int]:
    from minillm.memory import prefix_tree

    root = prefix_tree.TreeNode()
    for prompt in prompts:
        prefix_tree.insert(root, prompt)
    return [len(node.tokens) for node in prefix_tree.nodes(root)]


def tokens_beyond_blocks(shared: int, block_size: int) -> int:
    """Tokens of a shared beginning that whole blocks leave out."""
    return shared % block_size
