"""Widgets: the functions against numbers known otherwise, the shells by setting a control and reading the view."""

import itertools
import math

import pytest

from minillm.core.presets import DEVICES
from minillm.course.calculators import (
    roofline,
    roofline_rows,
    roofline_widget,
    smallest_winning_tile,
    tile_rows,
    tile_traffic,
    tile_widget,
)
from minillm.course.papers import map_widget
from minillm.course.softmax_stepper import exact, numbers, softmax_steps, stepper_rows, stepper_widget
from minillm.course.widgets import table, text_table

ROW, VALUES = [4.0, 1.0, 8.0, 2.0], [1.0, 0.0, 0.0, 1.0]


def test_decode_of_one_request_uses_under_one_percent_of_the_arithmetic():
    for model, gpu in itertools.product(("Llama-2-7B", "Llama-3-8B"), DEVICES):
        if gpu != "RTX 4090":
            assert roofline(model, gpu, 1, 1024)["arithmetic_share"] < 0.01


def test_the_ridge_needs_a_batch_that_kv_does_not_allow():
    r = roofline("Llama-2-7B", "A100 80GB", 1, 4096)
    assert r["batch_in_memory"] < r["batch_at_ridge"] == 154
    assert r["batch_in_memory"] == int((80e9 - 2 * 6.738e9) // (4096 * 2**19))


def test_roofline_refuses_what_makes_no_sense():
    with pytest.raises(ValueError, match="141 GB and H100 SXM has 80 GB"):
        roofline("Llama-3-70B", "H100 SXM", 1, 1024)
    with pytest.raises(ValueError, match="positions end at 4,096"):
        roofline("Llama-2-7B", "H200", 1, 8192)


def test_roofline_shell_shows_the_function_and_its_refusals():
    panel = roofline_widget()
    before = panel.view.value
    panel.controls["batch"].value = 64
    assert panel.view.value != before
    for row in roofline_rows(model="Llama-3-8B", gpu="A100 80GB", batch=64, context=1024):
        assert str(row["value"]) in panel.view.value
    panel.controls["model"].value = "Llama-3-70B"
    assert "Not possible:" in panel.view.value and "has 80 GB" in panel.view.value


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("order", "bound"), [("Q outside", 1 / 2), ("K/V outside", 3 / 4)])
def test_smallest_winning_tile_hardly_depends_on_the_length(d, order, bound):
    tiles = [smallest_winning_tile(n, d, order) for n in (1024, 4096, 32768)]
    assert all(abs(tile - bound * d) <= 2 for tile in tiles), tiles


@pytest.mark.parametrize(("tile", "elements"), [(16, 34), (32, 18), (64, 10), (128, 6)])
def test_tile_traffic_of_the_storyline(tile, elements):
    r = tile_traffic(256, 64, tile, "Q outside")
    assert r["tiled"] == elements and r["naive"] == 20
    assert r["wins"] == (elements < 20)


def test_tile_shell():
    panel = tile_widget()
    assert "<b class='minillm-readout'>32</b>" in panel.view.value
    panel.controls["order"].value = "K/V outside"
    best = smallest_winning_tile(1024, 64, "K/V outside")
    assert f"<b class='minillm-readout'>{best}</b>" in panel.view.value
    panel.controls["tile"].value = 256
    panel.controls["n"].value = 256
    assert "▶" in panel.view.value
    assert text_table(tile_rows(1024, 64, "Q outside")).count("\n") == 6


def test_steps_of_the_row_that_fits_in_a_head():
    assert [step.l for step in softmax_steps(ROW, VALUES)] == [1, 1.25, 1.625, 1.875]
    assert softmax_steps(ROW, VALUES)[-1].output == pytest.approx(6 / 15)


@pytest.mark.parametrize("workers", [1, 2])
def test_order_and_split_do_not_matter(workers):
    l_true, o_true = exact(ROW, VALUES)
    counts = set()
    for order in itertools.permutations(range(4)):
        steps = softmax_steps([ROW[i] for i in order], [VALUES[i] for i in order], workers)
        assert math.isclose(steps[-1].l, l_true) and math.isclose(steps[-1].output, o_true)
        counts.add(sum(step.rescale not in (0, 1) for step in steps))
    if workers == 1:
        assert counts == {0, 1, 2, 3}, "orders without a correction, and with three"


def test_forgetting_the_rescale_survives_only_where_nothing_was_to_rescale():
    _, o_true = exact(ROW, VALUES)
    for order in itertools.permutations(range(4)):
        row, values = [ROW[i] for i in order], [VALUES[i] for i in order]
        right = math.isclose(softmax_steps(row, values, forget=True)[-1].output, o_true)
        corrected = any(step.rescale not in (0, 1) for step in softmax_steps(row, values))
        assert right != corrected, row


def test_stepper_refuses_what_makes_no_sense():
    for weights, values, message in (
        ([], [], "the row is empty"),
        ([1, -2], [0, 0], "weight -2 is not above 0"),
        ([1, 2], [0], "2 weights and 1 values"),
    ):
        with pytest.raises(ValueError, match=message):
            softmax_steps(weights, values)
    with pytest.raises(ValueError, match="'x' is no number"):
        numbers("1, x")


def test_stepper_shell_steps_by_slider_and_button_and_refuses_in_the_view():
    panel = stepper_widget()
    assert "<b class='minillm-readout'>1</b>" in panel.view.value
    panel.controls["step"].value = 3
    assert "<b class='minillm-readout'>1.625</b>" in panel.view.value
    back, forward = panel.children[0].children[-2:]
    back.click()
    assert "<b class='minillm-readout'>1.25</b>" in panel.view.value
    forward.click()
    forward.click()
    assert "<b class='minillm-readout'>1.875</b>" in panel.view.value and "the same" in panel.view.value
    panel.controls["forget"].value = True
    assert "not the same" in panel.view.value
    panel.controls["weights"].value = "4, x"
    assert "Not possible:</b> &#x27;x&#x27; is no number" in panel.view.value
    assert text_table(stepper_rows(ROW, VALUES)).splitlines()[-1].split()[4] == "1.875"


@pytest.mark.parametrize("widget", [roofline_widget, tile_widget, stepper_widget, map_widget])
def test_a_visible_label_stands_beside_every_control(widget):
    assert all(control.description for control in widget().controls.values())


def test_tables_escape_what_they_show():
    assert "<script>" not in table([{"<b>": "<script>"}])
    assert table([]) == text_table([]) == ""
