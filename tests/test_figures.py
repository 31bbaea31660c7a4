"""Every figure is what its script draws: regenerating gives no diff."""

import runpy
from pathlib import Path

import pytest

FIGURES = Path(__file__).parents[1] / "figures"


@pytest.mark.parametrize("script", sorted(FIGURES.glob("*.py")), ids=lambda path: path.stem)
def test_stored_figure_is_what_the_script_draws(script):
    drawn = runpy.run_path(str(script))["draw"]()
    assert script.with_suffix(".svg").read_text(encoding="utf-8") == drawn
    assert "<title" in drawn  # what a screen reader says


def test_every_figure_has_a_script():
    assert {p.stem for p in FIGURES.glob("*.svg")} == {p.stem for p in FIGURES.glob("*.py")}
