"""The scheduler: which tokens of which requests the next forward pass computes. No torch in here."""

from __future__ import annotations

from collections import deque

from minillm.core.batch import KnownRequest, ModelOutput, NewRequest, ScheduledBatch
from minillm.core.config import EngineConfig
from minillm.core.request import Request, RequestStatus
from minillm.memory.kv_manager import KVManager
from minillm.scheduling.policies import POLICIES


class Scheduler:
    """Every request has num_computed_tokens chasing num_tokens: ``schedule`` advances it, ``update`` adds tokens.

    ``schedule`` may be called again before ``update``: a request all of whose known tokens are computed or on their
    way has nothing to schedule and is left out, which is what asynchronous scheduling needs.
    """

    def __init__(self, config: EngineConfig, kv: KVManager, eos_token_ids: tuple[int, ...] = ()):
        self.config, self.kv = config, kv
        self.eos_token_ids = frozenset(eos_token_ids)
        self.policy = POLICIES[config.batching]()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission: the oldest first
        self.requests: dict[str, Request] = {}  # all that have not finished
        self._step = 0
        self._finished_ids: list[str] = []  # not yet told to the runner
        self._sent: dict[str, int] = {}  # output tokens the runner knows of
        if config.max_num_batched_tokens < kv.capacity:
            raise ValueError(
                f"max_num_batched_tokens is {config.max_num_batched_tokens}; without chunked prefill a whole prompt "
                f"must fit one step, so it must be at least {kv.capacity}"
            )

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def finish(self, request_id: str, reason: str, stop_reason: int | str | None = None) -> None:
        """End a request now, from whatever state, and return its blocks. Unknown and ended ids are ignored."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._finished_ids.append(request_id)
        else:
            self.waiting.remove(request)
        self.kv.free(request_id)
        self._sent.pop(request_id, None)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason

    def schedule(self) -> ScheduledBatch:
        """Form the next pass and count its tokens as computed. Empty if nothing can run before an ``update``."""
        batch = ScheduledBatch(step=self._step)
        budget = self.config.max_num_batched_tokens
        may_admit = self.policy.may_admit(self.running)
        for request in self.running:
            budget -= self._schedule_running(request, batch, budget)
        while may_admit and self.waiting and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            new = request.num_tokens - request.num_computed_tokens
            if new > budget:
                break
            if self.kv.allocate(request.request_id, request.num_computed_tokens, request.num_tokens) is None:
                break  # first come, first served: nobody overtakes
            self.waiting.popleft()
            self._admit(request, batch)
            budget -= self._count(request, new, batch)
        batch.block_copies = self.kv.take_copies()
        if batch.num_scheduled_tokens:
            batch.finished_ids, self._finished_ids = self._finished_ids, []
            self._step += 1
        return batch

    def update(self, batch: ScheduledBatch, output: ModelOutput) -> list[Request]:
        """Take in what a pass gave: append tokens, finish requests. Returns those that gained a token.

        Requests that ended meanwhile (aborted while the pass ran) are passed over.
        """
        advanced = []
        for request_id in batch.num_scheduled_tokens:
            request = self.requests.get(request_id)
            tokens = output.sampled.get(request_id)
            if request is None or not tokens:
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
        new = request.num_tokens - request.num_computed_tokens
        if new == 0 or new > budget:
            return 0
        allocation = self.kv.allocate(request.request_id, request.num_computed_tokens, request.num_tokens)
        if allocation is None:
            # Contiguous KV reserves all that a request can ever need, so this cannot happen before paged KV.
            raise RuntimeError(f"no block for {request.request_id}, which holds a whole reservation")
        sent = self._sent[request.request_id]
        batch.known_requests.append(
            KnownRequest(
                request_id=request.request_id,
                new_token_ids=request.output_token_ids[sent:],
                new_block_ids=allocation.block_ids,
                num_computed_tokens=request.num_computed_tokens,
                rewritten=allocation.rewritten,
            )
        )
        return self._count(request, new, batch)

    def _admit(self, request: Request, batch: ScheduledBatch) -> None:
        request.status = RequestStatus.RUNNING
        self.running.append(request)
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

    def _count(self, request: Request, new: int, batch: ScheduledBatch) -> int:
        batch.num_scheduled_tokens[request.request_id] = new
        request.num_computed_tokens += new
        self._sent[request.request_id] = len(request.output_token_ids)
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
