"""The same workload on a peer, in the same run, interleaved: ratios of medians, since machines drift."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from minillm.bench.workload import run_workload
from minillm.core.config import EngineConfig
from minillm.core.workloads import Fixed, LogNormal, Uniform, WorkloadRequest, random_workload
from minillm.engine.engine import Engine
from minillm.llm import LLM
from minillm.models.loader import DTYPES


class TransformersPeer:
    """transformers' ``generate``: sdpa attention, left padding, greedy, lengths forced, a batch at a time."""

    attention = "sdpa"

    def __init__(self, model, device: str):
        self.model, self.device = model, device

    @classmethod
    def load(cls, folder: Path, dtype: str, device: str) -> TransformersPeer:
        """The checkpoint in ``folder``."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], attn_implementation=cls.attention, local_files_only=True
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


class TransformersContinuousPeer(TransformersPeer):
    """transformers' continuous batching over paged KV, by its eager attention: on a CPU faster than by sdpa."""

    attention = "paged|eager"

    def run(self, workload: list[WorkloadRequest], batch_size: int) -> float:
        """Seconds for the whole workload, at most ``batch_size`` requests in a pass; starting the server left out."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        rows = sum(len(r.prompt_token_ids) + r.output_len for r in workload)
        settings = ContinuousBatchingConfig(
            block_size=32,
            num_blocks=rows // 32 + 2 * len(workload),
            max_batch_tokens=max(512, *(len(r.prompt_token_ids) for r in workload)),
            max_requests_per_batch=batch_size,
            use_cuda_graph=False,
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        with self.model.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=settings, block=True, timeout=5
        ) as server:
            started = time.perf_counter()
            for request in workload:
                server.add_request(request.prompt_token_ids, max_new_tokens=request.output_len)
            generated = finished = 0
            while finished < len(workload):
                result = server.get_result(timeout=1)
                if result is None and not server.is_running():
                    raise RuntimeError("transformers' continuous batching stopped")
                if result is not None and result.is_finished():
                    generated, finished = generated + len(result.generated_tokens), finished + 1
            seconds = time.perf_counter() - started
        wanted = sum(r.output_len for r in workload)
        if generated != wanted:
            raise RuntimeError(f"transformers gave {generated} tokens, {wanted} were forced")
        return seconds


PEERS = {"transformers": TransformersPeer, "transformers-continuous": TransformersContinuousPeer}
SKEWED = LogNormal(46, 0.7, 16, 128)  # mean about 0.4 of the largest


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


def batch_rows(
    model: str,
    config: EngineConfig,
    requests: list[int],
    prompt_len: tuple[int, int] = (16, 128),
    output_len: int | None = 64,
    peer: str | None = None,
    repeats: int = 3,
    parts: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[dict]:
    """Requests that come together, one row for each number of them: output tokens per second of wall time.

    All outputs are of ``output_len`` tokens or, if that is None, skewed: 16 to 128, mean about 0.4 of the largest.
    With a ``peer`` the runs alternate and a row has "ours", "peer" (medians) and "ratio" = ours / peer. The peer takes
    as many at a time as the engine has seats (max_num_seqs), and only tokens that were asked for count.
    """
    with LLM(model, config=config, parts=parts) as llm:
        engine = llm.engine
        other = None
        if peer is not None:
            other = PEERS[peer].load(llm.folder, engine.config.dtype, str(engine.device))
        for count in requests:
            lengths = Uniform(*prompt_len), SKEWED if output_len is None else Fixed(output_len)
            vocab = engine.model_config.vocab_size
            workload = random_workload(count, lengths, vocab_size=vocab, seed=count)
            yield _batch_row(engine, other, workload, repeats, progress)


def _batch_row(engine: Engine, other, workload: list[WorkloadRequest], repeats: int, progress) -> dict:
    """One workload, warmed up and measured."""
    count, tokens = len(workload), sum(r.output_len for r in workload)
    seats = min(count, engine.config.max_num_seqs)
    warm_up = [WorkloadRequest(0, r.prompt_token_ids, 2) for r in workload[:seats]]
    run_workload(engine, warm_up)
    if other is not None:
        other.run(warm_up, seats)
    measured = rates(
        tokens,
        lambda: run_workload(engine, workload)["seconds"],
        other and (lambda: other.run(workload, seats)),
        repeats,
        lambda run: progress(f"{count} requests, {run}"),
    )
    return {
        "requests": count,
        "prompt_tokens": sum(len(r.prompt_token_ids) for r in workload),
        "output_tokens": tokens,
        **measured,
    }
