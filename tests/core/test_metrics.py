from dataclasses import fields

import pytest

from minillm.core.metrics import EngineMetrics


def test_passes_add_up_and_slots_are_those_of_the_fullest_reservation():
    metrics = EngineMetrics()
    metrics.record_pass(tokens=10, reserved=64, used=10, hbm_bytes=1000)
    metrics.record_pass(tokens=2, reserved=128, used=20, hbm_bytes=500)
    metrics.record_pass(tokens=1, reserved=64, used=60, hbm_bytes=1)
    assert metrics.to_dict() == {
        "forward_passes": 3,
        "tokens_computed": 13,
        "tokens_cached": 0,
        "tokens_generated": 0,
        "tokens_forced": 0,
        "kv_slots_reserved": 128,
        "kv_slots_used": 20,
        "preemptions": 0,
        "blocks_copied": 0,
        "blocks_swapped": 0,
        "modelled_hbm_bytes": 1501,
    }


@pytest.mark.parametrize("used", [(5, 9), (9, 5)])
def test_of_equal_reservations_the_fullest_counts(used):
    metrics = EngineMetrics()
    for n in used:
        metrics.record_pass(tokens=1, reserved=64, used=n, hbm_bytes=0)
    assert (metrics.kv_slots_reserved, metrics.kv_slots_used) == (64, 9)


def test_reset():
    metrics = EngineMetrics()
    metrics.record_pass(1, 2, 3, 4)
    metrics.tokens_generated = 5
    metrics.reset()
    assert metrics == EngineMetrics()
    assert set(metrics.to_dict()) == {f.name for f in fields(EngineMetrics)}
    assert not any(metrics.to_dict().values())
