"""Contiguous reservations: chunks, holes, and the shares of PagedAttention's Figure 2."""

from dataclasses import replace

import pytest

from minillm.core.config import EngineConfig
from minillm.core.cost import kv_bytes_per_token
from minillm.core.kv_spec import FullAttentionSpec
from minillm.core.presets import DEVICES, MODELS
from minillm.core.workloads import SHAREGPT, WorkloadRequest, random_workload
from minillm.memory.block_pool import IntegrityError
from minillm.memory.kv_manager import KVGeometry, group_layers
from minillm.simulator.reservation import RESERVATIONS, ReservedKV, power_of_two
from minillm.simulator.simulation import simulate

A100 = DEVICES["A100 80GB"]
GROUPS = group_layers([FullAttentionSpec(1, 2, "float32")])
# OPT-13B's KV (40 layers, 40 heads of 128: 800 KiB a token); the matrices are Llama-2-13B's, of nearly the same size.
OPT_13B = replace(
    MODELS["Llama-2-7B"],
    hidden_size=5120,
    intermediate_size=13824,
    num_hidden_layers=40,
    num_attention_heads=40,
    num_key_value_heads=40,
    sliding_windows=(None,) * 40,
)


def arena(rows: int, allocator: str = "first_fit", **reservations: int) -> ReservedKV:
    return ReservedKV(KVGeometry(GROUPS, 1, rows, null_rows=1), 1000, reservations, allocator)


def start(kv: ReservedKV, request_id: str) -> int | None:
    """Take the reservation; where it begins, counted from 0."""
    allocation = kv.allocate(request_id, 0, 1)
    kv.check_integrity()
    if allocation is None:
        return None
    ((first, *rest),) = allocation.block_ids
    assert rest == list(range(first + 1, first + kv.reservations[request_id])), "one unbroken run"
    return first - 1


def test_reservations_of_a_prompt_of_100_and_an_output_of_25():
    rows = {name: reserve(100, 25, 2048) for name, reserve in RESERVATIONS.items()}
    assert rows == {"max": 2048, "pow2": 132, "oracle": 125}
    assert RESERVATIONS["pow2"](1500, 520, 2048) == 2048
    assert [power_of_two(n) for n in (1, 2, 3, 4, 5, 25, 32)] == [1, 2, 4, 4, 8, 32, 32]


def test_first_fit_takes_the_lowest_hole_that_is_long_enough():
    kv = arena(100, a=30, b=20, c=40, d=25, e=5, f=11)
    assert [start(kv, i) for i in "abc"] == [0, 30, 50]
    kv.free("a")
    assert start(kv, "d") == 0
    assert start(kv, "e") == 25
    assert start(kv, "f") is None, "10 rows at the end are free"
    kv.free("b")
    assert start(kv, "f") == 30


def test_room_enough_in_all_but_not_in_one_piece():
    kv = arena(100, a=30, b=30, c=40, d=60)
    for i in "abc":
        start(kv, i)
    kv.free("a")
    kv.free("c")
    assert kv.num_free_blocks == 70
    assert start(kv, "d") is None
    kv.free("b")
    assert start(kv, "d") == 0


def test_buddies_begin_at_multiples_of_their_rounded_length():
    kv = arena(128, "buddy", a=20, b=33, c=5, d=60, e=20)
    assert [start(kv, i) for i in "abc"] == [0, 64, 32]
    assert start(kv, "d") is None, "64 in one piece are free nowhere"
    assert start(kv, "e") is None, "32 rows after c are no multiple of 32 any more"
    kv.free("c")
    assert start(kv, "e") == 32
    kv.free("a")
    kv.free("e")
    assert start(kv, "d") == 0


def test_a_reservation_does_not_grow():
    kv = arena(100, a=30)
    start(kv, "a")
    assert kv.allocate("a", 29, 30).block_ids == [[]]
    assert not kv.grows and kv.blocks_lacking("a", 30) == 0
    with pytest.raises(IntegrityError, match="reserved 30 rows and asks for 31"):
        kv.allocate("a", 30, 31)


def test_wrong_names():
    workload = [WorkloadRequest(0.0, [1], 1)]
    config = EngineConfig.latest(kv_cache_memory_bytes=1 << 24)
    for wrong in ({"reservation": "pow3"}, {"reservation": "max", "allocator": "best_fit"}):
        with pytest.raises(ValueError, match="must be one of"):
            simulate(workload, MODELS["tiny"], config, A100, **wrong)
    with pytest.raises(ValueError, match="blocks of 16 rows"):
        ReservedKV(KVGeometry(GROUPS, 16, 4, null_rows=16), 64, {})


@pytest.fixture(scope="module", params=["buddy", "first_fit"])
def figure_2(request):
    """Shares of 12 GiB of KV, as in Table 1, with more requests than fit."""
    config = EngineConfig.at_chapter(3, max_model_len=2048, kv_cache_memory_bytes=12 * 2**30, dtype="float16")
    assert kv_bytes_per_token(OPT_13B, "float16") == 819_200
    workload = random_workload(90, SHAREGPT)
    names = (*RESERVATIONS, None)
    return {
        name: simulate(workload, OPT_13B, config, A100, reservation=name, allocator=request.param) for name in names
    }


def test_the_shape_of_figure_2(figure_2):
    shares = {name or "paged": simulation.kv_shares() for name, simulation in figure_2.items()}
    for of in shares.values():
        assert sum(of.values()) == pytest.approx(1)
    tokens = [shares[name]["tokens"] for name in ("max", "pow2", "oracle", "paged")]
    assert tokens == sorted(tokens)
    assert 0.15 < shares["max"]["tokens"] < 0.4
    assert shares["paged"]["tokens"] > 0.9
    # Seven chunks of 2,048 in 15,728 rows: the paper has 8.9 % too.
    assert shares["max"]["free"] == pytest.approx(1 - 7 * 2048 / 15728, abs=0.002)
    assert shares["max"]["internal"] > 0.45, "most of a longest sequence is never written"
    assert shares["pow2"]["internal"] < 0.2 and shares["oracle"]["internal"] < 0.01
    assert shares["pow2"]["free"] > 0.1 and shares["oracle"]["free"] > 0.1, "external fragmentation"


def test_more_requests_at_once_and_so_more_of_them_a_second(figure_2):
    """Figure 13: those who waste less memory batch more. Reservations never take anything back."""
    summaries = [simulation.summary() for simulation in figure_2.values()]
    assert [name for name in figure_2][-1] is None
    for figure in ("batch_mean", "requests_per_second"):
        values = [summary[figure] for summary in summaries]
        assert values == sorted(values)
    assert [simulation.metrics.preemptions for simulation in list(figure_2.values())[:-1]] == [0, 0, 0]
