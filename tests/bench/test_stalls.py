"""The bench of stalls: counters only. Times hang on the machine, what is computed in which pass does not."""

import json
from itertools import count
from pathlib import Path

import pytest

from minillm.bench import stalls
from minillm.core.config import EngineConfig
from minillm.core.presets import MODELS

STORED = Path(__file__).parents[2] / "figures/data/stalls.json"
LOAD = stalls.StallLoad(
    decoding=3, output_len=20, long_prompts=2, long_len=60, long_output_len=3, first=2, every=6, short_len=4
)


@pytest.fixture
def ticks():
    """A clock that only counts how often it is asked."""
    return count().__next__


def rows(ticks, budgets=(8, None)):
    return list(stalls.stalls_rows("tiny", "float32", list(budgets), repeats=1, load=LOAD, clock=ticks))


def test_whole_prompts_and_chunks_compute_the_same_tokens_in_passes_of_their_own_size(ticks):
    whole, small, large = rows(ticks)  # asserts equal tokens, in float32
    assert [row["chapter"] for row in (whole, small, large)] == [3, 4, 4]
    assert (small["budget"], large["budget"]) == (
        8,
        EngineConfig.at_chapter(4).resolve(MODELS["SmolLM2-135M"]).max_num_batched_tokens,
    )
    assert whole["tokens_computed"] == small["tokens_computed"] == large["tokens_computed"]
    assert small["forward_passes"] > whole["forward_passes"] == large["forward_passes"]
    assert "gap_p99_ratio" not in whole and small["gap_p99_ratio"] > 0 and small["throughput_ratio"] > 0


def test_long_prompts_come_while_all_the_others_decode(monkeypatch, ticks):
    sizes = []
    step = stalls.Engine.step

    def watched(engine):
        before = engine.metrics.tokens_computed
        outputs = step(engine)
        sizes.append((engine.config.max_num_batched_tokens, engine.metrics.tokens_computed - before))
        return outputs

    monkeypatch.setattr(stalls.Engine, "step", watched)
    rows(ticks, [16])
    chunked = [tokens for budget, tokens in sizes if budget == 16]
    whole = [tokens for budget, tokens in sizes if budget != 16]
    assert max(chunked) == 16
    # Two runs, the first to warm up; three that decode beside each of the two prompts.
    assert sum(tokens >= 60 + 3 for tokens in whole) == 4 and max(whole) < 2 * 60


def test_a_load_whose_prompts_would_come_to_nobody_is_refused(ticks):
    load = stalls.StallLoad(output_len=20)
    with pytest.raises(ValueError, match="outlast 20 tokens"):
        next(stalls.stalls_rows("tiny", "float32", load=load, clock=ticks))


def test_the_stored_run_keeps_its_promise():
    """Both gaps at least three times smaller at the default budget, throughput within 15 %."""
    stored = json.loads(STORED.read_text())
    default = EngineConfig.at_chapter(4).resolve(MODELS["SmolLM2-135M"]).max_num_batched_tokens
    (row,) = [row for row in stored["rows"] if row["chapter"] == 4 and row["budget"] == default]
    assert min(row["gap_p99_ratio"], row["gap_max_ratio"]) >= 3 and row["throughput_ratio"] >= 0.85
    assert stored["load"] == stalls.StallLoad().__dict__ and stored["machine"]["torch"]
