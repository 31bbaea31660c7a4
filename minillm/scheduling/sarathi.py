"""Sarathi-Serve's scheduling (Agrawal et al. 2024, Algorithm 3): no running request ever waits for another's prompt.

A pass has a budget of tokens, τ. Requests that decode take their one token each first; what is left goes to chunks of
the prompts that have begun, then to prompts that join. So a pass takes about as long as τ tokens take, however long the
prompts are.
"""

from __future__ import annotations

from collections.abc import Mapping

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
