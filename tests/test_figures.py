"""Every figure is what its script draws: regenerating gives no diff."""

import re
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

FIGURES = Path(__file__).parents[1] / "figures"


@pytest.mark.parametrize("script", sorted(FIGURES.glob("*.py")), ids=lambda path: path.stem)
def test_stored_figure_is_what_the_script_draws(script):
    drawn = runpy.run_path(str(script))["draw"]()
    assert script.with_suffix(".svg").read_text(encoding="utf-8") == drawn
    assert "<title" in drawn  # what a screen reader says


@pytest.mark.parametrize("figure", sorted(FIGURES.glob("*.svg")), ids=lambda path: path.stem)
def test_figure_paints_the_surface_it_stands_on(figure):
    """So that it can be read on a dark page of a light system and the other way round."""
    root = ET.parse(figure).getroot()
    first = next(part for part in root if part.tag.rpartition("}")[2] not in ("title", "style", "defs"))
    assert first.get("class") == "surface"
    assert root.get("viewBox") == f"0 0 {first.get('width')} {first.get('height')}"
    light, dark = figure.read_text(encoding="utf-8").split("@media (prefers-color-scheme: dark)")
    ground, ink = (
        [_brightness(re.search(rule + r" {[^}]*fill: #(\w+)", part)[1]) for part in (light, dark)]
        for rule in (r"\.surface", r"\btext")
    )
    assert ground[0] - ink[0] > 0.8 and ink[1] - ground[1] > 0.7


def _brightness(colour: str) -> float:
    return sum(int(colour[i : i + 2], 16) for i in (0, 2, 4)) / (3 * 255)


def test_every_figure_has_a_script():
    assert {p.stem for p in FIGURES.glob("*.svg")} == {p.stem for p in FIGURES.glob("*.py")}
