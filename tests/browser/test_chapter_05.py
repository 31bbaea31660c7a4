"""Chapter 05's tree in a browser: actions are typed, buttons pressed, the order changed; other cells run elsewhere."""

import json
from pathlib import Path

import pytest

from minillm.course.radix_tree import ORDERS, TWO_PAIRS

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]
NAME = "05_radixattention.ipynb"
CHAPTER = Path(__file__).parents[2] / "chapters" / NAME


def test_the_tree_answers_to_what_is_typed(open_chapter):
    from playwright.sync_api import expect

    notebook = json.loads(CHAPTER.read_text(encoding="utf-8"))
    notebook["cells"] = [cell for cell in notebook["cells"] if cell["id"] in ("evict-after", "tree-widget")]
    chapter = open_chapter(NAME, notebook)
    chapter.run_all()
    assert chapter.errors() == []
    assert chapter.broken_images() == []

    tree = chapter.cell("tree-widget")
    readout, actions, room = (
        tree.locator(".minillm-readout"),
        tree.get_by_label("actions"),
        tree.get_by_role("slider"),
    )
    expect(readout).to_have_text("0%")
    actions.fill("run you are a cat, ask you are the dog")
    actions.press("Tab")
    expect(readout).to_have_text("25%")
    expect(tree.locator("svg text", has_text="locked ×1")).to_have_count(2)
    for pressed in (1, 2, 3):  # the dog's two words, and nothing more
        tree.get_by_role("button", name="Evict 1").click()
        expect(actions).to_have_value("run you are a cat, ask you are the dog" + ", evict 1" * pressed)
    expect(tree).to_contain_text("Words kept: 4 of 24; edges: 2.")

    actions.fill(TWO_PAIRS)
    actions.press("Tab")
    expect(readout).to_have_text("38%")
    room.focus()
    room.press("Home")  # 3 words
    expect(tree).to_contain_text("Not possible:")
    room.press("ArrowRight")
    expect(readout).to_have_text("0%")
    tree.get_by_role("button", name=ORDERS[1]).click()
    expect(readout).to_have_text("38%")
    assert chapter.complaints == []
