"""The same workload on a peer, in the same run, interleaved: ratios of medians, since machines drift."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from minillm.bench.workload import run_workload
from minillm.core.config import EngineConfig
from minillm.core.workloads import WorkloadRequest, equal_batch
from minillm.engine.engine import Engine
from minillm.llm import LLM
from minillm.models.loader import DTYPES


class TransformersPeer:
    """transformers' ``generate``: sdpa attention, left padding, greedy, lengths forced, a batch at a time."""

    name = "transformers"

    def __init__(self, model, device: str):
        self.model, self.device = model, device

    @classmethod
    def load(cls, folder: Path, dtype: str, device: str) -> TransformersPeer:
        """The checkpoint in ``folder``."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], attn_implementation="sdpa", local_files_only=True
        )
        return cls(model.to(device), device)

    def run(self, workload: list[WorkloadRequest], batch_size: int) -> float:
        """Seconds for the whole workload, prefill included, arrivals ignored: everything is there at once.

        A batch generates until its longest request is done; what the others get beyond their length is waste.
        """
        started = time.perf_counter()
        for first in range(0, len(workload), batch_size):
            self._generate(workload[first : first + batch_size])
        return time.perf_counter() - started

    @torch.inference_mode()
    def _generate(self, requests: list[WorkloadRequest]) -> None:
        width = max(len(r.prompt_token_ids) for r in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            count = len(request.prompt_token_ids)
            ids[row, width - count :] = torch.tensor(request.prompt_token_ids)
            mask[row, width - count :] = 1
        length = max(r.output_len for r in requests)
        output = self.model.generate(
            ids.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
        )
        if output.shape[1] != width + length:
            raise RuntimeError(f"transformers gave {output.shape[1] - width} tokens, {length} were forced")


PEERS = {"transformers": TransformersPeer}


def rates(
    tokens: int,
    ours: Callable[[], float],
    theirs: Callable[[], float] | None,
    repeats: int,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, float]:
    """Tokens a second of runs that return seconds, medians of ``repeats``: "ours", and with a peer "peer", "ratio".

    The two alternate, so that a machine that drifts drifts for both.
    """
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    for repeat in range(repeats):
        progress(f"run {repeat + 1} of {repeats}")
        times["ours"].append(ours())
        if theirs is not None:
            times["peer"].append(theirs())
    result = {name: tokens / statistics.median(seconds) for name, seconds in times.items() if seconds}
    if theirs is not None:
        result["ratio"] = result["ours"] / result["peer"]
    return result


def equal_rows(
    model: str,
    config: EngineConfig,
    requests: list[int],
    prompt_len: tuple[int, int] = (16, 128),
    output_len: int = 64,
    peer: str | None = None,
    repeats: int = 3,
    parts: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[dict]:
    """Batches of equal output length, one row for each number of requests: output tokens per second of wall time.

    With a ``peer`` the runs alternate and a row has "ours", "peer" (medians) and "ratio" = ours / peer.
    """
    with LLM(model, config=config, parts=parts) as llm:
        engine = llm.engine
        other = None
        if peer is not None:
            other = PEERS[peer].load(llm.folder, engine.config.dtype, str(engine.device))
        for count in requests:
            workload = equal_batch(count, prompt_len, output_len, engine.model_config.vocab_size, seed=count)
            yield _equal_row(engine, other, workload, repeats, progress)


def _equal_row(engine: Engine, other, workload: list[WorkloadRequest], repeats: int, progress) -> dict:
    """One batch, warmed up and measured."""
    count, tokens = len(workload), sum(r.output_len for r in workload)
    warm_up = [WorkloadRequest(0, r.prompt_token_ids, 2) for r in workload]
    run_workload(engine, warm_up)
    if other is not None:
        other.run(warm_up, count)
    measured = rates(
        tokens,
        lambda: run_workload(engine, workload)["seconds"],
        other and (lambda: other.run(workload, count)),
        repeats,
        lambda run: progress(f"{count} requests, {run}"),
    )
    return {
        "requests": count,
        "prompt_tokens": sum(len(r.prompt_token_ids) for r in workload),
        "output_tokens": tokens,
        **measured,
    }
