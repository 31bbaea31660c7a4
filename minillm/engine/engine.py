"""The engine: requests in, one forward pass a step, outputs out."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil
import torch
from torch import nn

from minillm.compute.attention.base import AttentionBackend
from minillm.core.batch import ScheduledBatch
from minillm.core.config import EngineConfig
from minillm.core.cost import step_cost
from minillm.core.metrics import EngineMetrics
from minillm.core.outputs import RequestOutput
from minillm.core.request import Request
from minillm.core.sampling_params import SamplingParams
from minillm.engine.executor import Executor, InProcessExecutor
from minillm.engine.output_processor import OutputProcessor
from minillm.engine.runner import ModelRunner, attention_backend
from minillm.memory.block_pool import BlockPool
from minillm.memory.kv_manager import KVManager, plan_geometry, plan_host_blocks
from minillm.memory.kv_manager import prefix_cache as configured_cache
from minillm.models.tokenizer import Tokenizer
from minillm.scheduling.scheduler import Scheduler

if TYPE_CHECKING:  # an engine without a prefix cache loads no file of one, one without grammars none of them
    from minillm.engine.structured import Grammars
    from minillm.memory.prefix_cache import PrefixCache

CPU_KV_BYTES = 1 << 30  # default KV cache on a CPU, unless a quarter of free memory is less


class EngineDeadError(RuntimeError):
    """The engine's own books failed in a step; it serves nobody any more."""


class Engine:
    """Serves requests on one model. Not thread-safe: one caller drives ``step``.

    Its parts are classes or factories, so that a learner's own can run here: ``scheduler`` is called as f(config,
    kv_manager, eos_token_ids), ``block_pool`` as f(usable blocks), ``prefix_cache`` as f(block pool, block size) where
    the config wants one, ``attention`` as f(config, device), ``executor`` as f(model, config, geometry, eos_token_ids,
    f() -> grammars); an executor of one's own makes the runner and so chooses the attention.
    """

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig,
        tokenizer: Tokenizer | None = None,
        scheduler: Callable[..., Scheduler] = Scheduler,
        attention: Callable[..., AttentionBackend] = attention_backend,
        block_pool: Callable[[int], BlockPool] = BlockPool,
        prefix_cache: Callable[[BlockPool, int], PrefixCache] | None = None,
        executor: Callable[..., Executor] | None = None,
    ):
        # The weights' own dtype, whatever their config.json or the caller says.
        config = config.override(dtype=str(next(model.parameters()).dtype).removeprefix("torch."))
        self.device = next(model.parameters()).device
        self.config = config = config.resolve(model.config, self.device.type)
        self.model_config, self.tokenizer = model.config, tokenizer
        eos = model.config.eos_token_ids
        geometry = plan_geometry(config, model.kv_cache_spec(), available_kv_bytes(config, self.device))
        host_blocks, cache = plan_host_blocks(config, geometry), configured_cache(config)
        if cache is not None:  # the config says whether there is one, a part which
            cache = prefix_cache or cache
        self.kv = KVManager(geometry, config.max_model_len, host_blocks, block_pool, cache)
        self.scheduler = scheduler(config, self.kv, eos)
        build = executor or (lambda *args: InProcessExecutor(ModelRunner(*args, attention)))
        self.executor = build(model, config, geometry, eos, lambda: self.grammars)
        self.outputs = OutputProcessor(tokenizer)
        self.metrics = EngineMetrics()
        self._arrivals = itertools.count()
        self._seeds = random.Random(config.seed)
        self._undelivered: list[RequestOutput] = []
        self._untold: list[str] = []  # finished ids whose pass failed before the runner may have read them
        self._dead: str | None = None

    # -- requests ---------------------------------------------------------------------------------------------------

    def add_request(
        self, request_id: str, prompt: str | dict, params: SamplingParams | None = None, priority: int = 0
    ) -> None:
        """Queue a prompt: a string or {"prompt_token_ids": [...]}. ``params`` None: SamplingParams().

        Prompts of one "cache_salt", a string beside the ids, share cached prefixes with each other and with no others.

        ``priority``: a smaller number goes first, with scheduling_policy="priority".

        Whatever can be refused is refused here: ValueError names the number and what would be right.
        """
        self._check_alive()
        if not isinstance(request_id, str):
            raise ValueError(f"request id is {request_id!r}; it must be a string")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority is {priority!r}; it must be a whole number")
        params = params or SamplingParams()
        ids = [request_id] if params.n == 1 else [f"{request_id}/{i}" for i in range(params.n)]
        # A sample's id stays taken until its whole prompt has finished.
        if request_id in self.outputs.prompts or any(self.outputs.prompt_id(i) is not None for i in ids):
            raise ValueError(f"request id {request_id!r} is in use; ids must differ while a request runs")
        text, prompt_ids = self._tokenize(prompt)
        salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
        if not isinstance(salt, str | None):
            raise ValueError(f"cache_salt is {salt!r}; it must be a string")
        self._refuse(prompt_ids, params)
        forced = self._forced(prompt_ids, params)
        # A draw depends on seed and sample index, so the n samples share one seed.
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        requests = [
            Request(
                internal_id,
                prompt_ids,
                replace(params, prompt_logprobs=params.prompt_logprobs if i == 0 else None),
                seed,
                sample_index=i,
                group=request_id if params.n > 1 else None,
                cache_salt=salt,
                priority=priority,
                arrival=next(self._arrivals),
                output_token_ids=list(forced),
            )
            for i, internal_id in enumerate(ids)
        ]
        self.outputs.add(request_id, text, requests)
        for request in requests:
            self.scheduler.add(request)

    def abort(self, request_id: str, why: str | None = None) -> RequestOutput | None:
        """End a prompt now, all its samples, and return its blocks. Its last output, or None for an unknown id.

        ``why`` becomes the stop reason.
        """
        self._check_alive()
        state = self.outputs.prompts.get(request_id)
        if state is None:
            return None
        for internal_id in state.samples:
            self.scheduler.finish(internal_id, "abort")
        return self.outputs.abort(request_id, why)

    def block(self, request_id: str, reason: str) -> None:
        """Set a prompt aside, all its samples that have not ended, until ``unblock``: say, while a tool runs.

        It keeps its KV until somebody needs the room. ValueError for an unknown prompt, or one that is blocked.
        """
        for internal_id in self._unfinished(request_id):
            self.scheduler.block(internal_id, reason)

    def unblock(self, request_id: str) -> None:
        """Let a blocked prompt go on."""
        for internal_id in self._unfinished(request_id):
            self.scheduler.unblock(internal_id)

    def _unfinished(self, request_id: str) -> list[str]:
        self._check_alive()
        state = self.outputs.prompts.get(request_id)
        if state is None:
            raise ValueError(f"request {request_id!r} is not known, or has finished")
        return [i for i in state.samples if i in self.scheduler.requests]

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything left to compute or to deliver, now or once it is unblocked."""
        return bool(self._undelivered) or self.scheduler.has_unfinished()

    def has_runnable_requests(self) -> bool:
        """The same, leaving out what is blocked."""
        return bool(self._undelivered) or self.scheduler.has_runnable()

    def _tokenize(self, prompt: str | dict) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this engine has no tokenizer; give {'prompt_token_ids': [...]}")
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                half = prompt[error.start]
                raise ValueError(
                    f"the prompt holds {half!r} at character {error.start}, a lone surrogate; give whole characters"
                ) from None
            return prompt, self.tokenizer.encode(prompt)
        if not isinstance(prompt, dict) or "prompt_token_ids" not in prompt:
            raise ValueError(f"prompt is {prompt!r}; it must be a string or {{'prompt_token_ids': [...]}}")
        ids = prompt["prompt_token_ids"]
        if not isinstance(ids, list | tuple):
            raise ValueError(f"prompt_token_ids is {ids!r}; it must be a list of token ids")
        return prompt.get("prompt"), list(ids)

    def _refuse(self, prompt_ids: list[int], params: SamplingParams) -> None:
        """ValueError for what could never be served."""
        vocab, capacity = self.model_config.vocab_size, self.kv.capacity
        if not prompt_ids:
            raise ValueError("the prompt is empty; it must have at least one token")
        self._check_vocabulary("the prompt", prompt_ids)
        for name, ids in params.token_ids_named().items():
            self._check_vocabulary(name, ids)
        if len(prompt_ids) + 1 > capacity:
            raise ValueError(
                f"the prompt has {len(prompt_ids)} tokens; with one output token it must fit into {capacity} "
                f"(max_model_len is {self.config.max_model_len})"
            )
        ends = {*self.model_config.eos_token_ids, *params.stop_token_ids}
        if params.min_tokens and ends.issuperset(params.allowed_token_ids or range(vocab)):
            raise ValueError(
                f"min_tokens is {params.min_tokens}, which holds back end and stop tokens, and of allowed_token_ids "
                "nothing else is left; allow one that does not end the output"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this engine has none")
        if params.prompt_logprobs is not None and params.prompt_logprobs_start >= len(prompt_ids):
            raise ValueError(
                f"prompt_logprobs_start is {params.prompt_logprobs_start}; the prompt has {len(prompt_ids)} tokens, "
                "counted from 0"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > vocab:
                raise ValueError(f"{name} is {getattr(params, name)}; the vocabulary has {vocab} tokens")

    def _forced(self, prompt_ids: list[int], params: SamplingParams) -> list[int]:
        """The output tokens that a request's grammar forces before any is sampled. ValueError if it cannot be used."""
        if params.structured_outputs is None:
            return []
        for name, value in (
            ("ignore_eos", params.ignore_eos),
            ("min_tokens", params.min_tokens),
            ("allowed_token_ids", params.allowed_token_ids is not None),
        ):
            if value:
                raise ValueError(
                    f"{name} is {getattr(params, name)} with structured_outputs; the grammar says which tokens may "
                    "come and where the output ends, so leave it out"
                )
        state = self.grammars.start(params)
        if not self.config.enable_jump_forward or params.logprobs is not None:
            return []
        most = self.kv.capacity - len(prompt_ids)
        if params.max_tokens is not None:
            most = min(most, params.max_tokens)
        forced = state.forced(most - 1)  # one is sampled, so that the request runs at all: an end token too
        ends = {*self.model_config.eos_token_ids, *params.stop_token_ids}
        return forced[:-1] if forced and forced[-1] in ends else forced

    @functools.cached_property
    def grammars(self) -> Grammars:
        """Of this engine's tokenizer. Imported only here, so that an engine loads no file of a later chapter."""
        if self.tokenizer is None:
            raise ValueError("structured_outputs need a tokenizer, and this engine has none")
        try:
            from minillm.engine.structured import Grammars
        except ImportError as error:
            raise ValueError(
                f"structured_outputs need what came with chapter 05, and it is not here ({error})"
            ) from None
        return Grammars(self.tokenizer, self.model_config.vocab_size, self.model_config.eos_token_ids)

    def _check_vocabulary(self, what: str, ids: Iterable[int]) -> None:
        vocab = self.model_config.vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise ValueError(f"{what} holds token id {token!r}; ids are whole numbers from 0 to {vocab - 1}")

    # -- the loop ---------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """One forward pass. Returns the outputs of all prompts that gained a token; [] if nothing is queued.

        If the pass itself raises (out of memory, an interrupt), the prompts of its batch are aborted, the engine
        goes on for the others, and the exception comes out here; the next step returns the aborted outputs. If the
        engine's own books fail (or an interrupt falls into them) it is dead, and every later call says so.
        """
        self._check_alive()
        undelivered, self._undelivered = self._undelivered, []
        try:
            batch = self.scheduler.schedule()
            if not batch.num_scheduled_tokens:
                if self.scheduler.has_runnable():
                    raise RuntimeError("requests are queued but none can run")
                return undelivered
        except BaseException as error:
            self._die("scheduling", error)
        batch.finished_ids = [*self._untold, *batch.finished_ids]
        try:
            output = self.executor.submit(batch).result()
        except BaseException:
            self._undelivered, self._untold = undelivered, batch.finished_ids
            self.scheduler.lost(batch)
            for request_id in batch.num_scheduled_tokens:
                self._drop(request_id)
            raise
        try:
            self._untold = []
            self._record(batch)
            advanced = self.scheduler.update(batch, output)
            outputs, stopped = self.outputs.process(advanced, output)
            for request_id, stop in stopped:
                self.scheduler.finish(request_id, "stop", stop)
        except BaseException as error:
            self._die("taking in a pass", error)
        for request_id, why in output.failed.items():
            self._drop(request_id, why)
        self.metrics.tokens_generated += sum(map(len, output.sampled.values()))
        self.metrics.tokens_forced += sum(output.num_forced.values())
        return undelivered + outputs

    def _record(self, batch: ScheduledBatch) -> None:
        requests = self.scheduler.requests
        lengths = [
            (new, requests[request_id].num_computed_tokens) for request_id, new in batch.num_scheduled_tokens.items()
        ]
        cost = step_cost(self.model_config, lengths, self.config.attention_backend, self.config.dtype)
        used = self.kv.num_used_rows({i: requests[i].num_computed_tokens for i in self.kv.owners})
        self.metrics.record_pass(batch.num_tokens, self.kv.num_reserved_rows, used, cost.hbm_bytes)
        self.metrics.record_moves(batch)
        begun = sum(len(new.output_token_ids) for new in batch.new_requests)  # forced when they were added
        self.metrics.tokens_forced += begun
        self.metrics.tokens_generated += begun

    def _drop(self, internal_id: str, why: str | None = None) -> None:
        """Abort the prompt that a request belongs to, if it has not gone yet."""
        prompt_id = self.outputs.prompt_id(internal_id)
        if prompt_id is not None:
            self._undelivered.append(self.abort(prompt_id, why))

    def check_integrity(self) -> bool:
        """True if every block of the KV cache is free or owned by a live request; IntegrityError says what is not."""
        return self.kv.check_integrity(live=self.scheduler.requests)

    def reset_prefix_cache(self) -> bool:
        """Drop the KV that is kept of earlier prompts; False, and nothing is dropped, while a request uses any."""
        return self.kv.reset_prefix_cache()

    def close(self) -> None:
        """Abort everything and give up model and KV cache."""
        if self.alive:
            for request_id in list(self.outputs.prompts):
                self.abort(request_id)
            self._dead = "it was closed"
        self.executor.shutdown()

    @property
    def alive(self) -> bool:
        """False once it was closed or its books failed."""
        return self._dead is None

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineDeadError(f"this engine serves no more: {self._dead}")

    def _die(self, where: str, error: BaseException):
        self._dead = f"{where} failed with {error!r}"
        if not isinstance(error, Exception):
            raise error  # an interrupt stays one
        raise EngineDeadError(f"the engine is dead: {self._dead}") from error


def available_kv_bytes(config: EngineConfig, device: torch.device) -> int:
    """Bytes the KV cache may take: as configured, or a share of what is free once the weights are loaded."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(config.gpu_memory_utilization * total) - (total - free)
    return min(CPU_KV_BYTES, psutil.virtual_memory().available // 4)
