"""Chapters are committed as ``make notebooks`` leaves them."""

from copy import deepcopy
from pathlib import Path

import nbformat
import pytest

from minillm.course.notebooks import KERNEL, WIDGET_VIEW, clean, run

CHAPTERS = sorted((Path(__file__).parents[2] / "chapters").glob("*.ipynb"))


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_committed_chapter_was_run_from_top_to_bottom_and_cleaned(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert clean(deepcopy(notebook)) == notebook
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        assert all(output.output_type != "error" for output in cell.outputs)
        # nbval passes a check cell without a stored output unseen.
        if "nbval-check-output" in cell.metadata.get("tags", []):
            assert cell.outputs, cell.source
    assert path.stat().st_size <= 400_000
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids) and all(not i.isdigit() for i in ids)


def test_run_stores_outputs_and_drops_what_changes_from_run_to_run(tmp_path):
    path = tmp_path / "n.ipynb"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("6 * 7", id="answer")])
    nbformat.write(notebook, path)
    run(path)
    first = path.read_text()
    stored = nbformat.read(path, as_version=4)
    assert stored.cells[0].outputs[0].data["text/plain"] == "42"
    assert stored.metadata.kernelspec == KERNEL and "execution" not in stored.cells[0].metadata
    run(path)
    assert path.read_text() == first


def test_clean_keeps_waivers_and_drops_widget_views():
    view = nbformat.v4.new_output("display_data", data={WIDGET_VIEW: {"model_id": "1"}, "text/plain": "Panel()"})
    cell = nbformat.v4.new_code_cell("panel", outputs=[view, nbformat.v4.new_output("stream", text="said")])
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"minillm": {"waive": {"words": "why"}}, "widgets": {}})
    clean(notebook)
    assert [output.text for output in notebook.cells[0].outputs] == ["said"]
    assert notebook.metadata.minillm == {"waive": {"words": "why"}} and "widgets" not in notebook.metadata
