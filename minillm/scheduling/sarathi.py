"""Sarathi-Serve's scheduling (Agrawal et al. 2024, Algorithm 3): no running request ever waits for another's prompt.

A pass has a budget of tokens, τ. Requests that decode take their one token each first; what is left goes to chunks of
the prompts that have begun, then to prompts that join. So a pass takes about as long as τ tokens take, however long the
prompts are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from minillm.core.request import Request
from minillm.scheduling.iteration import IterationBatching


class StallFreeBatching(IterationBatching):
    """Chunks of whatever size the budget leaves; decodes come before them."""

    def tokens(self, lacking: int, budget: int) -> int:
        return min(lacking, budget)

    def turn(self, request: Request) -> int:
        return 0 if request.num_tokens - request.num_computed_tokens <= 1 else 1


def largest_budget(step_seconds: Mapping[int, float], target: float) -> int:
    """The token budget for a target of ``target`` seconds between two tokens of a request (section 4.3).

    ``step_seconds`` has the measured time of a pass of so many tokens, for each budget that was tried. A larger budget
    that happened to be faster does not count if a smaller one is too slow already: what holds must hold below it too.
    ValueError if no budget is fast enough.
    """
    best = None
    for budget in sorted(step_seconds):
        if step_seconds[budget] > target:
            break
        best = budget
    if best is None:
        smallest = min(step_seconds, default=None)
        fastest = "nothing was measured" if smallest is None else f"{smallest} tokens take {step_seconds[smallest]:.4f}"
        raise ValueError(f"target is {target} seconds between tokens; {fastest}")
    return best


# -- Algorithm 3 to read: plain data, in passes ------------------------------------------------------------------------


@dataclass
class Job:
    """A request as Algorithm 3 sees it, beside the output length that nobody knows. Arrival in passes."""

    name: str
    prompt: int
    output: int
    arrival: int = 0
    computed: int = 0  # tokens of its prompt whose KV is there
    made: int = 0  # tokens of its output


def first_stall(trace: list[dict[str, int]], jobs: list[Job]) -> tuple[int, str] | None:
    """(pass, name) where one that decodes is left out; None if nowhere."""
    had = dict.fromkeys((job.name for job in jobs), 0)
    for n, plan in enumerate(trace):
        for job in jobs:
            decodes = job.prompt <= had[job.name] < job.prompt + job.output - 1
            if decodes and not plan.get(job.name):
                return n, job.name
            had[job.name] += plan.get(job.name, 0)
    return None


def next_pass(batch: list[Job], queue: list[Job], budget: int, can_allocate: Callable[[Job], bool]) -> dict[str, int]:
    """Tokens that the next pass computes, by name. Who joins moves from ``queue`` to ``batch``."""
    plan = {}
    for job in batch:  # all that decode, whatever the budget
        if job.computed == job.prompt:
            plan[job.name] = 1
    for job in batch:  # then prompts that have begun
        left = budget - sum(plan.values())
        if job.computed < job.prompt and left > 0:
            plan[job.name] = min(job.prompt - job.computed, left)
    while queue and can_allocate(queue[0]) and sum(plan.values()) < budget:
        job = queue.pop(0)  # then new ones
        plan[job.name] = min(job.prompt, budget - sum(plan.values()))
        batch.append(job)
    return plan


def stall_free(jobs: list[Job], seats: int, budget: int, next_pass: Callable = next_pass) -> list[dict[str, int]]:
    """Serve jobs, given in order of arrival: the plan of every pass. Whoever has a seat can be allocated."""
    coming, queue, batch, trace = list(jobs), [], [], []
    while coming or queue or batch:
        while coming and coming[0].arrival <= len(trace):
            queue.append(coming.pop(0))
        plan = next_pass(batch, queue, budget, lambda _: len(batch) < seats)
        trace.append(plan)
        for job in list(batch):
            new = plan.get(job.name, 0)
            if job.computed < job.prompt:
                job.computed += new
            if new and job.computed == job.prompt:  # its last row gives a token
                job.made += 1
            if job.made == job.output:
                batch.remove(job)
    return trace


def rows_read_again(chunks: list[int]) -> int:
    """KV rows that the chunks of one prompt read of chunks before them; N equal ones of c: c · N(N − 1)/2."""
    written = again = 0
    for chunk in chunks:
        again += written
        written += chunk
    return again
