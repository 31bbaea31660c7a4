"""Who may join a batch. Policies of one scheduler: what runs in a pass is always counts chasing counts."""

from __future__ import annotations

from typing import Protocol

from minillm.core.request import Request


class Policy(Protocol):
    """Decides about admission; everything else is the scheduler's."""

    def may_admit(self, running: list[Request]) -> bool:
        """Whether waiting requests may join this pass, given those that hold KV now."""
        ...


class StaticBatching:
    """A batch is formed when none runs and nobody joins until its last request has finished (as FasterTransformer)."""

    def may_admit(self, running: list[Request]) -> bool:
        return not running


POLICIES: dict[str, type[Policy]] = {"static": StaticBatching}
