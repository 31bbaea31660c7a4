import pytest

from minillm.core.config import CHOICES, EngineConfig
from minillm.memory.block_pool import BlockPool
from minillm.memory.kv_manager import prefix_cache
from minillm.scheduling.policies import StaticBatching
from minillm.scheduling.scheduler import batching, policy
from tests.scheduling.fakes import Loop, make_scheduler, request

BUILD = {
    "batching": batching,
    "scheduling_policy": lambda config: policy(config, kv=None),
    "prefix_cache": lambda config: f(BlockPool(1), 1) if (f := prefix_cache(config)) else None,
}


@pytest.mark.parametrize("name", BUILD)
def test_every_choice_of_the_config_is_there(name):
    latest = EngineConfig.latest(enable_chunked_prefill=False)
    others = {"scheduling_policy": "fcfs"} if name == "prefix_cache" else {}
    made = {type(BUILD[name](latest.override(**{name: choice}, **others))) for choice in CHOICES[name]}
    assert len(made) == len(CHOICES[name])


def test_static_batching_admits_to_an_empty_batch_only():
    policy = StaticBatching()
    assert policy.may_admit([])
    assert not policy.may_admit([request("a")])


def test_nobody_joins_a_static_batch_until_its_last_request_has_finished():
    loop = Loop(make_scheduler(blocks=2, eos=()))
    loop.run(request("a", max_tokens=2), request("b", max_tokens=5), request("c", max_tokens=3))
    assert [p.ids for p in loop.passes] == [["a", "b"]] * 2 + [["b"]] * 3 + [["c"]] * 3
    assert [p.new for p in loop.passes if p.new] == [["a", "b"], ["c"]]


def test_a_request_that_comes_late_waits_for_the_static_batch():
    scheduler = make_scheduler(eos=())
    loop = Loop(scheduler)
    scheduler.add(request("a", max_tokens=3))
    loop.step()
    scheduler.add(request("late", max_tokens=1))
    loop.run()
    assert [p.ids for p in loop.passes] == [["a"]] * 3 + [["late"]]
