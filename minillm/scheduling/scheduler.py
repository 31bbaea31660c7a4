"""The scheduler: which tokens of which requests the next forward pass computes. No torch in here."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from minillm.core.batch import KnownRequest, ModelOutput, NewRequest, ScheduledBatch
from minillm.core.config import EngineConfig
from minillm.core.request import Request, RequestStatus
from minillm.memory.kv_manager import Allocation, KVManager
from minillm.scheduling.policies import Batching, Policy, StaticBatching

if TYPE_CHECKING:
    from minillm.memory.prefix_cache import Match


def batching(config: EngineConfig) -> Batching:
    """The configured one. Imported only here, so that an engine loads no file of a later chapter."""
    if config.enable_chunked_prefill:
        from minillm.scheduling.sarathi import StallFreeBatching

        return StallFreeBatching()
    if config.batching == "iteration":
        from minillm.scheduling.iteration import IterationBatching

        return IterationBatching()
    return StaticBatching()


def policy(config: EngineConfig, kv: KVManager) -> Policy:
    """The configured order."""
    if config.scheduling_policy == "fcfs":
        return Policy()
    if config.scheduling_policy == "lpm":
        from minillm.scheduling.cache_aware import LongestPrefixFirst

        return LongestPrefixFirst(kv)
    from minillm.scheduling.iteration import Priority, SkipJoinMLFQ

    return {"priority": Priority, "mlfq": SkipJoinMLFQ}[config.scheduling_policy]()


class Scheduler:
    """Every request has num_computed_tokens chasing num_tokens: ``schedule`` advances it, ``update`` adds tokens.

    A request waits, runs, or is blocked on something outside. Who runs holds KV for all its tokens; if blocks run
    out, the last in the policy's order gives up its own and waits again (preemption), so the first never does. At
    most max_num_seqs run; a blocked one takes no seat and keeps its KV until somebody needs the room.

    ``schedule`` may be called again before ``update``: a request all of whose known tokens are computed or on their
    way has nothing to schedule and is left out, which is what asynchronous scheduling needs.
    """

    def __init__(self, config: EngineConfig, kv: KVManager, eos_token_ids: tuple[int, ...] = ()):
        self.config, self.kv = config, kv
        self.eos_token_ids = frozenset(eos_token_ids)
        self.batching = batching(config)
        self.policy = policy(config, kv)
        self.waiting: list[Request] = []  # in the policy's order
        self.running: list[Request] = []  # in order of admission
        self.requests: dict[str, Request] = {}  # all that have not finished
        self._groups: dict[str, list[Request]] = {}  # samples of one prompt
        self._step = 0
        self._finished_ids: list[str] = []  # not yet told to the runner
        self._preempted_ids: list[str] = []  # since the last pass
        self._sent: dict[str, int] = {}  # output tokens the runner knows of, of requests it has met
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < kv.capacity:
            raise ValueError(
                f"max_num_batched_tokens is {config.max_num_batched_tokens}; without chunked prefill a whole prompt "
                f"must fit one step, so it must be at least {kv.capacity}"
            )

    # -- requests come, pause and go ----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        if request.group is not None:
            self._groups.setdefault(request.group, []).append(request)
        self._wait(request)

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def has_runnable(self) -> bool:
        """Whether anything waits or runs: not so if all that is left is blocked."""
        return bool(self.running or self.waiting)

    def finish(self, request_id: str, reason: str, stop_reason: int | str | None = None) -> None:
        """End a request now, from whatever state, and return its blocks. Unknown and ended ids are ignored."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        self._leave_queues(request)
        request.status = RequestStatus.FINISHED
        if self._sent.pop(request_id, None) is not None:
            self._finished_ids.append(request_id)
        if request.group is not None:
            self._groups[request.group].remove(request)
            if not self._groups[request.group]:
                del self._groups[request.group]
        if reason != "abort":  # which may come after a failed pass, that has not written all rows it was to write
            self._keep(request)
        self.kv.free(request_id)
        self.policy.finished(request)
        request.finish_reason, request.stop_reason = reason, stop_reason

    def block(self, request_id: str, reason: str) -> None:
        """Set a request aside until ``unblock``: it waits for something outside, such as a tool's answer."""
        request = self._known(request_id)
        if request.status is RequestStatus.BLOCKED:
            raise ValueError(f"request {request_id!r} is blocked already, on {request.blocked_on!r}")
        self._leave_queues(request)
        request.status, request.blocked_on = RequestStatus.BLOCKED, reason

    def unblock(self, request_id: str) -> None:
        """Let a blocked request go on: it waits for a seat, with its KV if nobody needed the room."""
        request = self._known(request_id)
        if request.status is not RequestStatus.BLOCKED:
            raise ValueError(f"request {request_id!r} is {request.status.value}, not blocked")
        request.blocked_on = None
        self._wait(request)

    def preempt(self, request_id: str) -> None:
        """Take a request's KV away: to host memory, or if that is full or not wanted, to be computed again."""
        request = self._known(request_id)
        if not self.kv.holds(request_id):
            raise ValueError(f"request {request_id!r} has no KV that could be taken away")
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._wait(request)
        swap = self.config.preemption_mode == "swap"
        if not (swap and self.kv.swap_out(request_id, request.num_computed_tokens)):
            self._keep(request)
            self._forget_rows(request)
        request.num_preemptions += 1
        self._preempted_ids.append(request_id)

    def lost(self, batch: ScheduledBatch) -> None:
        """A pass failed, perhaps before its swaps were done: what they were to save must be computed again."""
        for request_id in self.kv.swapped_by(batch):
            self._forget_rows(self.requests[request_id])

    def _known(self, request_id: str) -> Request:
        if request_id not in self.requests:
            raise ValueError(f"request {request_id!r} is not known, or has finished")
        return self.requests[request_id]

    def _wait(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        insort(self.waiting, request, key=self.policy.order)

    def _leave_queues(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)

    def _keep(self, request: Request, num_tokens: int | None = None) -> None:
        """Leave the KV of a request's first tokens, of all computed ones by default, to the prefix cache."""
        if self.kv.cache is not None:
            tokens = request.all_token_ids[: request.num_computed_tokens if num_tokens is None else num_tokens]
            self.kv.keep(request.request_id, tokens, request.cache_key, request.status is RequestStatus.RUNNING)

    def _forget_rows(self, request: Request) -> None:
        self.kv.free(request.request_id)
        request.num_computed_tokens = 0

    # -- the two halves of a step --------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch:
        """Form the next pass and count its tokens as computed. Empty if nothing can run before an ``update``."""
        batch = ScheduledBatch(step=self._step)
        budget = self.config.max_num_batched_tokens
        if self.policy.between_passes(self.waiting):
            self.waiting.sort(key=self.policy.order)
        may_admit = self.batching.may_admit(self.running)
        if may_admit:
            self._displace()
        before = len(self._preempted_ids)
        for request in sorted(self.running, key=lambda r: (self.batching.turn(r), self.policy.order(r))):
            if request.status is RequestStatus.RUNNING:  # it may just have given way
                budget -= self._schedule_running(request, batch, budget)
        if len(self._preempted_ids) == before:  # or who gave way would come back at once, for another to give way
            self._admit_waiting(batch, budget, may_admit)
        if batch.num_scheduled_tokens:
            self.kv.take_moves(batch)
            batch.finished_ids, self._finished_ids = self._finished_ids, []
            batch.preempted_ids, self._preempted_ids = self._preempted_ids, []
            self._step += 1
        return batch

    def update(self, batch: ScheduledBatch, output: ModelOutput) -> list[Request]:
        """Take in what a pass gave: append tokens, finish requests. Returns those that gained a token.

        Requests that ended meanwhile (aborted while the pass ran) are passed over.
        """
        advanced = []
        for request_id, new in batch.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.num_computed_tokens - new < len(request.prompt_token_ids):
                self._keep(request)  # already now: those that come while it runs begin like it
            tokens = output.sampled.get(request_id)
            if not tokens:
                continue
            advanced.append(request)
            for token in tokens:
                request.output_token_ids.append(token)
                reason = self._stop(request, token)
                if reason:
                    self.finish(request_id, *reason)
                    break
        return advanced

    def _schedule_running(self, request: Request, batch: ScheduledBatch, budget: int) -> int:
        computed = request.num_computed_tokens
        new = self.batching.tokens(request.num_tokens - computed, budget)
        if new == 0:
            return 0
        rows = computed, computed + new
        while (allocation := self.kv.allocate(request.request_id, *rows)) is None:
            # Never who is in this pass already, whose rank may just have become worse than the request's own.
            others = (r for r in self.running if r.request_id not in batch.num_scheduled_tokens)
            victim = self._idle_owner(request) or max(others, key=self.policy.order)
            first = min(self.running, key=self.policy.order)
            if victim is request is first and self.kv.forget(request.request_id):
                continue  # the first in order never gives way; what the cache keeps for it does
            self.preempt(victim.request_id)
            if victim is request:
                return 0
        self._tell_known(request, batch, allocation)
        return self._count(request, new, batch)

    def _admit_waiting(self, batch: ScheduledBatch, budget: int, may_admit: bool) -> None:
        """Let waiting requests join, first come, first served: nobody overtakes."""
        seats = self.config.max_num_seqs - len(self.running)
        for request in list(self.waiting):
            if seats <= 0:
                break
            source = self._sibling(request)
            if not may_admit and source is None:
                break
            seats -= 1
            if source is not None and not self._prompt_is_there(source, batch):
                continue  # the seat is kept: the prompt is computed once, by the sample that runs
            new = self._join(request, source, batch, budget)
            if not new:
                break
            budget -= new

    def _join(self, request: Request, source: Request | None, batch: ScheduledBatch, budget: int) -> int:
        """Let a waiting request into the pass. Tokens that it computes there; 0 if it cannot join."""
        match = self._cached(request) if source is None else None
        starts: list[tuple[int, Match | None]] = [(request.num_computed_tokens, None)]
        if source is not None:
            starts = [(min(len(request.prompt_token_ids), request.num_tokens - 1), None)]
        elif match is not None:
            # To share a prefix may take a block more than to compute it: who is alone must not fail by that.
            starts = [(match.num_tokens, match), *(starts if not self.running else [])]
        for rows, match in starts:
            new = self.batching.tokens(request.num_tokens - rows, budget)
            if new and self._admit(request, source, rows, batch, match):
                return self._count(request, new, batch)
        return 0

    def _admit(
        self, request: Request, source: Request | None, rows: int, batch: ScheduledBatch, match: Match | None = None
    ) -> bool:
        """Give a waiting request a seat and blocks, those of idle owners too; False if there are not enough.

        It begins with ``rows`` computed ones: its own, or those of ``source``, or those of ``match``.
        """
        request_id = request.request_id
        if source is not None:
            self._keep(source, rows)  # so that both lock in the cache what they share
            self.kv.fork(source.request_id, request_id, rows)
        if match is not None:
            self.kv.adopt(request_id, match)
        while self.kv.allocate(request_id, rows, request.num_tokens, leave=self._wanted_next()) is None:
            idle = self._idle_owner(request)
            if idle is None:
                if source is not None or match is not None:
                    self.kv.free(request_id)
                return False
            self.preempt(idle.request_id)
        self.waiting.remove(request)
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, rows
        self.running.append(request)
        if match is not None:
            batch.num_cached_tokens += rows
        if request.num_cached_tokens is None:
            request.num_cached_tokens = rows if match is not None else 0
        if request_id in self._sent:
            self._tell_known(request, batch, Allocation(self.kv.block_ids(request_id), rewritten=True))
        else:
            self._tell_new(request, batch)
        return True

    def _displace(self) -> None:
        """Make way for those that wait, if some that run are of a worse rank."""
        blocks = 0
        for seats, request in enumerate(list(self.waiting), start=1):
            if not self._someone_is_worse(request):
                break  # they are in order: no later one is better
            blocks += self.kv.blocks_lacking(request.request_id, request.num_tokens)
            while self._someone_is_worse(request) and (
                len(self.running) + seats > self.config.max_num_seqs
                or blocks + self._wanted_next() > self.kv.num_free_blocks
            ):
                self.preempt(max(self.running, key=self.policy.order).request_id)

    def _someone_is_worse(self, request: Request) -> bool:
        return any(self.policy.rank(request) < self.policy.rank(other) for other in self.running)

    def _wanted_next(self) -> int:
        """Blocks to leave free for those that run: one each, or who joins soon makes somebody give way."""
        return len(self.running) if self.kv.grows else 0

    def _idle_owner(self, but: Request) -> Request | None:
        """The last in order of those that hold blocks and do not run."""
        owners = (self.requests[i] for i in self.kv.owners)
        idle = [r for r in owners if r.status is not RequestStatus.RUNNING and r is not but]
        return max(idle, key=self.policy.order, default=None)

    def _sibling(self, request: Request) -> Request | None:
        """A sample of the same prompt whose KV of the prompt this one can share; None if it must compute its own."""
        if request.group is None or not self.kv.grows or request.num_computed_tokens:
            return None
        if request.sampling_params.prompt_logprobs is not None:
            return None  # it wants to see every prompt token computed
        running = (r for r in self._groups[request.group] if r.status is RequestStatus.RUNNING)
        return max(running, key=lambda r: r.num_computed_tokens, default=None)

    def _cached(self, request: Request) -> Match | None:
        """What the prefix cache has of a request that has no rows of its own."""
        if request.num_computed_tokens:
            return None
        params, tokens = request.sampling_params, request.all_token_ids
        if params.prompt_logprobs is not None:  # it wants to see every prompt token computed from there on
            tokens = tokens[: params.prompt_logprobs_start]
        return self.kv.match(tokens, request.cache_key) if tokens else None

    @staticmethod
    def _prompt_is_there(source: Request, batch: ScheduledBatch) -> bool:
        """Whether earlier passes have written it: a copy is made before the pass, so this one's rows do not count."""
        written = source.num_computed_tokens - batch.num_scheduled_tokens.get(source.request_id, 0)
        return written >= len(source.prompt_token_ids)

    def _tell_new(self, request: Request, batch: ScheduledBatch) -> None:
        batch.new_requests.append(
            NewRequest(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=list(request.output_token_ids),
                sampling_params=request.sampling_params,
                seed=request.seed,
                sample_index=request.sample_index,
                adapter_id=request.adapter_id,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=self.kv.block_ids(request.request_id),
            )
        )

    def _tell_known(self, request: Request, batch: ScheduledBatch, allocation: Allocation) -> None:
        batch.known_requests.append(
            KnownRequest(
                request_id=request.request_id,
                new_token_ids=request.output_token_ids[self._sent[request.request_id] :],
                new_block_ids=allocation.block_ids,
                num_computed_tokens=request.num_computed_tokens,
                rewritten=allocation.rewritten,
            )
        )

    def _count(self, request: Request, new: int, batch: ScheduledBatch) -> int:
        batch.num_scheduled_tokens[request.request_id] = new
        request.num_computed_tokens += new
        self._sent[request.request_id] = len(request.output_token_ids)
        self.policy.scheduled(request, new)
        return new

    def _stop(self, request: Request, token: int) -> tuple[str, int | None] | None:
        """(finish_reason, stop_reason) if the request ends with this token."""
        params = request.sampling_params
        if len(request.output_token_ids) >= params.min_tokens:
            if token in self.eos_token_ids and not params.ignore_eos:
                return "stop", None
            if token in params.stop_token_ids:
                return "stop", token
        if params.max_tokens is not None and len(request.output_token_ids) >= params.max_tokens:
            return "length", None
        return ("length", None) if request.num_tokens >= self.kv.capacity else None
