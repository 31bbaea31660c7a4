"""What sharing a prefix brings: ``python -m minillm.bench.sharing`` serves requests that begin alike, with and without.

The engines of chapters 03 and 05 on one workload, queued at once; their runs alternate: a ratio of medians.
"""

from __future__ import annotations

import json
import statistics

from minillm.bench.machine import describe
from minillm.bench.workload import run_workload
from minillm.core.config import EngineConfig
from minillm.core.workloads import Fixed, LogNormal, WorkloadRequest, random_workload
from minillm.llm import LLM

COUNTERS = ("forward_passes", "tokens_computed", "tokens_cached", "tokens_generated")


def shared_prefix(vocab_size: int, requests: int = 32, prefix_len: int = 512, own: int = 32) -> list[WorkloadRequest]:
    """Requests that come together and begin with the same tokens; outputs skewed, 16 to 128."""
    lengths = Fixed(own), LogNormal(46, 0.7, 16, 128)
    return random_workload(requests, lengths, prefixes=1, prefix_len=prefix_len, vocab_size=vocab_size, seed=requests)


def sharing_rows(
    model: str, repeats: int = 3, dtype: str = "bfloat16", chapters: tuple[int, ...] = (3, 5), **settings
) -> list[dict]:
    """One row a chapter: its counters, "tokens_per_second" (median) and "ratio", that over the first row's."""
    engines = {}
    try:
        for chapter in chapters:
            config = EngineConfig.at_chapter(chapter, dtype=dtype, **({"max_num_seqs": 16} | settings))
            engines[chapter] = LLM(model, config=config)
        return _rows({chapter: llm.engine for chapter, llm in engines.items()}, repeats)
    finally:
        for llm in engines.values():
            llm.close()


def _rows(engines: dict, repeats: int) -> list[dict]:
    workload = shared_prefix(next(iter(engines.values())).model_config.vocab_size)
    seconds: dict[int, list[float]] = {chapter: [] for chapter in engines}
    counters: dict[int, dict] = {}
    for _ in range(repeats):
        for chapter, engine in engines.items():
            result = run_workload(engine, workload)
            seconds[chapter].append(result["seconds"])
            counters[chapter] = {name: result[name] for name in COUNTERS}
    tokens = sum(request.output_len for request in workload)
    rates = {chapter: tokens / statistics.median(times) for chapter, times in seconds.items()}
    first = next(iter(rates.values()))
    return [
        {"chapter": chapter, **counters[chapter], "tokens_per_second": rate, "ratio": rate / first}
        for chapter, rate in rates.items()
    ]


if __name__ == "__main__":
    model, dtype = "smollm2", "bfloat16"
    rows = sharing_rows(model, dtype=dtype)
    result = {"machine": describe(), "model": model, "dtype": dtype, "max_num_seqs": 16, "rows": rows}
    print(json.dumps(result, indent=1))
