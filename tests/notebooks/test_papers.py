"""The paper map: data, drawing and widget."""

import re

import pytest

from minillm.course.papers import AXES, EDGES, GUIDE, PAPERS, describe, map_svg, map_widget


def test_every_chapter_has_a_paper_and_guide_numbers_are_each_used_once():
    assert list(PAPERS) == list(range(16))
    assert sorted(p.guide for n, p in PAPERS.items() if n) == list(range(1, 16)) and len(GUIDE) == 15
    # The guide's order with FlashAttention brought to the front; from 06 on the numbers agree.
    assert [PAPERS[n].guide for n in range(1, 7)] == [5, 1, 2, 3, 4, 6]
    assert all(PAPERS[n].guide == n for n in range(6, 16))
    assert all(set(p.axis) <= set(AXES) and p.axis for n, p in PAPERS.items() if n)
    laps = [PAPERS[n].lap for n in range(16)]
    assert laps.count("first, must") == 7 and laps.count("first, optional") == 3 and laps.count("second") == 5


def test_edges_lead_forward_and_every_paper_answers_something():
    assert len(EDGES) == len(set(EDGES)) == 23
    assert all(a < b for a, b, _ in EDGES)
    assert {b for _, b, _ in EDGES} == set(range(1, 16))


def test_map_draws_every_paper_and_edge_and_dims_what_is_off_the_axis():
    svg = map_svg()
    assert svg.count("<g id='pm") == 16 and svg.count("class='edge e") == 23 and "dim" not in svg.split("</style>")[1]
    memory = map_svg("memory", picked=2)
    assert memory.count("<g id='pm2' class='picked'") == 1
    assert memory.count("class='edge lit") == sum(2 in (a, b) for a, b, _ in EDGES)
    for n, paper in PAPERS.items():
        dimmed = f"<g id='pm{n}' class='dim'" in memory
        assert dimmed == ("memory" not in paper.axis)


def test_map_on_a_page_has_the_colours_of_the_page_s_theme():
    colours = re.findall(r"(?:fill|stroke): ([^;}]+);", map_svg().split(".pm:has")[0])
    assert len(colours) > 10
    assert all(colour == "none" or colour.startswith("var(--jp-") for colour in colours)


def test_picking_a_paper_shows_its_problem_method_code_and_arrows():
    panel = map_widget()
    panel.controls["paper"].value = 3
    for line in describe(3):
        assert line.replace("'", "&#x27;") in panel.view.value
    assert any("answers 02: room for many" in line for line in describe(3))
    assert any("leaves for 04" in line for line in describe(3))
    panel.controls["axis"].value = "parallelism"
    assert "class='dim'" in panel.view.value


@pytest.mark.parametrize("chapter", PAPERS)
def test_descriptions_are_sentences(chapter):
    paper = PAPERS[chapter]
    assert all(text.endswith(".") for text in (paper.problem, paper.method))
