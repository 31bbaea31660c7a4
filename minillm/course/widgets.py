"""Widgets: a pure function of a few parameters, and a thin shell of labelled controls and one HTML view round it.

The function returns plain data and is what tests and the static cell below every widget use; the shell only reads
controls, calls it and draws. Values that make no sense are refused in the view, with the function's own sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import ipywidgets


class Panel(ipywidgets.VBox):
    """Controls above a view. ``draw(**values)`` gives the view's HTML; ValueError becomes a sentence in it.

    controls: name -> ipywidgets control with a ``value``; names are the parameters of ``draw``. ``extra`` widgets
    (buttons) stand beside them and change controls, never the view. Every control has a ``description``, its visible
    label; ipywidgets ties it to inputs and lists, but the handle of a slider has no other name than what stands there.
    """

    def __init__(self, draw: Callable[..., str], controls: dict[str, ipywidgets.Widget], extra=()):
        self.draw, self.controls = draw, controls
        self.view = ipywidgets.HTML()
        for control in controls.values():
            control.style.description_width = "initial"
            control.observe(lambda _: self.update(), names="value")
        bar = ipywidgets.HBox([*controls.values(), *extra], layout=ipywidgets.Layout(flex_flow="row wrap"))
        super().__init__([bar, self.view])
        self.update()

    def update(self) -> None:
        """Draw the view for the controls' present values."""
        try:
            self.view.value = self.draw(**{name: control.value for name, control in self.controls.items()})
        except ValueError as error:
            self.view.value = f"<p class='minillm-refused'><b>Not possible:</b> {escape(str(error))}</p>"


def table(rows: list[dict], caption: str = "", mark: int | None = None) -> str:
    """An HTML table of rows with equal keys; row ``mark`` is set off in bold and by an arrow."""
    if not rows:
        return ""
    head = "".join(f"<th style='text-align:right;padding:0 .6em'>{escape(str(name))}</th>" for name in rows[0])
    body = []
    for i, row in enumerate(rows):
        weight = "font-weight:bold" if i == mark else ""
        cells = "".join(
            f"<td style='text-align:right;padding:0 .6em;{weight}'>{escape(str(value))}</td>" for value in row.values()
        )
        body.append(f"<tr><td>{'▶' if i == mark else ''}</td>{cells}</tr>")
    title = f"<caption style='text-align:left'>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<tr><th></th>{head}</tr>{''.join(body)}</table>"


def text_table(rows: list[dict]) -> str:
    """The same rows as text, for the static cells that readers without a kernel see."""
    if not rows:
        return ""
    names = list(rows[0])
    cells = [[str(name) for name in names], *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
