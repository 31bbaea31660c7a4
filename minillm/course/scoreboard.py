"""What a chapter has changed: its engine beside the one before, and the stored scoreboard."""

from __future__ import annotations

import json
from pathlib import Path

from minillm.core.config import EngineConfig
from minillm.core.sampling_params import SamplingParams
from minillm.course.progress import course_root
from minillm.course.scratch import LiveBytes
from minillm.llm import LLM

COUNTERS = {
    "forward_passes": "passes",
    "tokens_computed": "tokens computed",
    "kv_slots_reserved": "KV slots reserved",
    "kv_slots_used": "used",
    "modelled_hbm_bytes": "modelled MB",
}


def compare_chapters(
    before: int, after: int, prompts: str | list[str], params: SamplingParams, model: str = "tiny"
) -> list[dict]:
    """The engines of two chapters on the same prompts, in float32: counters, and the most bytes alive in a pass.

    AssertionError if the tokens differ.
    """
    rows, tokens = [], []
    for chapter in (before, after):
        config = EngineConfig.at_chapter(chapter, dtype="float32")
        with LLM(model, config=config) as llm:  # weights and KV cache are there before, and not counted
            with LiveBytes() as memory:
                outputs = llm.generate(prompts, params)
            tokens.append([[sample.token_ids for sample in output.outputs] for output in outputs])
            rows.append(_row(chapter, llm.metrics.to_dict()) | {"scratch MB": f"{memory.peak / 1e6:.1f}"})
    assert tokens[0] == tokens[1], f"chapters {before} and {after} wrote different tokens"
    return rows


def scoreboard_table(chapters: list[int | str], stored: Path | None = None) -> list[dict]:
    """The counters of these chapters: from figures/data/scoreboard.json, or counted now if they are not there.

    "yours", the engine with your own parts of the labs, is always counted now.
    """
    stored = stored or course_root() / "figures" / "data" / "scoreboard.json"
    rows = json.loads(stored.read_text(encoding="utf-8"))["rows"] if stored.exists() else []
    if missing := [chapter for chapter in chapters if chapter not in {row["chapter"] for row in rows}]:
        from minillm.bench.scoreboard import scoreboard_rows

        rows += scoreboard_rows(chapters=missing)
    return [_row(row["chapter"], row) for row in rows if row["chapter"] in chapters]


def _row(chapter: int | str, counters: dict) -> dict:
    shown = {title: counters[name] for name, title in COUNTERS.items()}
    shown["modelled MB"] = f"{counters['modelled_hbm_bytes'] / 1e6:,.0f}"
    return {"chapter": f"{chapter:0>2}", **{k: f"{v:,}" if isinstance(v, int) else v for k, v in shown.items()}}
