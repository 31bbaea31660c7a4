"""The softmax stepper (chapter 01): a row of weights read one by one, old work rescaled and never lost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

import ipywidgets

from minillm.course.widgets import Panel, table


@dataclass(frozen=True)
class Step:
    """State after one number, or after merging two workers. Weights are exp(score), so that m can be read off."""

    worker: str  # "A", "B" or "A+B"
    seen: str  # the weight read, or "merge"
    m: float  # the largest weight so far; what scores are taken relative to
    rescale: float  # factor on the old l and acc
    l: float  # noqa: E741  sum of weight / m
    acc: float  # sum of weight / m · value

    @property
    def output(self) -> float:
        return self.acc / self.l


def softmax_steps(weights: list[float], values: list[float], workers: int = 1, forget: bool = False) -> list[Step]:
    """The states of online softmax over a row. ``forget``: old l and acc are kept as they are when m grows.

    With two workers, each reads its half and the last step merges them. ValueError for an empty row, weights that
    are not positive, or as many values as not weights.
    """
    if not weights:
        raise ValueError("the row is empty; give at least one weight")
    if len(values) != len(weights):
        raise ValueError(f"{len(weights)} weights and {len(values)} values; give one value for each weight")
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"weight {weight:g} is not above 0; weights are exponentials of scores")
    half = math.ceil(len(weights) / workers)
    steps, ends = [], []
    for worker, start in zip("AB", range(0, len(weights), half), strict=False):
        m, l, acc = 0.0, 0.0, 0.0  # noqa: E741
        for weight, value in zip(weights[start : start + half], values[start : start + half], strict=True):
            m_new = max(m, weight)
            rescale = 1.0 if forget else m / m_new
            l, acc, m = l * rescale + weight / m_new, acc * rescale + weight / m_new * value, m_new  # noqa: E741
            steps.append(Step(worker, f"{weight:g}", m, rescale, l, acc))
        ends.append(steps[-1])
    if len(ends) == 2:
        a, b = ends
        m = max(a.m, b.m)
        scale_a, scale_b = (1.0, 1.0) if forget else (a.m / m, b.m / m)
        merged = Step(
            "A+B", "merge", m, min(scale_a, scale_b), a.l * scale_a + b.l * scale_b, a.acc * scale_a + b.acc * scale_b
        )
        steps.append(merged)
    return steps


def exact(weights: list[float], values: list[float]) -> tuple[float, float]:
    """(l relative to the largest weight, output), with the whole row in hand."""
    total = sum(weights)
    return total / max(weights), sum(w * v for w, v in zip(weights, values, strict=True)) / total


def stepper_rows(weights, values, workers=1, forget=False) -> list[dict]:
    """The steps as lines to print."""
    return [
        {
            "worker": step.worker,
            "reads": step.seen,
            "largest m": f"{step.m:g}",
            "old × ": f"{step.rescale:g}",
            "l": f"{step.l:g}",
            "acc": f"{step.acc:g}",
            "acc / l": f"{step.output:.4g}",
        }
        for step in softmax_steps(weights, values, workers, forget)
    ]


PRESETS = (
    ("4, 1, 8, 2", [4, 1, 8, 2], [1, 0, 0, 1], {}),
    ("falling: 8, 4, 2, 1", [8, 4, 2, 1], [0, 1, 1, 0], {}),
    ("rising: 1, 2, 4, 8", [1, 2, 4, 8], [0, 1, 1, 0], {}),
    ("rising, two workers", [1, 2, 4, 8], [0, 1, 1, 0], {"workers": 2}),
    ("falling, rescale forgotten", [8, 4, 2, 1], [0, 1, 1, 0], {"forget": True}),
    ("rising, rescale forgotten", [1, 2, 4, 8], [0, 1, 1, 0], {"forget": True}),
)


def preset_rows() -> list[dict]:
    """What the widget shows for some rows: the same weights and values in other orders, and the answer to each."""
    rows = []
    for name, weights, values, options in PRESETS:
        steps = softmax_steps(weights, values, **options)
        corrections = sum(step.rescale not in (0, 1) for step in steps)
        rows.append(
            {"row": name, "corrections": corrections, "l": f"{steps[-1].l:g}", "output": f"{steps[-1].output:.4g}"}
        )
    return rows


def numbers(text: str) -> list[float]:
    """ "4, 1, 8, 2" -> floats; ValueError names what is no number."""
    parsed = []
    for word in text.replace(",", " ").split():
        try:
            parsed.append(float(word))
        except ValueError:
            raise ValueError(f"{word!r} is no number") from None
    return parsed


def stepper_widget() -> Panel:
    """Step through a row; find an order without a correction, one with three; forget the rescale."""
    step = ipywidgets.IntSlider(value=1, min=1, max=16, description="step")

    def draw(weights: str, values: str, workers: int, forget: bool, step: int) -> str:
        row, of = numbers(weights), numbers(values)
        rows = stepper_rows(row, of, workers, forget)
        at = min(step, len(rows)) - 1
        now = softmax_steps(row, of, workers, forget)[at]
        l_true, o_true = exact(row, of)
        corrections = sum(float(r["old × "]) not in (0, 1) for r in rows[: at + 1])
        line = f"<p>l = <b class='minillm-readout'>{now.l:g}</b> after {at + 1} of {len(rows)} steps; "
        line += f"corrections so far: {corrections}</p>"
        if at + 1 == len(rows):
            right = math.isclose(now.l, l_true) and math.isclose(now.output, o_true)
            verdict = "the same" if right else f"<b>not the same</b>: it should be {escape(f'{o_true:.4g}')}"
            line += f"<p>Output {now.output:.4g}; with the whole row in hand {o_true:.4g}: {verdict}.</p>"
        return table(rows[: at + 1], mark=at) + line

    back, forward = ipywidgets.Button(description="Back"), ipywidgets.Button(description="Step")
    back.on_click(lambda _: setattr(step, "value", max(step.min, step.value - 1)))
    forward.on_click(lambda _: setattr(step, "value", min(step.max, step.value + 1)))
    return Panel(
        draw,
        {
            "weights": ipywidgets.Text(value="4, 1, 8, 2", description="weights", continuous_update=False),
            "values": ipywidgets.Text(value="1, 0, 0, 1", description="values", continuous_update=False),
            "workers": ipywidgets.ToggleButtons(options=[1, 2], description="workers"),
            "forget": ipywidgets.Checkbox(value=False, description="forget the rescale"),
            "step": step,
        },
        extra=[back, forward],
    )
