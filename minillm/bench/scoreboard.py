"""The scoreboard: one workload, run by the engine of every chapter. Counters first, the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator

from minillm.bench.workload import run_workload
from minillm.core.config import LAST_BUILT, EngineConfig
from minillm.core.cost import kv_bytes_per_token
from minillm.core.model_config import ModelConfig
from minillm.core.workloads import scoreboard
from minillm.llm import LLM
from minillm.models.fetch import resolve

# Every chapter gets the same memory: room for eight requests of full length, and a null block.
KV_ROWS = 8 * 1024 + 16


def scoreboard_rows(model: str = "tiny", chapters: list[int] | None = None) -> Iterator[dict]:
    """One row a chapter, in float32: "chapter", the engine's counters, "seconds", "tokens_per_second"."""
    for chapter in chapters if chapters is not None else range(LAST_BUILT + 1):
        config = EngineConfig.at_chapter(chapter, dtype="float32", max_model_len=1024)
        yield {"chapter": chapter, **scoreboard_row(model, config)}


def scoreboard_row(model: str, config: EngineConfig) -> dict:
    """The row of one configuration."""
    shape = ModelConfig.from_folder(resolve(model))
    memory = KV_ROWS * kv_bytes_per_token(shape, config.dtype)
    with LLM(model, config=config.override(kv_cache_memory_bytes=memory)) as llm:
        row = run_workload(llm.engine, scoreboard(shape.vocab_size))
    return {**row, "tokens_per_second": row["tokens_generated"] / row["seconds"]}
