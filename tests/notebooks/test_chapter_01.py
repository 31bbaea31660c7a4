"""What chapter 01's cells lean on: presets, engines compared, the scoreboard, Triton or its stand-in."""

import json
import subprocess
import sys

import pytest
import torch

from minillm import SamplingParams
from minillm.core.chapters import PACKAGE
from minillm.course import scoreboard
from minillm.course.calculators import winning_tile_rows
from minillm.course.softmax_stepper import preset_rows
from minillm.kernels import HAS_TRITON


def test_presets_of_the_stepper_answer_its_questions():
    rows = {row["row"]: row for row in preset_rows()}
    assert rows["falling: 8, 4, 2, 1"]["corrections"] == 0 and rows["rising: 1, 2, 4, 8"]["corrections"] == 3
    right = [row["output"] == "0.4" for row in rows.values()]
    assert right == [True] * 5 + [False], "forgetting harms the rising row alone"
    assert "forgotten" in list(rows)[-1]


def test_winning_tiles():
    rows = winning_tile_rows()
    assert [row["N = 32,768"] for row in rows] == [48, 32, 97, 64]


def test_engines_of_two_chapters_compared():
    params = SamplingParams(max_tokens=4, temperature=0)
    rows = scoreboard.compare_chapters(0, 1, ["And it came to pass", "In the beginning"], params)
    assert [row["chapter"] for row in rows] == ["00", "01"]
    assert rows[0]["passes"] == rows[1]["passes"] == "4"
    assert rows[0]["KV slots reserved"] == rows[1]["KV slots reserved"] == "2,048"
    assert float(rows[0]["scratch MB"]) > 0


def test_different_tokens_are_an_error(monkeypatch):
    at_chapter = scoreboard.EngineConfig.at_chapter
    seeds = iter((1, 2))
    monkeypatch.setattr(
        scoreboard.EngineConfig, "at_chapter", lambda chapter, **given: at_chapter(chapter, seed=next(seeds), **given)
    )
    with pytest.raises(AssertionError, match="chapters 0 and 0 wrote different tokens"):
        scoreboard.compare_chapters(0, 0, "And", SamplingParams(max_tokens=16, temperature=2.0))


def test_scoreboard_from_the_stored_file_or_counted(tmp_path, monkeypatch):
    row = {"forward_passes": 1000, "tokens_computed": 4, "kv_slots_reserved": 2, "kv_slots_used": 1}
    row["modelled_hbm_bytes"] = 3_000_000
    rows = [{"chapter": n, **row} for n in range(3)]
    stored = tmp_path / "scoreboard.json"
    stored.write_text(json.dumps({"rows": rows}))
    table = scoreboard.scoreboard_table([0, 2], stored)
    assert [line["chapter"] for line in table] == ["00", "02"]
    assert table[0]["passes"] == "1,000" and table[0]["modelled MB"] == "3"
    monkeypatch.setattr("minillm.bench.scoreboard.scoreboard_rows", lambda chapters: (rows[n] for n in chapters))
    assert scoreboard.scoreboard_table([1], tmp_path / "none.json") == [table[0] | {"chapter": "01"}]


CELLS = """
import sys
if {block}:
    class Block:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "triton":
                raise ModuleNotFoundError(name)
    sys.meta_path.insert(0, Block())
from minillm.course.triton_cells import *
import torch

def written(out, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + places, tl.program_id(0), mask=places < n)

kernel = triton.jit(written)
out = torch.full((10,), -1, device=device)
with watch() as traffic:
    kernel[(triton.cdiv(10, 4),)](out, 10, BLOCK=4)
print(out.tolist(), traffic.total)
print((traffic.loads + traffic.stores).get("out", 0))
"""


@pytest.mark.parametrize("block", [False, True])
def test_a_kernel_in_a_cell_runs_or_says_in_a_sentence_that_it_did_not(block, tmp_path):
    if not block and (not HAS_TRITON or torch.cuda.is_available()):
        pytest.skip("needs Triton's interpreter")
    script = tmp_path / "cells.py"
    script.write_text(CELLS.format(block=block))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=PACKAGE.parent, timeout=200)
    assert done.returncode == 0, done.stderr
    if block:
        said = "Triton is not installed here, so written did not run.\n"
        assert done.stdout == f"{said}{[-1] * 10} 0\n0\n"
    else:
        assert done.stdout == "[0, 0, 0, 0, 1, 1, 1, 1, 2, 2] 80\n80\n"
