"""Cache-aware order (SGLang, section 3 and Theorem 3.1): who waits with the longest cached prefix goes first.

Requests that share a prefix then follow one another, which walks the tree of prompts depth first: the order in which no
prefix is ever computed twice, if the cache holds the longest request. It overtakes, and so could let one with no prefix
in the cache wait for ever; who has been overtaken ``patience`` times is served before all others. To have waited long
does not count: in a long queue everybody has, and the order would be that of arrival just when sharing pays most.
"""

from __future__ import annotations

from minillm.core.request import Request
from minillm.memory.kv_manager import KVManager
from minillm.scheduling.policies import Policy


class LongestPrefixFirst(Policy):
    """SGLang's "lpm". Nobody is displaced by it; those that run keep their order of arrival.

    If more than ``most`` wait, they are served by arrival: to look them all up before every pass would cost too much.
    """

    def __init__(self, kv: KVManager, patience: int = 256, most: int = 128):
        self.kv, self.patience, self.most = kv, patience, most
        self._cached: dict[str, int] = {}  # of requests that wait: tokens in the cache, as of this pass
        self._overtaken: dict[str, int] = {}  # of the same: how many later ones joined before it
        self._waiting: list[Request] = []

    def order(self, request: Request) -> tuple[int, bool, int, int]:
        starved = self._overtaken.get(request.request_id, 0) >= self.patience
        cached = 0 if starved else self._cached.get(request.request_id, 0)
        return self.rank(request), not starved, -cached, request.arrival

    def between_passes(self, waiting: list[Request]) -> bool:
        looked_up = len(waiting) <= self.most
        self._waiting = list(waiting)
        for request in waiting:
            request_id = request.request_id
            match = self.kv.match(request.all_token_ids, request.cache_key) if looked_up else None
            self._cached[request_id] = match.num_tokens if match else 0
        return True

    def scheduled(self, request: Request, tokens: int) -> None:
        if request.request_id in self._cached:  # it has just joined
            for other in self._waiting:
                if other.arrival < request.arrival and other.request_id in self._cached:
                    self._overtaken[other.request_id] = self._overtaken.get(other.request_id, 0) + 1
        self.finished(request)

    def finished(self, request: Request) -> None:
        self._cached.pop(request.request_id, None)
        self._overtaken.pop(request.request_id, None)
