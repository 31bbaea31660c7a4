"""Chapter 01 as a reader has it: every cell runs in JupyterLab, and the softmax stepper answers to the keyboard."""

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


def test_run_all_and_step_through_a_row(open_chapter):
    from playwright.sync_api import expect

    chapter = open_chapter("01_flashattention.ipynb")
    chapter.run_all()
    assert chapter.errors() == []
    assert chapter.broken_images() == []

    stepper = chapter.cell("stepper")
    readout, slider = stepper.locator(".minillm-readout"), stepper.get_by_role("slider")
    expect(readout).to_have_text("1")
    slider.focus()
    for l_now in ("1.25", "1.625", "1.875"):
        slider.press("ArrowRight")
        expect(readout).to_have_text(l_now)
    expect(slider).to_have_attribute("aria-valuetext", "4")
    expect(stepper).to_contain_text("Output 0.4; with the whole row in hand 0.4: the same.")

    stepper.get_by_label("forget the rescale").check()
    expect(readout).to_have_text("2.5")
    expect(stepper).to_contain_text("Output 0.5; with the whole row in hand 0.4: not the same: it should be 0.4")
    assert chapter.complaints == []
