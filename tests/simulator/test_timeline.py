"""Frames: who ran, who waited, who held a seat for nothing."""

import json

import pytest

from minillm.core.config import EngineConfig
from minillm.core.presets import DEVICES
from minillm.core.workloads import Uniform, WorkloadRequest, random_workload
from minillm.simulator.simulation import simulate
from minillm.simulator.timeline import timeline
from tests.support import random_config

DEVICE = DEVICES["A100 80GB"]


def frames(workload, chapter: int, **changes):
    changes["kv_cache_memory_bytes"] = 1 << 24
    return timeline(simulate(workload, random_config(), EngineConfig.at_chapter(chapter, **changes), DEVICE))


def batch(*outputs: int) -> list[WorkloadRequest]:
    return [WorkloadRequest(0.0, [1] * 5, output) for output in outputs]


def test_static_batches_wait_for_their_longest():
    drawn = frames(batch(1, 3, 2), 2, max_num_seqs=2)
    assert [(list(f.prompt), f.output, f.waiting, f.idle) for f in drawn] == [
        (["0", "1"], [], ["2"], []),
        ([], ["1"], ["2"], ["0"]),
        ([], ["1"], ["2"], ["0"]),
        (["2"], [], [], []),
        ([], ["2"], [], []),
    ]
    assert drawn[0].prompt == {"0": 5, "1": 5}


def test_iteration_level_batches_take_the_next_at_once():
    drawn = frames(batch(1, 3, 2), 3, max_num_seqs=2)
    assert [(list(f.prompt), f.output, f.waiting, f.idle) for f in drawn] == [
        (["0", "1"], [], ["2"], []),
        (["2"], ["1"], [], []),
        ([], ["1", "2"], [], []),
    ]


@pytest.mark.parametrize("chapter", [2, 3])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_every_request_is_somewhere_in_every_frame(chapter, mode):
    workload = random_workload(20, (Uniform(3, 20), Uniform(1, 40)), rate=3e6, seed=2)
    changes = dict(num_gpu_blocks_override=40, block_size=4, preemption_mode=mode, swap_space=1e-3)
    simulation = simulate(workload, random_config(), EngineConfig.at_chapter(chapter, **changes), DEVICE)
    drawn = timeline(simulation)
    assert json.loads(json.dumps([frame.to_dict() for frame in drawn]))[0]["start"] == drawn[0].start
    assert sum(len(frame.preempted) for frame in drawn) == simulation.metrics.preemptions > 0
    for frame, record in zip(drawn, simulation.passes, strict=True):
        there = [r.request_id for r in simulation.requests if r.arrival <= frame.start < r.finish]
        assert sorted([*frame.prompt, *frame.output, *frame.waiting]) == sorted(there)
        assert set(frame.preempted) <= set(frame.waiting)
        assert len(frame.prompt) + len(frame.output) == len(record.scheduled)
        seats = len(frame.prompt) + len(frame.output) + len(frame.idle)
        assert seats <= 20 and not set(frame.idle) & set(there)
        assert not frame.idle or chapter == 2
    computed = sum(sum(frame.prompt.values()) + len(frame.output) for frame in drawn)
    assert computed == simulation.metrics.tokens_computed
