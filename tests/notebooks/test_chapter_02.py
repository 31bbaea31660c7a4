"""What chapter 02's cells lean on: the block table and its widget, the KV calculator, figures of the paper."""

import pytest

from minillm.core.cost import kv_bytes_per_token
from minillm.core.presets import MODELS
from minillm.core.sampling_params import SamplingParams
from minillm.course import block_table, calculators, quiz
from minillm.course.block_table import block_table_widget, pool_svg, preset_rows, replay


def last(actions, **sizes):
    return replay(actions, **sizes)[-1]


def test_a_sequence_grows_block_by_block():
    books = replay("append A 4, append A, append A 4")
    assert [step.tables["A"] for step in books] == [[1], [1, 2], [1, 2, 3]]
    assert [step.waste for step in books] == [0, 3, 3]
    assert [step.copies for step in books] == [0, 0, 0]
    assert books[-1].free == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_waste_is_under_one_block_a_sequence(size):
    for length in range(1, 17):
        books = last(f"append A {length}", block_size=size, num_blocks=16)
        assert books.waste == -length % size < size and len(books.tables["A"]) == -(-length // size)


def test_a_write_to_a_shared_block_copies_exactly_one():
    books = replay("append A 6, fork A B, fork A C, append A, append B, append C, write A 0")
    assert [step.copied for step in books] == [[], [], [], [(2, 3)], [(2, 4)], [], [(1, 5)]]
    assert books[-1].tables == {"A": [5, 3], "B": [1, 4], "C": [1, 2]}
    assert books[-1].ref_counts[:6] == [0, 2, 1, 1, 1, 1] and books[-1].copies == 3


def test_a_block_lives_as_long_as_somebody_holds_it():
    books = replay("append A 6, fork A B, free A, free B")
    assert books[2].held == [1, 2] and books[2].tables == {"B": [1, 2]}
    assert books[3].held == [] and books[3].free == [3, 4, 5, 6, 7, 8, 2, 1]


def test_a_shared_row_counts_once():
    books = last("append A 6, fork A B, append B")
    assert books.waste == (4 - 2) + (4 - 3) and len(books.held) == 3 and books.without_sharing == 4


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ("append A 40", "needs 10 more blocks and 8 are free: somebody must give way"),
        ("fork A B", "there is no sequence A"),
        ("append A, fork A A", "the child needs a name of its own"),
        ("append A, fork A", "the child needs a name of its own"),
        ("append A 3, write A 3", "A has tokens 0 to 2"),
        ("append A x", "'x' is no number of tokens"),
        ("grow A", "'grow A' is no action"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(actions, message):
    with pytest.raises(ValueError, match=message):
        replay(actions)


def test_a_fork_copies_even_where_the_pool_is_just_large_enough():
    assert last("append A 6, fork A B, append A", num_blocks=3).copied == [(2, 3)]
    with pytest.raises(ValueError, match="needs 1 more blocks and 0 are free"):
        replay("append A 6, fork A B, append A", num_blocks=2)


def test_presets_answer_the_questions():
    rows = {row[""]: row for row in preset_rows()}
    assert max(row["slots wasted"] for name, row in rows.items() if "fork" not in name and "each" not in name) == 3
    assert rows["then each appends"]["copies"] == 2
    assert rows["forked at a boundary"]["copies"] == 0
    assert rows["parent freed first"]["blocks held"] == rows["parent freed first"]["without sharing"] == 2


def test_the_widget_reads_its_controls():
    widget = block_table_widget()
    assert "Slots wasted: <b class='minillm-readout'>2</b>" in widget.view.value
    widget.controls["block_size"].value = 8
    assert "<b class='minillm-readout'>2</b>" in widget.view.value and "6 of 8" in widget.view.value
    widget.controls["num_blocks"].value = 2
    widget.controls["actions"].value = "append A 30"
    assert "Not possible:" in widget.view.value and "somebody must give way" in widget.view.value
    widget.controls["actions"].value = "append A 16, fork A B, append B, append B"
    view = widget.view.value
    assert "append B&#x27; needs 1 more" in view and "block 2 held 2 times" in view, "the full pool is what shows why"
    widget.controls["actions"].value = ""
    assert "Nobody holds anything" in widget.view.value and "write A 2" in widget.view.value


def test_the_widgets_buttons_write_actions():
    widget = block_table_widget()
    buttons = {child.description: child for child in widget.children[0].children}
    for name in ("Append", "Fork", "Append 4", "Write last", "Fork"):
        buttons[name].click()
    wanted = "append A 6, append A, fork A B, append A 4, write A, fork A C"
    assert widget.controls["actions"].value == wanted
    buttons["Undo"].click()
    widget.controls["who"].value = "B"
    buttons["Free"].click()
    assert widget.controls["actions"].value.endswith("write A, free B") and "Not possible" not in widget.view.value


def test_the_picture_names_what_is_held():
    svg = pool_svg(last("append A 6, fork A B"))
    assert "block 1 held 2 times, block 2 held 2 times" in svg
    assert svg.count("<rect") == 8 * 4 and svg.count("#0969da") == 6
    assert "3: free" in svg and "1: ×2" in svg


def test_requests_that_fit():
    r = calculators.kv_requests("Llama-2-7B", "A100 80GB", 4096, 500)
    slot = kv_bytes_per_token(MODELS["Llama-2-7B"], "bfloat16")
    assert r["slot_bytes"] == slot == 524_288
    assert r["max_length"] == int(r["kv_gb"] * 1e9) // (4096 * slot)
    assert r["paged"] == int(r["kv_gb"] * 1e9) // (16 * slot) // 32
    full = calculators.kv_requests("Llama-2-7B", "A100 80GB", 4096, 4096)
    assert full["paged"] == full["max_length"] and full["used"] == full["used_paged"] == 1


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (("Llama-2-7B", "A100 80GB", 1024, 1025), "length is 1,025 and the longest 1,024"),
        (("Llama-2-7B", "A100 80GB", 8192, 5), "positions end at 4,096"),
        (("Llama-3-70B", "A100 80GB", 4096, 5), "has no room left"),
    ],
)
def test_what_does_not_fit_is_refused(params, message):
    with pytest.raises(ValueError, match=message):
        calculators.kv_requests(*params)


def test_the_kv_widget():
    widget = calculators.kv_requests_widget()
    assert "<b class='minillm-readout'>8.1</b>" in widget.view.value
    widget.controls["length"].value = 4096
    assert "<b class='minillm-readout'>1.0</b>" in widget.view.value
    widget.controls["model"].value = "Llama-3-70B"
    assert "Not possible" in widget.view.value


def test_names_of_sequences_run_out_with_a_sentence():
    widget = block_table_widget()
    buttons = {child.description: child for child in widget.children[0].children}
    for _ in block_table.NAMES:
        buttons["Fork"].click()
    assert "Not possible" in widget.view.value and "name of its own" in widget.view.value


@pytest.mark.parametrize("length", [40, 95, 96, 97, 98])
def test_copies_of_samples_are_the_engines(engine_factory, length):
    prompt = {"prompt_token_ids": [1 + i % 100 for i in range(length)]}
    params = SamplingParams(n=3, seed=0, max_tokens=2, ignore_eos=True)
    engine = engine_factory(chapter=2, dtype="float32", max_model_len=128)
    engine.add_request("a", prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.metrics.blocks_copied == quiz.copies_of_samples(3, length, 16)
