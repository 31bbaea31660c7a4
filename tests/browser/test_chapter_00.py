"""Chapter 00 as a reader has it: the map of papers tells of the paper that is picked."""

import pytest

from minillm.course.papers import PAPERS, describe

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


def test_the_map_tells_of_the_paper_that_is_picked(open_chapter):
    from playwright.sync_api import expect

    chapter = open_chapter("00_start_here.ipynb")
    chapter.run_all()
    assert chapter.errors() == []

    papers = chapter.cell("map-widget")
    expect(papers).to_contain_text(describe(1)[0])
    papers.locator("select").select_option(label=f"06 {PAPERS[6].name}")
    expect(papers).to_contain_text(describe(6)[0])
    expect(papers).not_to_contain_text(describe(1)[0])
    assert chapter.complaints == []
