"""Scheduling between any two passes (Orca), and orders that only make sense there: some requests displace others."""

from __future__ import annotations

from minillm.core.request import Request
from minillm.scheduling.policies import Policy, StaticBatching


class IterationBatching(StaticBatching):
    """Requests join and leave between any two passes (Orca, section 3.1)."""

    def may_admit(self, running: list[Request]) -> bool:
        return True


class Priority(Policy):
    """By ``Request.priority``, a smaller number first."""

    def rank(self, request: Request) -> int:
        return request.priority


class SkipJoinMLFQ(Policy):
    """FastServe's skip-join multi-level feedback queue: short answers overtake long ones, unknown as lengths are.

    Queue i grants ``quantum`` · 2^i tokens of service; who has used them up goes one queue down. A request does not
    join at the top but at the first queue whose quantum covers its prompt, which the first pass computes whole. Who
    has waited ``patience`` passes in a row returns to the top, so nobody starves.
    """

    def __init__(self, quantum: int = 32, levels: int = 8, patience: int = 256):
        self.quantum, self.levels, self.patience = quantum, levels, patience
        self._level: dict[str, int] = {}
        self._left: dict[str, int] = {}  # tokens of service before the next queue down
        self._waited: dict[str, int] = {}  # passes since it last ran

    def rank(self, request: Request) -> int:
        level = self._level.get(request.request_id)
        return self._join(request) if level is None else level

    def _join(self, request: Request) -> int:
        fits = (i for i in range(self.levels) if self.quantum << i >= request.num_tokens)
        return self._enter(request, next(fits, self.levels - 1))

    def _enter(self, request: Request, level: int) -> int:
        self._level[request.request_id] = level
        self._left[request.request_id] = self.quantum << level
        return level

    def scheduled(self, request: Request, tokens: int) -> None:
        request_id = request.request_id
        self._waited.pop(request_id, None)
        level = self.rank(request)
        self._left[request_id] -= tokens
        if self._left[request_id] <= 0:
            self._enter(request, min(level + 1, self.levels - 1))

    def between_passes(self, waiting: list[Request]) -> bool:
        promoted = False
        for request in waiting:
            waited = self._waited[request.request_id] = self._waited.get(request.request_id, 0) + 1
            if waited > self.patience and self.rank(request) > 0:
                self._enter(request, 0)
                self._waited[request.request_id] = 0
                promoted = True
        return promoted

    def finished(self, request: Request) -> None:
        for state in (self._level, self._left, self._waited):
            state.pop(request.request_id, None)
