"""Quizzes in a terminal: one chapter's questions in order, or an interview that mixes chapters.

Both talk through two functions, ``ask`` (a line, or None when there are no more) and ``say``, so a pipe, a terminal
and a test are the same to them.
"""

from __future__ import annotations

import random
import re
import shutil
import textwrap
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from minillm.course.progress import course_root
from minillm.course.quiz import LETTERS, Attempt, Question, Quiz, record_score, score

# A missed question comes back after so many others, where there are so many.
COMES_BACK_AFTER = 3
# An open answer with less than this share of its points counts as missed.
MISSED_BELOW = 0.5


@dataclass
class Result:
    """First scores by (chapter, question), in the order asked; what was missed; what was right the second time."""

    asked: int = 0  # questions that were to be asked
    scores: dict[tuple[str, str], float] = field(default_factory=dict)
    missed: list[tuple[Quiz, Question]] = field(default_factory=list)
    mended: int = 0

    @property
    def total(self) -> float:
        return sum(self.scores.values())


def parse_chapters(text: str, there: list[str]) -> list[str]:
    """ "1-7" or "0,2,5-7" -> those of the chapters that have a quiz. ValueError for another form, or if none has."""
    wanted: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,2})\s*(?:-\s*(\d{1,2})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not 0 <= first <= last <= 15:
            raise ValueError(f"--chapters {text!r} is not understood; write 1-7 or 0,2,5-7, with chapters 0 to 15")
        wanted |= set(range(first, last + 1))
    chapters = [chapter for chapter in there if int(chapter) in wanted]
    if not chapters:
        raise ValueError(f"no chapter of {text!r} has a quiz yet; those that have one: {', '.join(there) or 'none'}")
    return chapters


def draw_questions(quizzes: list[Quiz], count: int, seed: int | None = None) -> list[tuple[Quiz, Question]]:
    """``count`` different questions (all, if there are fewer), as evenly from the chapters as they allow, mixed."""
    if count < 1:
        raise ValueError(f"an interview of {count} questions is none; ask for at least 1")
    rng = random.Random(seed)
    piles = [rng.sample([(quiz, question) for question in quiz.questions], len(quiz.questions)) for quiz in quizzes]
    rng.shuffle(piles)
    drawn = []
    while len(drawn) < count and any(piles):
        for pile in piles:
            if pile and len(drawn) < count:
                drawn.append(pile.pop())
    rng.shuffle(drawn)
    return drawn


def hold(
    questions: list[tuple[Quiz, Question]],
    ask: Callable[[str], str | None],
    say: Callable[[str], None],
    record: Callable[[str, str, float], None] = record_score,
    bring_back: bool = True,
) -> Result:
    """Ask all questions, each missed one a second time later on, and print the score.

    Ends early, with the score so far, when there is no more input or the learner says q. The first score of a
    question counts; ``record`` gets the last.
    """
    result = Result(asked=len(questions))
    queue = deque((quiz, question, False) for quiz, question in questions)
    while queue:
        quiz, question, again = queue.popleft()
        place = "again" if again else f"{len(result.scores) + 1} of {len(questions)}"
        say(f"\n{place} · chapter {quiz.chapter}, {quiz.title}\n")
        say(_wrap(question.question))
        attempt = _ask_choice(question, ask, say) if question.is_choice else _ask_open(question, ask, say)
        if attempt is None:
            break
        points = score(question, attempt) or 0.0
        record(quiz.chapter, question.id, points)
        missed = points < (1 if question.is_choice else MISSED_BELOW)
        if again:
            result.mended += not missed
            continue
        result.scores[quiz.chapter, question.id] = points
        if missed:
            result.missed.append((quiz, question))
            say(_wrap(f"Read again: {where(quiz.chapter, question.section)}"))
            if bring_back:
                queue.insert(min(COMES_BACK_AFTER, len(queue)), (quiz, question, True))
    _report(result, say, bring_back)
    return result


def _ask_choice(question: Question, ask, say) -> Attempt | None:
    letters = LETTERS[: len(question.options)]
    for letter, option in zip(letters, question.options, strict=True):
        say(_wrap(f"{letter}) {option.text}", indent="   "))
    while True:
        line = ask(f"[{'/'.join(letters)}, Enter: I don't know, q: stop] ")
        if line is None or line == "q":
            return None
        if line == "" or (len(line) == 1 and line.lower() in letters):
            break
        say(f"{line!r} is none of {', '.join(letters)}.")
    right = question.options[question.right]
    if line == "":
        say(_wrap(f"It is {letters[question.right]}. {right.reason}"))
        return Attempt(chosen=(-1,))  # answered, and no option's index
    chosen = letters.index(line.lower())
    option = question.options[chosen]
    say(_wrap(f"{'Right' if option.right else 'No'}. {option.reason}"))
    if not option.right:
        say(_wrap(f"It is {letters[question.right]}. {right.reason}"))
    return Attempt(chosen=(chosen,))


def _ask_open(question: Question, ask, say) -> Attempt | None:
    line = ask("[answer aloud or write a line; Enter shows ours, q: stop] ")
    if line is None or line == "q":
        return None
    say(_wrap(question.answer))
    for place, point in enumerate(question.rubric, 1):
        say(_wrap(f"{place}) {point}", indent="   "))
    while True:
        line = ask("[which points had you? such as 1 3, or all; Enter: none, q: stop] ")
        if line is None or line == "q":
            return None
        ticked = parse_points(line, len(question.rubric))
        if ticked is not None:
            break
        say(f"{line!r} is not understood; the points are 1 to {len(question.rubric)}.")
    say(f"{len(ticked)} of {len(question.rubric)} points")
    return Attempt(revealed=True, ticked=ticked)


def parse_points(line: str, count: int) -> frozenset[int] | None:
    """ "1 3", "1,3" or "all" -> indices from 0; "" is none of them. None if the line is not understood."""
    words = line.replace(",", " ").split()
    if words == ["all"]:
        return frozenset(range(count))
    if any(not word.isdecimal() or not 1 <= int(word) <= count for word in words):
        return None
    return frozenset(int(word) - 1 for word in words)


def where(chapter: str, section: str) -> str:
    """A section as a terminal can name it: the notebook's path and its heading."""
    root = course_root()
    notebook = next(iter(sorted((root / "chapters").glob(f"{chapter}_*.ipynb"))), None)
    return f"{notebook.relative_to(root).as_posix() if notebook else f'chapter {chapter}'}, section “{section}”"


def _report(result: Result, say, bring_back: bool) -> None:
    if not result.scores:
        say("\nNo question was answered.")
        return
    say(f"\nScore {result.total:.3g} of {len(result.scores)}.")
    chapters = sorted({chapter for chapter, _ in result.scores})
    if len(chapters) > 1:
        for chapter in chapters:
            points = [value for (of, _), value in result.scores.items() if of == chapter]
            say(f"  chapter {chapter}: {sum(points):.3g} of {len(points)}")
    if len(result.scores) < result.asked:
        say(f"Stopped after {len(result.scores)} of {result.asked} questions.")
    if result.missed:
        say(f"Missed {len(result.missed)}" + (f", {result.mended} right the second time." if bring_back else "."))
        for place in dict.fromkeys(where(quiz.chapter, question.section) for quiz, question in result.missed):
            say(f"  read again: {place}")


def terminal() -> tuple[Callable[[str], str | None], Callable[[str], None]]:
    """``ask`` and ``say`` over standard input and output."""

    def ask(prompt: str) -> str | None:
        try:
            return input(prompt).strip()
        except EOFError:
            print()
            return None

    return ask, print


def _wrap(text: str, indent: str = "") -> str:
    width = min(100, shutil.get_terminal_size().columns)
    return "\n\n".join(_paragraphs(text, width, indent))


def _paragraphs(text: str, width: int, indent: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        yield textwrap.fill(
            paragraph,
            width,
            initial_indent=indent,
            subsequent_indent=indent * 2,
            break_long_words=False,  # paths stay whole, to be copied
            break_on_hyphens=False,
        )
