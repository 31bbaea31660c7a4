"""A runner without a model, and a loop round scheduler and runner."""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from dataclasses import dataclass, field

from minillm.core.batch import ModelOutput, ScheduledBatch
from minillm.core.config import EngineConfig
from minillm.core.kv_spec import FullAttentionSpec
from minillm.core.request import Request
from minillm.core.sampling_params import SamplingParams
from minillm.memory.kv_manager import KVGeometry, KVManager, group_layers, prefix_cache
from minillm.scheduling.scheduler import Scheduler

EOS = (2, 3)
VOCAB = 50


def next_token(tokens: list[int]) -> int:
    """What the fake model says after ``tokens``: a function of all of them."""
    return zlib.crc32(bytes(str(tokens), "ascii")) % VOCAB


def expected(prompt: list[int], params: SamplingParams, capacity: int, say=next_token) -> tuple[list[int], str]:
    """Output tokens and finish reason of a request, worked out without a scheduler. ``say``: the model."""
    output: list[int] = []
    while True:
        output.append(say(prompt + output))
        if len(output) >= params.min_tokens:
            ends = (set() if params.ignore_eos else set(EOS)) | set(params.stop_token_ids)
            if output[-1] in ends:
                return output, "stop"
        if len(output) == params.max_tokens or len(prompt) + len(output) == capacity:
            return output, "length"


@dataclass
class FakeRow:
    tokens: list[int]
    tables: list[list[int]]
    computed: int
    contents: list[int] = field(default_factory=list)  # what the KV of each token is

    def content(self, position: int) -> int:
        """A hash of the sequence up to there."""
        while len(self.contents) <= position:
            before = self.contents[-1] if self.contents else 0
            self.contents.append(zlib.crc32(self.tokens[len(self.contents)].to_bytes(4, "little"), before))
        return self.contents[position]


class FakeRunner:
    """Knows nothing but the JSON of the batches. Its "KV" of a token is a hash of the sequence up to it.

    ``script``: request id -> the tokens to answer, one after another, in place of ``next_token``'s. ``json`` off: for
    speed, where many runs are made.
    """

    json = True

    def __init__(self, geometry: KVGeometry, script: dict[str, list[int]] | None = None):
        self.geometry, self.script = geometry, {i: deque(tokens) for i, tokens in (script or {}).items()}
        self.rows: dict[str, FakeRow] = {}
        self.cache: dict[tuple[int, int], int] = {}  # (group, row) -> KV
        self.host: dict[tuple[int, int], list[int | None]] = {}  # (group, host block) -> KV of its rows

    def execute(self, batch: ScheduledBatch) -> ModelOutput:
        if self.json:
            batch = ScheduledBatch.from_json(batch.to_json())
        self._take_in(batch)
        output = ModelOutput(batch.step)
        for request_id, new in batch.num_scheduled_tokens.items():
            row = self.rows[request_id]
            assert 0 < new <= len(row.tokens) - row.computed, "more tokens scheduled than are known"
            end = row.computed + new
            self._compute(row, end)
            if end == len(row.tokens):
                script = self.script.get(request_id)
                output.sampled[request_id] = [script.popleft() if script else next_token(row.tokens)]
        return ModelOutput.from_json(output.to_json()) if self.json else output

    def told(self, request_id: str) -> tuple[list[int], list[list[int]]]:
        """Tokens and block tables of a request, as the batches told them."""
        return self.rows[request_id].tokens, self.rows[request_id].tables

    def _take_in(self, batch: ScheduledBatch) -> None:
        for request_id in batch.finished_ids:
            del self.rows[request_id]
        for new in batch.new_requests:
            assert new.request_id not in self.rows, "new, but its row is there"
            tokens = new.prompt_token_ids + new.output_token_ids
            self.rows[new.request_id] = FakeRow(tokens, new.block_ids, new.num_computed_tokens)
        for known in batch.known_requests:
            row = self.rows[known.request_id]
            row.tokens += known.new_token_ids
            row.computed = known.num_computed_tokens
            if known.rewritten:
                row.tables = known.new_block_ids
            else:
                for table, blocks in zip(row.tables, known.new_block_ids, strict=True):
                    table += blocks
        told = [new.request_id for new in batch.new_requests] + [known.request_id for known in batch.known_requests]
        assert sorted(told) == sorted(batch.num_scheduled_tokens), "who is scheduled and who is told of differ"
        for group, device, host in batch.swaps_out:
            self.host[group, host] = self._read(group, device)
        for group, host, device in batch.swaps_in:
            self._write(group, device, self.host.pop((group, host)))
        for group, source, target in batch.block_copies:
            self._write(group, target, self._read(group, source))

    def _read(self, group: int, block: int) -> list[int | None]:
        first = self.geometry.first_row(block)
        return [self.cache.get((group, first + i)) for i in range(self.geometry.block_size)]

    def _write(self, group: int, block: int, content: list[int | None]) -> None:
        first = self.geometry.first_row(block)
        for i, kv in enumerate(content):
            self.cache[group, first + i] = kv

    def _compute(self, row: FakeRow, end: int) -> None:
        size = self.geometry.block_size
        for group, table in enumerate(row.tables):
            assert len(table) * size >= end, "no block for a scheduled token"
            for position in range(end):
                slot = group, self.geometry.first_row(table[position // size]) + position % size
                content = row.content(position)
                if position >= row.computed:
                    self.cache[slot] = content
                assert self.cache[slot] == content, f"row {position} was overwritten or never computed"


def make_scheduler(
    blocks: int = 4,
    block_size: int = 32,
    max_model_len: int = 32,
    budget: int | None = None,
    max_num_seqs: int = 256,
    host_blocks: int = 0,
    eos=EOS,
    **switches,
) -> Scheduler:
    """``host_blocks``: preempted requests are swapped out to so many. ``switches``: of EngineConfig."""
    config = EngineConfig(
        kv_layout="paged",
        max_model_len=max_model_len,
        max_num_batched_tokens=budget or max(64, max_model_len),
        max_num_seqs=max_num_seqs,
        preemption_mode="swap" if host_blocks else "recompute",
        **switches,
    )
    groups = group_layers([FullAttentionSpec(1, 2, "float32")])
    geometry = KVGeometry(groups, block_size, blocks, null_rows=1)
    kv = KVManager(geometry, max_model_len, host_blocks, prefix_cache=prefix_cache(config))
    return Scheduler(config, kv, eos)


_arrivals = itertools.count()


def request(request_id: str, prompt: int | list[int] = 3, group=None, sample_index=0, priority=0, **params) -> Request:
    """``prompt``: ids, or how many."""
    ids = list(range(10, 10 + prompt)) if isinstance(prompt, int) else prompt
    params = SamplingParams(temperature=0, **params)
    more = dict(group=group, sample_index=sample_index, priority=priority, arrival=next(_arrivals))
    return Request(request_id, ids, params, seed=0, **more)


@dataclass
class Pass:
    """What one pass was, for assertions."""

    ids: list[str]
    new: list[str]
    tokens: int
    resident: int
    preempted: list[str]


class Loop:
    """Scheduler and runner, a fake one if none is given, with ``depth`` passes in flight."""

    def __init__(self, scheduler: Scheduler, script: dict[str, list[int]] | None = None, depth: int = 1, runner=None):
        self.scheduler, self.depth = scheduler, depth
        self.runner = runner or FakeRunner(scheduler.kv.geometry, script)
        self.flying: deque[tuple[ScheduledBatch, ModelOutput]] = deque()
        self.passes: list[Pass] = []

    def launch(self) -> bool:
        """Schedule and run one pass, its result not yet taken in. False if there was nothing to run."""
        batch = self.scheduler.schedule()
        if not batch.num_scheduled_tokens:
            return False
        in_flight = {request_id for other, _ in self.flying for request_id in other.num_scheduled_tokens}
        assert not in_flight & set(batch.num_scheduled_tokens), "scheduled again with a token in flight"
        self.flying.append((batch, self.runner.execute(batch)))
        for request_id in batch.num_scheduled_tokens:
            tokens, tables = self.runner.told(request_id)
            known = self.scheduler.requests[request_id].all_token_ids
            assert tokens == known, "the batches do not replay the request"
            assert tables == self.scheduler.kv.block_ids(request_id)
        new = [new.request_id for new in batch.new_requests]
        ids, resident = list(batch.num_scheduled_tokens), len(self.scheduler.running)
        self.passes.append(Pass(ids, new, batch.num_tokens, resident, batch.preempted_ids))
        return True

    def land(self) -> list[Request]:
        advanced = self.scheduler.update(*self.flying.popleft())
        assert self.scheduler.kv.check_integrity(live=self.scheduler.requests)
        return advanced

    def step(self) -> bool:
        """Fill the pipeline, take in the oldest pass. False when all is done."""
        while len(self.flying) < self.depth and self.launch():
            pass
        if not self.flying:
            return False
        self.land()
        return True

    def run(self, *requests: Request) -> None:
        for each in requests:
            self.scheduler.add(each)
        while self.step():
            pass
        assert not self.scheduler.has_unfinished()
        assert self.scheduler.kv.num_free_blocks == self.scheduler.kv.num_usable_blocks
