"""The scoreboard's counters are the same on every machine: a fresh run gives the stored rows."""

import json
from pathlib import Path

import pytest

from minillm.bench.scoreboard import scoreboard_rows
from minillm.core.config import LAST_BUILT
from minillm.core.metrics import EngineMetrics
from minillm.core.workloads import scoreboard

STORED = Path(__file__).parents[2] / "figures/data/scoreboard.json"
COUNTERS = EngineMetrics().to_dict().keys()


@pytest.mark.parametrize("chapter", range(LAST_BUILT + 1))
def test_stored_row_is_what_a_run_gives(chapter):
    stored = {row["chapter"]: row for row in json.loads(STORED.read_text())["rows"]}
    (row,) = scoreboard_rows(chapters=[chapter])
    assert {name: row[name] for name in COUNTERS} == {name: stored[chapter][name] for name in COUNTERS}


def test_workload_is_what_its_description_says():
    requests = scoreboard(2048)
    assert requests == scoreboard(2048) != scoreboard(2048, seed=1)
    lengths = [r.output_len for r in requests]
    assert 0.3 < sum(lengths) / len(lengths) / max(lengths) < 0.5
    assert len({tuple(r.prompt_token_ids[:96]) for r in requests}) == 4
    assert sum(len(r.prompt_token_ids) > 400 for r in requests) == 2
    assert [r.arrival for r in requests] == sorted(r.arrival for r in requests)
    assert requests[-1].arrival / len(requests) == pytest.approx(3, rel=0.4)
