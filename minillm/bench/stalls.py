"""What a long prompt does to those that run: ``python -m minillm.bench.stalls``, whole prompts against chunks.

Eight requests decode, and while they do, four prompts of 1,024 tokens come. For each engine: the gaps between the
tokens of the eight, the four's time to first token, the throughput of all. The engines take turns, so that a machine
that drifts drifts for all; what counts are ratios of medians. On a machine that others use too, ``--cpu-time`` with one
thread (OMP_NUM_THREADS=1) leaves their share out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from minillm.core.config import EngineConfig
from minillm.core.model_config import ModelConfig
from minillm.core.sampling_params import SamplingParams
from minillm.engine.engine import Engine
from minillm.models.fetch import resolve
from minillm.models.loader import load_model
from minillm.simulator.simulation import percentile


@dataclass(frozen=True)
class StallLoad:
    """Long prompt k comes when every decoding request has ``first + k · every`` tokens, on whatever engine."""

    decoding: int = 8
    output_len: int = 96  # tokens that each of them gets
    long_prompts: int = 4
    long_len: int = 1024
    long_output_len: int = 8
    first: int = 8
    every: int = 16
    short_len: int = 32

    @property
    def tokens(self) -> int:
        """Of all prompts and outputs."""
        running = self.decoding * (self.short_len + self.output_len)
        return running + self.long_prompts * (self.long_len + self.long_output_len)

    @classmethod
    def for_model(cls, model: str) -> StallLoad:
        """The usual one, its long prompts cut for a model of short contexts."""
        context = ModelConfig.from_folder(resolve(model)).max_position_embeddings
        return cls(long_len=min(cls.long_len, context - 2 * cls.long_output_len))


def stalls_run(
    engine: Engine, load: StallLoad, clock: Callable[[], float] = time.perf_counter
) -> tuple[dict[str, float], dict[str, list[int]]]:
    """One run: milliseconds and counters, and every request's tokens."""
    engine.metrics.reset()
    rng = random.Random(0)
    vocab = engine.model_config.vocab_size
    running = [f"running-{i}" for i in range(load.decoding)]
    waiting = [f"long-{i}" for i in range(load.long_prompts)]
    arrived, times, tokens = {}, {name: [] for name in running + waiting}, {}

    def add(name: str, prompt_len: int, output_len: int) -> None:
        ids = [rng.randrange(1, vocab) for _ in range(prompt_len)]
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": ids}, params)
        arrived[name] = clock()

    started = clock()
    for name in running:
        add(name, load.short_len, load.output_len)
    while engine.has_unfinished_requests() or waiting:
        had = min(len(times[name]) for name in running)
        while waiting and had >= load.first + load.every * (load.long_prompts - len(waiting)):
            add(waiting.pop(0), load.long_len, load.long_output_len)
        for output in engine.step():
            times[output.request_id].append(clock())
            tokens[output.request_id] = output.outputs[0].token_ids
    seconds = clock() - started
    gaps = sorted(b - a for name in running for a, b in itertools.pairwise(times[name]))
    firsts = [1e3 * (times[name][0] - arrived[name]) for name in times if name.startswith("long")]
    return {
        "gap_p50_ms": 1e3 * percentile(gaps, 0.5),
        "gap_p99_ms": 1e3 * percentile(gaps, 0.99),
        "gap_max_ms": 1e3 * gaps[-1],
        "ttft_mean_ms": statistics.fmean(firsts),
        "tokens_per_second": load.tokens / seconds,
        "forward_passes": engine.metrics.forward_passes,
        "tokens_computed": engine.metrics.tokens_computed,
    }, tokens


def stalls_rows(
    model: str,
    dtype: str = "bfloat16",
    budgets: list[int | None] | None = None,
    repeats: int = 5,
    load: StallLoad | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[dict]:
    """A row for whole prompts (chapter 3), then one for each budget of chapter 4; None: its default.

    Medians of ``repeats``. A chunked row has ratios beside: "gap_p99_ratio" and "gap_max_ratio" are how many times
    smaller its gaps are, "throughput_ratio" and "ttft_ratio" its own over chapter 3's. AssertionError if an engine
    writes other tokens, which in bfloat16 is not asked for: a chunk's rows may be rounded otherwise.
    """
    load = load or StallLoad.for_model(model)
    if load.first + load.every * load.long_prompts >= load.output_len:
        raise ValueError(
            f"{load.long_prompts} prompts, one every {load.every} tokens, outlast {load.output_len} tokens"
        )
    weights = load_model(resolve(model), None if dtype == "auto" else dtype, "cpu")
    configs = [EngineConfig.at_chapter(3)]
    configs += [EngineConfig.at_chapter(4, max_num_batched_tokens=budget) for budget in budgets or [None]]
    engines = [Engine(weights, config) for config in configs]
    runs: list[list[dict]] = [[] for _ in engines]
    for repeat in range(repeats + 1):  # the first one warms up
        written = []
        for engine, kept in zip(engines, runs, strict=True):
            progress(f"run {repeat} of {repeats}, budget {engine.config.max_num_batched_tokens}")
            row, tokens = stalls_run(engine, load, clock)
            written.append(tokens)
            if repeat or not repeats:
                kept.append(row)
        assert dtype not in ("float32", "float64") or all(tokens == written[0] for tokens in written), (
            "engines wrote other tokens"
        )
    whole: dict[str, float] | None = None
    for engine, kept in zip(engines, runs, strict=True):
        chunked = engine.config.enable_chunked_prefill
        row = {
            "chapter": 4 if chunked else 3,
            "budget": engine.config.max_num_batched_tokens,
            **{name: statistics.median(run[name] for run in kept) for name in kept[0]},
        }
        yield row | (_ratios(whole, row) if whole else {})
        whole = whole or row


def _ratios(whole: dict, chunked: dict) -> dict[str, float]:
    return {
        "gap_p99_ratio": whole["gap_p99_ms"] / chunked["gap_p99_ms"],
        "gap_max_ratio": whole["gap_max_ms"] / chunked["gap_max_ms"],
        "throughput_ratio": chunked["tokens_per_second"] / whole["tokens_per_second"],
        "ttft_ratio": chunked["ttft_mean_ms"] / whole["ttft_mean_ms"],
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m minillm.bench.stalls", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--budgets", type=int, nargs="+", default=None, help="of chapter 4; its default if not given")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="processor time in place of the wall's")
    args = parser.parse_args(argv)
    from minillm.bench.machine import describe

    clock = time.process_time if args.cpu_time else time.perf_counter
    rows = list(stalls_rows(args.model, args.dtype, args.budgets, args.repeats, clock=clock))
    report = {"machine": describe(), "model": args.model, "dtype": args.dtype, "clock": clock.__name__}
    report |= {"load": asdict(StallLoad.for_model(args.model)), "rows": rows}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
