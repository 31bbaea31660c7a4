"""Orca to read: a batch as counters, Algorithm 1 line by line, its fairness invariant. Plain data.

Requests are numbered in order of arrival. The engine's own scheduler is scheduler.py; tests hold it against these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


def serve(
    lengths: list[int], seats: int, may_join: Callable[[list[int]], bool], arrivals: list[int] | None = None
) -> list[str]:
    """Serve requests of so many tokens. A line each, a mark a pass: # runs, - ended and seat held, . waits.

    ``may_join(running)``: whether those that wait may take seats; ``arrivals`` in passes, all 0 if not given.
    """
    arrivals = arrivals or [0] * len(lengths)
    left, batch, lines, now = list(lengths), [], [""] * len(lengths), 0
    while any(left):
        running = [i for i in batch if left[i]]
        if may_join(running):
            here = [i for i in range(len(left)) if left[i] and arrivals[i] <= now]
            waiting = [i for i in here if i not in running]
            batch = running + waiting[: seats - len(running)]
        for i in range(len(left)):
            work, held = i in batch and left[i] > 0, i in batch
            waits = left[i] > 0 and arrivals[i] <= now
            lines[i] += "#" if work else "-" if held else "." if waits else " "
            left[i] -= work
        now += 1
    return lines


@dataclass
class Req:
    """A request as Algorithm 1 sees it, beside the length that nobody knows."""

    arrival: int
    length: int
    max_tokens: int
    state: str = "INITIATION"
    done: int = 0


def select(pool: list[Req], n_rsrv: int, max_bs: int, n_slots: int) -> tuple[list[Req], int]:
    """The next batch and the slots reserved then."""
    batch = []  # 18
    pool = [req for req in pool if req.state != "RUNNING"]  # 19
    pool.sort(key=lambda req: req.arrival)  # 20
    for req in pool:  # 21
        if len(batch) == max_bs:  # 22
            break
        if req.state == "INITIATION":  # 23
            new_n_rsrv = n_rsrv + req.max_tokens  # 24
            if new_n_rsrv > n_slots:  # 25
                break
            n_rsrv = new_n_rsrv  # 26
        batch.append(req)  # 27
    return batch, n_rsrv  # 28


def orca(
    pool: list[Req], n_workers: int, max_bs: int, n_slots: int, select: Callable = select
) -> list[tuple[list[int], int]]:
    """Algorithm 1's loop until the pool is empty: for each pass who is in it, and the slots reserved then."""
    pool, n_rsrv, in_flight, trace = list(pool), 0, deque(), []  # 1, 2
    while pool:  # 3
        batch, n_rsrv = select(pool, n_rsrv, max_bs, n_slots)  # 4
        in_flight.append(batch)  # 5, 8
        trace.append(([req.arrival for req in batch], n_rsrv))
        for req in batch:  # 6
            req.state = "RUNNING"  # 7
        if len(in_flight) == n_workers:  # 9
            for req in in_flight.popleft():  # 10, 11, 15
                req.state = "INCREMENT"  # 12
                req.done += 1
                if req.done == req.length:  # 13
                    n_rsrv -= req.max_tokens  # 14
                    pool.remove(req)
    return trace


def first_unfair(trace: list[list[int]], lengths: list[int]) -> tuple[int, int, int] | None:
    """(pass, earlier, later) where the later request has run more, though the earlier wants more; None if nowhere.

    ``trace``: for each pass who ran.
    """
    runs = [0] * len(lengths)
    for n, ids in enumerate(trace):
        for i in ids:
            runs[i] += 1
        for later in range(len(runs)):
            for earlier in range(later):
                if runs[earlier] < min(runs[later], lengths[earlier]):
                    return n, earlier, later
    return None
