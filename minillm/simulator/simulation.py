"""The engine's loop in simulated time: the real scheduler and block books, tokens faked, seconds from the cost model.

What a pass takes is ``core.cost.step_cost(...).seconds(device)``, the roofline at data-sheet rates: a bound no engine
quite reaches, so compare simulations with each other and not with a clock. Left out unless told otherwise: the host's
work between passes, communication between devices, kernels that read small blocks badly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from statistics import fmean

import simpy

from minillm.core.batch import ModelOutput, ScheduledBatch
from minillm.core.config import EngineConfig
from minillm.core.cost import step_cost
from minillm.core.kv_spec import ITEMSIZE, FullAttentionSpec
from minillm.core.metrics import EngineMetrics
from minillm.core.model_config import ModelConfig
from minillm.core.presets import Device
from minillm.core.request import Request
from minillm.core.sampling_params import SamplingParams
from minillm.core.workloads import WorkloadRequest
from minillm.memory.kv_manager import KVManager, bytes_per_row, plan_geometry, plan_host_blocks, prefix_cache
from minillm.scheduling.scheduler import Scheduler
from minillm.simulator.reservation import RESERVATIONS, ReservedKV


@dataclass(frozen=True)
class HostLink:
    """The way to host memory, for swapping: bytes a second, and seconds that each block costs beside its bytes.

    25 GB/s is about what PCIe 4.0 x16 gives of its 32. Small blocks do badly in PagedAttention's Figure 19 because
    each is a copy of its own: that is ``seconds_per_block``, left at 0 here.
    """

    bandwidth: float = 25e9
    seconds_per_block: float = 0.0

    def seconds(self, blocks: int, block_bytes: int) -> float:
        return blocks * (block_bytes / self.bandwidth + self.seconds_per_block)


@dataclass(frozen=True)
class RequestRecord:
    """One sample of one request. Seconds of simulated time."""

    request_id: str
    arrival: float
    prompt_len: int
    token_times: list[float] = field(repr=False)  # when each output token was there
    preemptions: int

    @property
    def output_len(self) -> int:
        return len(self.token_times)

    @property
    def finish(self) -> float:
        return self.token_times[-1]

    @property
    def time_to_first_token(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def latency(self) -> float:
        return self.finish - self.arrival

    @property
    def normalized_latency(self) -> float:
        """End-to-end latency over output tokens, as in Orca's Figure 10 and PagedAttention's Figure 12."""
        return self.latency / self.output_len

    @property
    def gaps(self) -> list[float]:
        """Between one token and the next."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]


@dataclass(frozen=True)
class KVRows:
    """What the rows of the KV cache are in use for during a pass: the four parts of PagedAttention's Figure 2."""

    tokens: int  # hold a token; a row that several samples share counts once
    reserved: int  # held, and its owner will write them
    internal: int  # held, and nobody ever writes them
    free: int  # held by nobody; while a request is short of memory, external fragmentation


@dataclass(frozen=True)
class PassRecord:
    """One forward pass."""

    step: int
    start: float
    seconds: float  # host overhead, swaps and copies included
    scheduled: dict[str, int]  # request -> tokens computed
    prompts: list[str]  # those of them that compute (part of) their prompt, for the first time or again
    preempted: list[str]  # gave up their KV before it
    running: int  # requests with a seat
    waiting: int
    short_of_memory: bool  # the next to join lacks KV and nothing else: a seat and the step's token budget are there
    blocks_used: int
    kv: KVRows

    @property
    def tokens(self) -> int:
        return sum(self.scheduled.values())

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(frozen=True)
class Simulation:
    """What happened: records in order of arrival and of time, and the counters of an engine."""

    config: EngineConfig
    requests: list[RequestRecord] = field(repr=False)
    passes: list[PassRecord] = field(repr=False)
    metrics: EngineMetrics

    @property
    def seconds(self) -> float:
        """From 0 to the end of the last pass."""
        return self.passes[-1].end

    @property
    def seat_utilization(self) -> float:
        """Requests computed over seats (max_num_seqs), mean over passes. Static batching: mean/max output length."""
        return fmean(len(each.scheduled) for each in self.passes) / self.config.max_num_seqs

    def kv_shares(self) -> dict[str, float]:
        """Shares of KV memory (Figure 2), mean over the time in which the next request to join lacked memory alone.

        Over all passes if none ever did; then "free" was wanted by nobody.
        """
        return {name: _over_time(self._short, lambda p, name=name: _share(p.kv, name)) for name in _PARTS}

    @property
    def running_when_short(self) -> float:
        """Requests with a seat, mean over the same time as ``kv_shares``."""
        return _over_time(self._short, lambda each: each.running)

    @property
    def _short(self) -> list[PassRecord]:
        return [each for each in self.passes if each.short_of_memory] or self.passes

    def summary(self) -> dict[str, float]:
        """The figures that papers plot. Seconds, requests and output tokens; p50 and p99 are nearest-rank."""
        gaps = sorted(gap for request in self.requests for gap in request.gaps)
        first = sorted(request.time_to_first_token for request in self.requests)
        shares = self.kv_shares()
        return {
            "seconds": self.seconds,
            "requests_per_second": len(self.requests) / self.seconds,
            "tokens_per_second": self.metrics.tokens_generated / self.seconds,
            "normalized_latency": fmean(request.normalized_latency for request in self.requests),
            "ttft_mean": fmean(first),
            "ttft_p50": percentile(first, 0.5),
            "ttft_p99": percentile(first, 0.99),
            "gap_p50": percentile(gaps, 0.5),
            "gap_p99": percentile(gaps, 0.99),
            "gap_max": gaps[-1] if gaps else math.nan,
            "busy": sum(each.seconds for each in self.passes) / self.seconds,
            "batch_mean": _over_time(self.passes, lambda each: len(each.scheduled)),
            "seat_utilization": self.seat_utilization,
            "kv_utilization": shares["tokens"],
            "preemptions": self.metrics.preemptions,
            "forward_passes": self.metrics.forward_passes,
        }


_PARTS = ("tokens", "reserved", "internal", "free")


def _share(rows: KVRows, name: str) -> float:
    return getattr(rows, name) / sum(getattr(rows, part) for part in _PARTS)


def _over_time(passes: list[PassRecord], value: Callable[[PassRecord], float]) -> float:
    """Mean of a value weighted with the seconds of each pass."""
    return sum(value(each) * each.seconds for each in passes) / sum(each.seconds for each in passes)


def percentile(ordered: list[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; nan of none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def several(device: Device, degree: int) -> Device:
    """``degree`` devices that share every matrix and every KV head evenly, communication taken to be free.

    Tensor parallelism at its best: weights, KV, operations are a ``degree``-th on each, so they act as one device.
    """
    rates = {name: degree * getattr(device, name) for name in ("flops", "bandwidth", "memory")}
    return replace(device, name=f"{degree} × {device.name}", **rates)


def simulate(
    workload: Iterable[WorkloadRequest],
    model: ModelConfig,
    config: EngineConfig,
    device: Device,
    reservation: str | None = None,
    allocator: str = "buddy",
    host_seconds: float = 0.0,
    link: HostLink | None = None,
    scheduler: Callable[..., Scheduler] = Scheduler,
) -> Simulation:
    """Serve a workload, its arrivals in seconds, on an engine of this config: the same input gives the same records.

    ``reservation``    "max", "pow2" or "oracle": contiguous KV reserved ahead, in place of the config's KV layout,
                       by ``allocator`` "buddy", as in the paper, or "first_fit" (simulator/reservation.py)
    ``host_seconds``   what every pass takes beside the model: scheduling, launching, sampling
    ``link``           the way to host memory; swaps are not overlapped with the pass. None: HostLink()
    ``scheduler``      called as f(config, kv_manager), as an engine does

    The KV cache is config.kv_cache_memory_bytes or, as on a GPU, what weights leave of gpu_memory_utilization. A
    "dtype" of float64 or float32 scales bytes but not the device's operations. ValueError for a request whose forced
    length can't be reached.
    """
    return _Run(list(workload), model, config, device, reservation, allocator, host_seconds, link, scheduler).run()


class _Run:
    """Two processes on one clock: requests arrive, the engine goes round its loop."""

    def __init__(self, workload, model, config, device, reservation, allocator, host_seconds, link, scheduler):
        self.model, self.device, self.host_seconds, self.link = model, device, host_seconds, link or HostLink()
        self.config = config = config.resolve(model, "cuda")
        order = sorted(range(len(workload)), key=lambda number: workload[number].arrival)
        arrivals = itertools.count()
        # (seconds, the samples of a prompt), in order of arrival
        self.arrivals = [
            (workload[number].arrival, list(_requests(str(number), workload[number], arrivals))) for number in order
        ]
        self.requests = {each.request_id: each for _, requests in self.arrivals for each in requests}
        self.kv = self._kv_manager(reservation, allocator)
        for each in self.requests.values():
            whole = len(each.prompt_token_ids) + each.sampling_params.max_tokens
            if whole > self.kv.capacity:
                raise ValueError(f"request {each.request_id} takes {whole} tokens; at most {self.kv.capacity} fit")
        self.scheduler = scheduler(config, self.kv)
        self.metrics = EngineMetrics()
        self.passes: list[PassRecord] = []
        self.arrived: dict[str, float] = {}
        self.token_times: dict[str, list[float]] = {request_id: [] for request_id in self.requests}
        self.env = simpy.Environment()
        self.bell = self.env.event()  # rung by whoever arrives

    def _kv_manager(self, reservation: str | None, allocator: str) -> KVManager:
        config, model = self.config, self.model
        memory = config.kv_cache_memory_bytes
        if memory is None:
            weights = model.num_parameters * ITEMSIZE[config.dtype]
            memory = int(config.gpu_memory_utilization * self.device.memory) - weights
        specs = [FullAttentionSpec(model.num_key_value_heads, model.head_dim, config.dtype)] * model.num_hidden_layers
        if reservation is None:
            geometry = plan_geometry(config, specs, memory)
            hosts, cache = plan_host_blocks(config, geometry), prefix_cache(config)
            return KVManager(geometry, config.max_model_len, hosts, prefix_cache=cache)
        if reservation not in RESERVATIONS:
            raise ValueError(f"reservation is {reservation!r}; it must be one of {', '.join(map(repr, RESERVATIONS))}")
        geometry = plan_geometry(config.override(kv_layout="paged", block_size=1), specs, memory)
        longest = min(config.max_model_len, geometry.num_usable_blocks)
        rows = {
            i: RESERVATIONS[reservation](len(each.prompt_token_ids), each.sampling_params.max_tokens, longest)
            for i, each in self.requests.items()
        }
        return ReservedKV(geometry, config.max_model_len, rows, allocator)

    def run(self) -> Simulation:
        self.env.process(self._arrive())
        self.env.process(self._serve())
        self.env.run()
        self.kv.check_integrity(live=())
        records = [
            RequestRecord(i, self.arrived[i], len(each.prompt_token_ids), self.token_times[i], each.num_preemptions)
            for i, each in self.requests.items()
        ]
        return Simulation(self.config, records, self.passes, self.metrics)

    def _arrive(self) -> Iterator[simpy.Event]:
        for arrival, requests in self.arrivals:
            if arrival > self.env.now:
                yield self.env.timeout(arrival - self.env.now)
            for each in requests:
                self.arrived[each.request_id] = self.env.now
                self.scheduler.add(each)
            if not self.bell.triggered:
                self.bell.succeed()

    def _serve(self) -> Iterator[simpy.Event]:
        while len(self.arrived) < len(self.requests) or self.scheduler.has_unfinished():
            if not self.scheduler.has_unfinished():
                self.bell = self.env.event()
                yield self.bell
            batch = self.scheduler.schedule()
            if not batch.num_scheduled_tokens:
                raise RuntimeError("requests wait and none can run")
            seconds = self._record(batch)
            yield self.env.timeout(seconds)
            self._take_in(batch)

    def _record(self, batch: ScheduledBatch) -> float:
        """Count a pass before its results are taken in, as the engine does. Returns its seconds."""
        lengths = [(new, self.requests[i].num_computed_tokens) for i, new in batch.num_scheduled_tokens.items()]
        cost = step_cost(self.model, lengths, self.config.attention_backend, self.config.dtype)
        geometry = self.kv.geometry
        block_bytes = geometry.block_size * bytes_per_row(geometry.groups)
        swapped = len(batch.swaps_out) + len(batch.swaps_in)
        seconds = (
            cost.seconds(self.device)
            + self.host_seconds
            + self.link.seconds(swapped, block_bytes)
            + 2 * len(batch.block_copies) * block_bytes / self.device.bandwidth  # read and written
        )
        rows = self._kv_rows()
        self.metrics.record_pass(batch.num_tokens, self.kv.num_reserved_rows, rows.tokens, cost.hbm_bytes)
        self.metrics.record_moves(batch)
        self.passes.append(
            PassRecord(
                step=batch.step,
                start=self.env.now,
                seconds=seconds,
                scheduled=batch.num_scheduled_tokens,
                prompts=[i for i, new in batch.num_scheduled_tokens.items() if self._begins_in_prompt(i, new)],
                preempted=batch.preempted_ids,
                running=len(self.scheduler.running),
                waiting=len(self.scheduler.waiting),
                short_of_memory=self._short_of_memory(batch),
                blocks_used=self.kv.num_usable_blocks - self.kv.num_free_blocks,
                kv=rows,
            )
        )
        return seconds

    def _short_of_memory(self, batch: ScheduledBatch) -> bool:
        scheduler, config = self.scheduler, self.config
        if not scheduler.waiting or not scheduler.batching.may_admit(scheduler.running):
            return False
        tokens = scheduler.waiting[0].num_tokens - scheduler.waiting[0].num_computed_tokens
        budget = config.max_num_batched_tokens - batch.num_tokens
        return len(scheduler.running) < config.max_num_seqs and tokens <= budget

    def _begins_in_prompt(self, request_id: str, new: int) -> bool:
        request = self.requests[request_id]
        return request.num_computed_tokens - new < len(request.prompt_token_ids)

    def _kv_rows(self) -> KVRows:
        kv, size = self.kv, self.kv.geometry.block_size
        tokens = kv.num_used_rows({i: self.requests[i].num_computed_tokens for i in kv.owners})
        held_for_nothing = sum(max(0, len(kv.block_ids(i)[0]) * size - self._rows_at_end(i)) for i in kv.owners)
        internal = min(held_for_nothing, kv.num_reserved_rows - tokens)
        return KVRows(tokens, kv.num_reserved_rows - tokens - internal, internal, kv.num_free_blocks * size)

    def _rows_at_end(self, request_id: str) -> int:
        """Rows that a request comes to write: its last output token is never computed."""
        request = self.requests[request_id]
        return len(request.prompt_token_ids) + request.sampling_params.max_tokens - 1

    def _take_in(self, batch: ScheduledBatch) -> None:
        """A token for every request that has caught up; none is ever an end token, so lengths are as forced."""
        caught_up = (self.requests[i] for i in batch.num_scheduled_tokens)
        sampled = {each.request_id: [0] for each in caught_up if each.num_computed_tokens == each.num_tokens}
        for each in self.scheduler.update(batch, ModelOutput(batch.step, sampled)):
            self.token_times[each.request_id].append(self.env.now)
        self.metrics.tokens_generated += len(sampled)


def _requests(name: str, request: WorkloadRequest, arrivals: Iterator[int]) -> Iterator[Request]:
    """The samples of one request, as an engine would make them."""
    params = SamplingParams(n=request.n, max_tokens=request.output_len, ignore_eos=True)
    for i in range(request.n):
        yield Request(
            request_id=name if request.n == 1 else f"{name}/{i}",
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=params,
            seed=0,
            sample_index=i,
            group=name if request.n > 1 else None,
            priority=request.priority,
            arrival=next(arrivals),
        )
