"""What the tests of chapters look for is found where it is there: they could fail."""

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


def test_a_failing_cell_a_missing_image_and_a_request_to_the_world_are_seen(open_chapter):
    def cell(name: str, source: str, kind: str = "code") -> dict:
        return {"id": name, "cell_type": kind, "metadata": {}, "source": source}

    figure, world = "![](../figures/nowhere.svg)", "![](http://192.0.2.1/pixel.png)"  # an address that nobody has
    cells = [
        cell("warns", "import warnings\nwarnings.warn('no error')"),
        cell("fails", "1 / 0"),
        cell("waits", "2"),
        cell("images", f"{figure} {world}", "markdown"),
    ]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    notebook = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    chapter = open_chapter("wrong.ipynb", notebook)
    chapter.run_all()
    assert len(chapter.errors()) == 1 and "ZeroDivisionError" in chapter.errors()[0]
    assert chapter.prompts(r"^\[\d+\]:$").count() == 2

    image = chapter.panel.locator("img[src*='nowhere.svg']")
    image.evaluate("i => i.complete || new Promise(done => i.addEventListener('error', () => done(true)))")
    complaints = "\n".join(chapter.complaints)
    assert "request to http://192.0.2.1/pixel.png" in complaints
    assert any("nowhere.svg" in image for image in chapter.broken_images())
    assert "nowhere.svg" in complaints
