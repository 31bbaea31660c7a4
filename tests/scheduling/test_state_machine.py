"""Any order of add, step, abort, fork, preempt, block and unblock: the books balance and every row is the right one.

The machine knows what each request must say (fakes.expected) and, through the fake runner, what each row of its KV must
hold; the rules of scheduler and pool are checked after every step.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minillm.compute.attention.dense import DenseAttention
from minillm.core.config import EngineConfig
from minillm.core.request import RequestStatus
from minillm.engine.runner import ModelRunner
from minillm.memory.kv_manager import KVManager, plan_geometry, plan_host_blocks, prefix_cache
from minillm.scheduling.scheduler import Scheduler
from tests.scheduling.fakes import EOS, VOCAB, Loop, expected, make_scheduler, next_token, request
from tests.support import random_model

LIMIT = 20  # tokens of one request


def cache_by_tokens(say):
    """A model's next token, worked out once for every sequence."""
    known: dict[tuple, int] = {}

    def cached(tokens: list[int]) -> int:
        key = tuple(tokens)
        if key not in known:
            known[key] = say(tokens)
        return known[key]

    return cached


class Machine(RuleBasedStateMachine):
    """One scheduler with a small pool, driven at random, and a runner without a model."""

    say = staticmethod(cache_by_tokens(next_token))

    def make(self, blocks, block_size, **choices) -> Loop:
        loop = Loop(make_scheduler(blocks=blocks, block_size=block_size, max_model_len=LIMIT, **choices))
        loop.runner.json = False
        return loop

    @initialize(
        blocks=st.integers(3, 12),
        block_size=st.sampled_from([1, 2, 4, 16, LIMIT]),
        seats=st.integers(1, 5),
        hosts=st.sampled_from([0, 0, 2, 50]),
        batching=st.sampled_from(["static", "iteration", "chunks", "chunks"]),
        budget=st.sampled_from([1, 2, 3, 7, 64]),
        policy=st.sampled_from(["fcfs", "priority", "mlfq", "lpm"]),
        cache=st.sampled_from(["none", "block_hash", "radix", "radix"]),
    )
    def build(self, blocks, block_size, seats, hosts, batching, budget, policy, cache):
        self.loop = self.make(
            max(blocks, -(-6 // block_size)),
            block_size,
            max_num_seqs=seats,
            host_blocks=hosts,
            batching="iteration" if batching == "chunks" else batching,
            enable_chunked_prefill=batching == "chunks",
            budget=budget if batching == "chunks" else None,
            scheduling_policy="fcfs" if policy == "lpm" and cache == "none" else policy,
            prefix_cache=cache,
        )
        self.scheduler = self.loop.scheduler
        self.capacity = self.scheduler.kv.capacity
        self.everybody, self.wanted, self.aborted = [], {}, set()

    # -- what may happen ----------------------------------------------------------------------------------------------

    @rule(
        length=st.integers(1, LIMIT),
        seed=st.integers(0, 9),
        n=st.sampled_from([1, 1, 2, 3]),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
    )
    def add(self, length, seed, n, max_tokens, priority):
        """A prompt; with n > 1 its samples are forks of the first."""
        prompt = [(seed * 7 + i) % VOCAB for i in range(min(length, self.capacity - 1))]
        name = f"r{len(self.everybody)}"
        for i in range(n):
            sample = request(
                f"{name}/{i}",
                prompt,
                group=name if n > 1 else None,
                sample_index=i,
                priority=priority,
                max_tokens=max_tokens,
            )
            self.everybody.append(sample)
            self.wanted[sample.request_id] = expected(prompt, sample.sampling_params, self.capacity, self.say)
            self.scheduler.add(sample)

    @precondition(lambda self: self.scheduler.has_runnable())
    @rule()
    def step(self):
        order = self.scheduler.policy.order
        running = sorted(self.scheduler.running, key=order)
        decoding = {r.request_id for r in running if r.num_tokens - r.num_computed_tokens == 1}
        assert self.loop.step(), "work is there and nothing was computed"
        if self.scheduler.config.scheduling_policy == "fcfs" and running:
            assert running[0].request_id not in self.loop.passes[-1].preempted, "the oldest gave way"
        passed = self.loop.passes[-1]
        assert 0 < passed.tokens <= self.scheduler.config.max_num_batched_tokens
        if self.scheduler.config.enable_chunked_prefill:
            left_out = decoding - set(passed.ids) - set(passed.preempted)
            assert not left_out, "Algorithm 3: no decode waits for a prompt"

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data):
        chosen = self.choose(data, self.scheduler.requests)
        self.scheduler.finish(chosen, "abort")
        self.aborted.add(chosen)

    @precondition(lambda self: self.scheduler.kv.owners)
    @rule(data=st.data())
    def preempt(self, data):
        self.scheduler.preempt(self.choose(data, self.scheduler.kv.owners))

    @precondition(lambda self: self.with_status(RequestStatus.RUNNING, RequestStatus.WAITING))
    @rule(data=st.data())
    def block(self, data):
        names = self.with_status(RequestStatus.RUNNING, RequestStatus.WAITING)
        self.scheduler.block(self.choose(data, names), "a tool")

    @precondition(lambda self: self.with_status(RequestStatus.BLOCKED))
    @rule(data=st.data())
    def unblock(self, data):
        self.scheduler.unblock(self.choose(data, self.with_status(RequestStatus.BLOCKED)))

    def choose(self, data, names) -> str:
        return data.draw(st.sampled_from(sorted(names)))

    def with_status(self, *statuses) -> list[str]:
        return [name for name, r in self.scheduler.requests.items() if r.status in statuses]

    # -- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self):
        scheduler, kv = self.scheduler, self.scheduler.kv
        assert kv.check_integrity(live=scheduler.requests)
        assert len(scheduler.running) <= scheduler.config.max_num_seqs
        by_status = {status: self.with_status(status) for status in RequestStatus}
        assert sorted(by_status[RequestStatus.RUNNING]) == sorted(r.request_id for r in scheduler.running)
        assert sorted(by_status[RequestStatus.WAITING]) == sorted(r.request_id for r in scheduler.waiting)
        for r in scheduler.running:
            rows = kv.geometry.block_size * len(kv.block_ids(r.request_id)[0])
            assert r.num_computed_tokens <= min(rows, r.num_tokens)
        for name, r in scheduler.requests.items():
            assert kv.holds(name) or kv.is_swapped(name) or r.num_computed_tokens == 0

    @invariant()
    def nobody_says_anything_wrong(self):
        for each in self.everybody:
            tokens, reason = self.wanted[each.request_id]
            assert each.output_token_ids == tokens[: len(each.output_token_ids)]
            if each.finished and each.request_id not in self.aborted:
                assert (each.output_token_ids, each.finish_reason) == (tokens, reason)

    def teardown(self):
        """Whatever was left undone comes to its end."""
        if not hasattr(self, "scheduler"):
            return
        for name in self.with_status(RequestStatus.BLOCKED):
            self.scheduler.unblock(name)
        while self.scheduler.has_unfinished():
            self.step()
            self.books_balance()
        self.nobody_says_anything_wrong()
        kv = self.scheduler.kv
        assert kv.num_free_blocks == kv.num_usable_blocks
        assert kv.host_pool.num_free == kv.host_pool.num_usable


class ModelMachine(Machine):
    """The same with the engine's runner and a small random model in float64."""

    model = random_model("float64")

    @staticmethod
    @cache_by_tokens
    def say(tokens: list[int]) -> int:
        with torch.inference_mode():
            hidden = ModelMachine.model(torch.tensor(tokens), torch.arange(len(tokens)), DenseAttention(1, len(tokens)))
            return int(ModelMachine.model.compute_logits(hidden[-1:]).argmax())

    def make(self, blocks, block_size, host_blocks, budget, **choices) -> Loop:
        model = self.model
        config = EngineConfig.latest(
            max_model_len=LIMIT,
            max_num_batched_tokens=budget or 64,
            dtype="float64",
            block_size=block_size,
            num_gpu_blocks_override=blocks + 1,
            preemption_mode="swap" if host_blocks else "recompute",
            swap_space=1e-5 * host_blocks,
            **choices,
        )
        geometry = plan_geometry(config, model.kv_cache_spec(), 0)
        kv = KVManager(geometry, LIMIT, plan_host_blocks(config, geometry), prefix_cache=prefix_cache(config))
        return Loop(Scheduler(config, kv, EOS), runner=RealRunner(model, config, geometry, EOS))


class RealRunner(ModelRunner):
    def told(self, request_id):
        return self.rows[request_id].token_ids, self.rows[request_id].block_ids


def drive(machine, runs: int, number: int = 0) -> None:
    seed(number)(machine)
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=runs,
            stateful_step_count=50,
            phases=[Phase.generate],  # shrinking takes minutes: the steps as found are what one debugs
            deadline=None,
            suppress_health_check=quiet,
            database=None,
        ),
    )


@pytest.mark.parametrize("number", range(8))
def test_any_order_of_events(number):
    drive(Machine, 250, number)


@pytest.mark.nightly
def test_any_order_of_events_for_long():
    for number in range(100, 200):
        drive(Machine, 250, number)


def test_any_order_of_events_on_the_model():
    drive(ModelMachine, 50)
