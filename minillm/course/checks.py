"""What a lab's check cells are written with: compare, and say what most likely went wrong.

    check = Check("0.1", reread='chapters/00_start_here.ipynb, "How much of the memory held anything?"')
    check.call(kv_bytes_per_token, model, 2, want=819_200, given="OPT-13B in fp16")

A failure says four things: the input; got and wanted at the first difference; the likely mistake, found by running
the stored wrong versions of ``solutions/wrong/`` on the same input; what to reread.
"""

from __future__ import annotations

import copy
import math
import runpy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

WRONG = Path(__file__).resolve().parents[2] / "solutions" / "wrong"
# Of processor time. Stored versions that would take longer to try are left out: an answer without a diagnosis is
# better than one that the grader has stopped waiting for.
DIAGNOSIS_SECONDS = 5.0


class CheckFailed(AssertionError):
    """A wrong answer. In a notebook its message stands alone: a traceback into the checks would teach nothing."""

    def _render_traceback_(self) -> list[str]:  # IPython's own hook
        return [str(self)]


@dataclass(frozen=True)
class Mistake:
    """A stored wrong version: ``name`` is what the learner calls it, ``check`` the check that it must lose."""

    exercise: str
    name: str
    check: str
    says: str
    version: Callable


def mistake(exercise: str, name: str, check: str, says: str) -> Callable[[Callable], Mistake]:
    """Decorator for a function or class of ``solutions/wrong/labNN.py``."""
    return lambda version: Mistake(exercise, name, check, says, version)


def load_mistakes(lab: str) -> dict[str, Mistake]:
    """The stored wrong versions of a lab, by the name each has in its file."""
    path = WRONG / f"lab{lab}.py"
    found = runpy.run_path(str(path)) if path.exists() else {}
    return {name: value for name, value in found.items() if isinstance(value, Mistake)}


class Check:
    """The check of one exercise; several calls in a row are inputs of growing difficulty."""

    def __init__(self, exercise: str, reread: str, rtol: float = 1e-5, atol: float = 1e-6):
        self.exercise, self.reread = exercise, reread
        self.tolerance = {"rtol": rtol, "atol": atol}
        self._passed: list[tuple[Callable, object]] = []

    def call(self, function: Callable, *args, want, given: str | None = None) -> None:
        """Raise CheckFailed unless ``function(*args)`` is ``want``; an error of the function's own passes through.

        Every version gets its own copy of ``args``: an answer that writes into them must not spoil the diagnosis.
        """
        __tracebackhide__ = True

        def scenario(version):
            __tracebackhide__ = True
            return version(*copy.deepcopy(args))

        name = getattr(function, "__name__", "f")
        self.run(scenario, function, want=want, given=given or f"{name}({', '.join(map(show, args))})")

    def run(self, scenario: Callable, version: Callable, want, given: str, hide: bool = False) -> None:
        """The same for anything that needs more than one call: ``scenario(version)`` must return ``want``.

        ``hide``: the message doesn't tell what that is, where to know it would be to have the answer.
        """
        __tracebackhide__ = True
        try:
            got = scenario(version)
        except Exception as raised:
            error = own_error(raised)
            likely = self._likely(scenario, version, error=error)
            if not likely:
                raise error from None
            outcome = f"got {type(error).__name__}: {error}; wanted {show(want)}"
        else:
            difference = first_difference(got, want, **self.tolerance)
            if difference is None:
                self._passed.append((scenario, want))
                return
            likely = self._likely(scenario, version, got=got)
            if hide:
                outcome = f"got {show(got)}; wanted the right one"
            else:
                where, got, want = difference
                outcome = f"got {show(got)}; wanted {show(want)}" + (f" (first difference at {where})" if where else "")
        likely = " Or: ".join(likely) or "none of those that are known here."
        raise CheckFailed(
            f"Exercise {self.exercise} fails for {given}\n{outcome}\nLikely mistake: {likely}\nReread: {self.reread}"
        ) from None

    def entries(self, version: Callable, want: dict, given: str, hide: bool = False) -> None:
        """An answer that is a dict, each entry a check of its own: a mistake in one says nothing of another. The first
        that is wrong is explained, the others are named."""
        __tracebackhide__ = True
        got = version()
        if not isinstance(got, dict):
            raise CheckFailed(
                f"Exercise {self.exercise} fails for {given}\ngot {show(got)}; wanted a dict\n"
                f"Likely mistake: no dict was returned. Its keys: {', '.join(map(repr, want))}.\nReread: {self.reread}"
            )
        wrong: dict[str, str] = {}
        for name, value in want.items():

            def entry(answer, name=name):
                return answer().get(name, "nothing")

            try:
                check = Check(self.exercise, self.reread, **self.tolerance)
                check.run(entry, version, value, f"{name!r}, {given}", hide)
            except CheckFailed as failed:
                wrong[name] = str(failed)
        if wrong:
            first, *others = wrong
            more = f"\nWrong as well: {', '.join(map(repr, others))}" if others else ""
            raise CheckFailed(wrong[first] + more)

    def complaints(self, version: Callable, holds: dict[str, Callable], given: Callable) -> None:
        """An answer that is an input for others: none of some complaints may hold of it, ``holds[complaint](answer)``.

        They are asked in turn, so a later one may count on the earlier. ``given(answer)`` is the input in words.
        """
        __tracebackhide__ = True
        try:
            shown = given(version())
        except Exception:  # an error of the learner's is raised again below, and told as others are
            shown = "your answer"
        for complaint, applies in holds.items():

            def scenario(version, complaint=complaint, applies=applies):
                __tracebackhide__ = True
                return complaint if applies(version()) else "no complaint"

            self.run(scenario, version, want="no complaint", given=shown)

    def _likely(self, scenario: Callable, version: Callable, got=None, error: Exception | None = None) -> list[str]:
        """What the stored wrong versions say that behave like this one, here and on the inputs that went well."""
        if isinstance(error, NotImplementedError):
            return []
        until = time.process_time() + DIAGNOSIS_SECONDS
        lab = f"{int(self.exercise.split('.')[0]):02}"
        name = getattr(version, "__name__", None)

        def gives(wrong: Callable, scenario: Callable, value, error=None) -> bool:
            try:
                return first_difference(scenario(wrong), value, **self.tolerance) is None and error is None
            except Exception as raised:
                return type(own_error(raised)) is type(error)

        return [
            known.says
            for known in load_mistakes(lab).values()
            if (known.exercise, known.name) == (self.exercise, name)
            and time.process_time() < until
            and all(gives(known.version, *passed) for passed in self._passed)
            and gives(known.version, scenario, got, error)
        ]


def own_error(error: Exception) -> Exception:
    """The error that code of the learner's raised inside the engine, where the engine made one of its own of it."""
    while type(error).__module__.startswith("minillm.") and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def first_difference(got, want, rtol: float = 0.0, atol: float = 0.0, where: str = "") -> tuple | None:
    """``(where, got, wanted)`` at the first place where two values differ, or None.

    Numbers, tensors and arrays are compared by value, not by dtype, those with a fraction within the tolerance; in
    arrays NaN is NaN, since a mistake is known by it. Tuples and lists are alike.
    """
    if _is_array(got) or _is_array(want):
        if not (_is_array(got) and _is_array(want)) or tuple(got.shape) != tuple(want.shape):
            return where, got, want
        return _first_unequal_element(got, want, rtol, atol, where)
    if isinstance(want, list | tuple) and isinstance(got, list | tuple):
        for i, (g, w) in enumerate(zip(got, want, strict=False)):
            if difference := first_difference(g, w, rtol, atol, f"{where}[{i}]"):
                return difference
        return None if len(got) == len(want) else (f"{where or 'its'} length", len(got), len(want))
    if isinstance(want, dict) and isinstance(got, dict):
        for key in [*want, *(key for key in got if key not in want)]:
            if key not in got or key not in want:
                return f"{where}[{key!r}]", got.get(key, "nothing"), want.get(key, "nothing")
            if difference := first_difference(got[key], want[key], rtol, atol, f"{where}[{key!r}]"):
                return difference
        return None
    if isinstance(want, float) or isinstance(got, float):
        numbers = isinstance(got, int | float) and isinstance(want, int | float)
        same = numbers and (got == want or abs(got - want) <= atol + rtol * abs(want))
    else:
        same = got == want and isinstance(got, bool) == isinstance(want, bool)
    return None if same else (where, got, want)


def _is_array(value) -> bool:
    return hasattr(value, "shape") and hasattr(value, "tolist")


def _first_unequal_element(got, want, rtol, atol, where):
    import numpy as np

    def plain(x):
        x = x.detach().cpu() if hasattr(x, "detach") else x
        fraction = x.is_floating_point() if hasattr(x, "is_floating_point") else np.asarray(x).dtype.kind == "f"
        return np.asarray(x.double() if fraction and hasattr(x, "double") else x)  # NumPy has no bfloat16

    g, w = plain(got), plain(want)
    exact = g.dtype.kind != "f" and w.dtype.kind != "f"
    same = g == w if exact else np.isclose(g, w, rtol=rtol, atol=atol, equal_nan=True)
    if same.all():
        return None
    index = tuple(int(i) for i in np.argwhere(~same)[0])
    return f"{where}[{', '.join(map(str, index))}]" if index else where, g[index].item(), w[index].item()


def show(value) -> str:
    """A value in a sentence: whole numbers with commas, arrays by shape, long things cut."""
    if _is_array(value) and tuple(value.shape):
        return f"shape {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = f"{value:.7g}" if isinstance(value, float) and math.isfinite(value) else repr(value)
    return text if len(text) <= 120 else text[:117] + "…"
