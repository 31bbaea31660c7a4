"""Who may join a batch, and who goes first. Policies of one scheduler: a pass is always counts chasing counts."""

from __future__ import annotations

from typing import Protocol

from minillm.core.request import Request


class Batching(Protocol):
    """When waiting requests may join those that run, and how a pass's budget of tokens is shared out."""

    def may_admit(self, running: list[Request]) -> bool:
        """Whether they may join this pass, given those that run now."""
        ...

    def turn(self, request: Request) -> int:
        """Who of those that run is served first: a smaller number, whatever the policy's order."""
        ...

    def tokens(self, lacking: int, budget: int) -> int:
        """How many of the ``lacking`` tokens of a request a pass computes that has room for ``budget`` more."""
        ...


class StaticBatching:
    """A batch is formed when none runs and nobody joins until its last request has finished (as FasterTransformer)."""

    def may_admit(self, running: list[Request]) -> bool:
        return not running

    def turn(self, request: Request) -> int:
        return 0

    def tokens(self, lacking: int, budget: int) -> int:
        """All or none: a prompt is computed in one pass."""
        return lacking if lacking <= budget else 0


class Policy:
    """First come, first served. The base of policies in which some requests are of a better rank than others.

    A request that waits may take the place of one that runs if its ``rank`` is smaller; among equals the earlier
    arrival goes first and nobody is displaced.
    """

    def rank(self, request: Request) -> int:
        """Smaller is better."""
        return 0

    def order(self, request: Request) -> tuple[int, ...]:
        """Sorts requests, the next to run first."""
        return self.rank(request), request.arrival

    def scheduled(self, request: Request, tokens: int) -> None:
        """Hear that a pass computes so many tokens of a request."""

    def between_passes(self, waiting: list[Request]) -> bool:
        """Look at those that wait, before a pass is formed. True if the rank of one of them changed."""
        return False

    def finished(self, request: Request) -> None:
        """Forget a request."""
