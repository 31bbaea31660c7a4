"""Runs a workload on an engine: counters, and time beside them."""

from __future__ import annotations

import time

from minillm.core.sampling_params import SamplingParams
from minillm.core.workloads import WorkloadRequest
from minillm.engine.engine import Engine


def run_workload(engine: Engine, workload: list[WorkloadRequest]) -> dict[str, float | int]:
    """Serve every request as it comes; output lengths forced. Returns the engine's counters and "seconds".

    Greedy, but where a request has several samples. A prefix cache is empty at first: a run repeated is no hit.

    Arrivals are counted in forward passes: request r is queued once so many have run. Where the engine would idle,
    the clock jumps to the next arrival.
    """
    engine.metrics.reset()
    if not engine.reset_prefix_cache():
        raise RuntimeError("requests of somebody else are running: the prefix cache can't be emptied")
    pending = sorted(enumerate(workload), key=lambda item: item[1].arrival)
    clock, started = 0, time.perf_counter()
    while pending or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            clock = max(clock, pending[0][1].arrival)
        while pending and pending[0][1].arrival <= clock:
            number, request = pending.pop(0)
            params = SamplingParams(
                n=request.n,
                temperature=0.0 if request.n == 1 else 1.0,
                max_tokens=request.output_len,
                ignore_eos=True,
            )
            prompt = {"prompt_token_ids": request.prompt_token_ids}
            engine.add_request(f"workload-{number}", prompt, params, request.priority)
        engine.step()
        clock += 1
    return {**engine.metrics.to_dict(), "seconds": time.perf_counter() - started}
