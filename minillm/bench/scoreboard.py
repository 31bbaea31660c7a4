"""The scoreboard: one workload, run by the engine of every chapter. Counters first, the same on every machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from minillm.bench.against import PEERS, rates
from minillm.bench.workload import run_workload
from minillm.core.config import LAST_BUILT, EngineConfig
from minillm.core.cost import kv_bytes_per_token
from minillm.core.model_config import ModelConfig
from minillm.core.workloads import scoreboard
from minillm.llm import LLM
from minillm.models.fetch import resolve

# Every chapter gets the same memory: room for eight requests of full length, and a null block.
KV_ROWS = 8 * 1024 + 16
PEER_BATCH = 8


def scoreboard_rows(
    model: str = "tiny",
    chapters: list[int | str] | None = None,
    peer: str | None = None,
    repeats: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[dict]:
    """One row a chapter, in float32: "chapter", the engine's counters, "seconds", "tokens_per_second".

    The chapter "yours" is the last chapter's engine with the parts that you wrote in the labs (core/parts.py).

    With a ``peer`` each chapter's runs alternate with the peer's, and a row has "ours", "peer" (median output tokens a
    second, useful ones only) and "ratio" = ours / peer. The peer has all requests at once, eight to a batch.
    """
    for chapter in chapters if chapters is not None else range(LAST_BUILT + 1):
        mine = chapter == "yours"
        config = EngineConfig.at_chapter(LAST_BUILT if mine else chapter, dtype="float32", max_model_len=1024)
        progress(f"scoreboard workload, chapter {chapter}")
        yield {"chapter": chapter, **scoreboard_row(model, config, peer, repeats, "mine" if mine else None)}


def scoreboard_row(
    model: str, config: EngineConfig, peer: str | None = None, repeats: int = 3, parts: str | None = None
) -> dict:
    """The row of one configuration; one run, or ``repeats`` interleaved with a peer's."""
    shape = ModelConfig.from_folder(resolve(model))
    memory = KV_ROWS * kv_bytes_per_token(shape, config.dtype)
    workload = scoreboard(shape.vocab_size)
    tokens = sum(request.output_len for request in workload)
    with LLM(model, config=config.override(kv_cache_memory_bytes=memory), parts=parts) as llm:
        other = None
        if peer is not None:
            other = PEERS[peer].load(llm.folder, config.dtype, str(llm.engine.device))
            other.run(workload[:1], 1)  # warm-up
        row: dict[str, float] = {}

        def ours() -> float:
            row.update(run_workload(llm.engine, workload))
            return row["seconds"]

        theirs = other and (lambda: other.run(workload, PEER_BATCH))
        measured = rates(tokens, ours, theirs, repeats if other else 1)
    return {**row, "tokens_per_second": measured["ours"], **(measured if other else {})}
