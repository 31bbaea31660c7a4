"""The simulator: an engine's counters without an engine, and the shapes of the papers' curves."""

import math
import subprocess
import sys
from dataclasses import astuple, replace
from itertools import pairwise
from statistics import mean

import pytest

from minillm.core.config import LAST_BUILT, EngineConfig
from minillm.core.cost import step_cost
from minillm.core.presets import DEVICES, MODELS
from minillm.core.sampling_params import SamplingParams
from minillm.core.workloads import Fixed, LogNormal, Uniform, WorkloadRequest, random_workload
from minillm.engine.engine import Engine
from minillm.scheduling.scheduler import Scheduler
from minillm.simulator.simulation import HostLink, Simulation, percentile, several, simulate
from tests.support import MAX_LEN, VOCAB, drain, random_config, random_model

A100 = DEVICES["A100 80GB"]
LLAMA = MODELS["Llama-2-7B"]
SHORT = Uniform(3, 20), Uniform(1, 40)
POOL = dict(max_model_len=MAX_LEN, block_size=4)


def run(workload, chapter: int = LAST_BUILT, model=None, **changes) -> Simulation:
    """On the tiny random model's shape, with its roomy default pool unless ``changes`` say otherwise."""
    changes.setdefault("kv_cache_memory_bytes", 1 << 24)
    return simulate(workload, model or random_config(), EngineConfig.at_chapter(chapter, **changes), A100)


def assert_all_served(simulation: Simulation, workload: list[WorkloadRequest]) -> None:
    """Every sample has its forced length, at times that make sense."""
    samples = [request for request in workload for _ in range(request.n)]
    assert [r.output_len for r in simulation.requests] == [r.output_len for r in samples]
    assert [r.prompt_len for r in simulation.requests] == [len(r.prompt_token_ids) for r in samples]
    for record, request in zip(simulation.requests, samples, strict=True):
        assert record.arrival == pytest.approx(request.arrival)
        times = [record.arrival, *record.token_times]
        assert all(earlier < later for earlier, later in pairwise(times))
        assert record.finish <= simulation.seconds
    assert all(each.seconds > 0 for each in simulation.passes)
    assert all(earlier.end <= later.start + 1e-12 for earlier, later in pairwise(simulation.passes))
    rows = {sum((each.kv.tokens, each.kv.reserved, each.kv.internal, each.kv.free)) for each in simulation.passes}
    assert len(rows) == 1, "the four parts make up the cache"
    assert min(min(p.kv.tokens, p.kv.reserved, p.kv.internal, p.kv.free) for p in simulation.passes) >= 0
    assert simulation.metrics.tokens_generated == sum(r.output_len for r in samples)


CASES = {
    **{f"chapter {n}": dict(chapter=n) for n in range(LAST_BUILT + 1)},
    "few seats": dict(chapter=3, max_num_seqs=3),
    "static, few seats": dict(chapter=2, max_num_seqs=3),
    "recompute": dict(chapter=3, num_gpu_blocks_override=40, **POOL),
    "swap": dict(chapter=3, num_gpu_blocks_override=40, preemption_mode="swap", swap_space=1e-3, **POOL),
    "little host memory": dict(
        chapter=3, num_gpu_blocks_override=40, preemption_mode="swap", swap_space=20 * 1024 / 2**30, **POOL
    ),
    "priority": dict(chapter=3, num_gpu_blocks_override=40, scheduling_policy="priority", **POOL),
    "mlfq": dict(chapter=3, max_num_seqs=4, scheduling_policy="mlfq"),
}


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_counters_are_those_of_a_real_engine(case, samples):
    changes = dict(CASES[case])
    workload = random_workload(12, SHORT, n=samples, vocab_size=VOCAB, seed=5)
    workload = [replace(request, priority=number % 3) for number, request in enumerate(workload)]
    config = EngineConfig.at_chapter(changes.pop("chapter"), kv_cache_memory_bytes=1 << 21, **changes)
    engine = Engine(random_model(), config)
    for number, request in enumerate(workload):
        params = SamplingParams(n=request.n, max_tokens=request.output_len, ignore_eos=True, seed=number)
        engine.add_request(str(number), {"prompt_token_ids": request.prompt_token_ids}, params, request.priority)
    drain(engine)
    simulation = simulate(workload, random_config(), config, A100)
    assert simulation.metrics == engine.metrics
    assert_all_served(simulation, workload)
    wanted = {"recompute": "preemptions", "priority": "preemptions", "swap": "blocks_swapped"}.get(case)
    if wanted:
        assert getattr(engine.metrics, wanted) > 0, "the case shows what it is about"


@pytest.mark.parametrize("policy", ["fcfs", "priority", "mlfq"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_arrivals_over_time_under_a_small_pool(policy, mode):
    changes = dict(num_gpu_blocks_override=40, scheduling_policy=policy, preemption_mode=mode, swap_space=1e-3, **POOL)
    workload = random_workload(40, SHORT, rate=3e6, cv=2, n=2, prefixes=2, prefix_len=8, seed=1)
    workload = [replace(request, priority=number % 3) for number, request in enumerate(workload)]
    simulation = run(workload, **changes)
    assert_all_served(simulation, workload)
    assert simulation.metrics.preemptions == sum(each.preemptions for each in simulation.requests) > 0
    assert (simulation.metrics.blocks_swapped > 0) == (mode == "swap")
    assert max(each.blocks_used for each in simulation.passes) <= 39
    again = run(workload, **changes)
    assert (again.requests, again.passes) == (simulation.requests, simulation.passes)


def test_one_request_takes_the_cost_models_seconds():
    (record,) = run([WorkloadRequest(1.5, [1] * 10, 4)], model=LLAMA, max_model_len=64).requests
    config = EngineConfig.latest().resolve(LLAMA)
    lengths = [(10, 10), (1, 11), (1, 12), (1, 13)]
    seconds = [step_cost(LLAMA, [of], config.attention_backend, config.dtype).seconds(A100) for of in lengths]
    assert record.arrival == 1.5
    assert record.time_to_first_token == pytest.approx(seconds[0])
    assert record.gaps == pytest.approx(seconds[1:])
    assert record.normalized_latency == pytest.approx(sum(seconds) / 4)


def test_what_rows_are_for_counted_by_hand():
    """10 + 6 tokens, the last of which needs no row: of a block of 16 rows one is never written."""
    request = [WorkloadRequest(0.0, [1] * 10, 6)]
    paged = run(request, chapter=3, num_gpu_blocks_override=4)
    assert [astuple(each.kv) for each in paged.passes] == [(10 + i, 5 - i, 1, 32) for i in range(6)]
    assert paged.kv_shares()["free"] == pytest.approx(32 / 48), "nobody waited: the mean is over all passes"
    contiguous = run(request, chapter=1, num_gpu_blocks_override=2)
    assert [astuple(each.kv) for each in contiguous.passes] == [(10 + i, 5 - i, 113, 128) for i in range(6)]


def test_copies_on_write_are_read_and_written_in_device_memory():
    copying = run([WorkloadRequest(0.0, [1] * 20, 4, n=2)], chapter=3)
    assert copying.metrics.blocks_copied == 1
    extra = []
    for each in copying.passes[:2]:
        rows = dict.fromkeys(each.scheduled, 20) if each.step == 0 else {"0/0": 21, "0/1": 20}
        lengths = [(new, rows[i]) for i, new in each.scheduled.items()]
        extra.append(each.seconds - step_cost(random_config(), lengths, "flash", "float32").seconds(A100))
    block_bytes = 16 * 2 * 2 * 2 * 16 * 4
    assert extra == pytest.approx([0, 2 * block_bytes / A100.bandwidth], abs=1e-12)


def test_nothing_happens_while_nobody_is_there():
    simulation = run([WorkloadRequest(0.0, [1], 1), WorkloadRequest(100.0, [1], 1)])
    assert [each.start for each in simulation.passes] == [0, 100]
    assert simulation.summary()["busy"] < 0.01
    assert math.isnan(simulation.summary()["gap_p99"]), "no request has two tokens"


def test_host_overhead_is_added_to_every_pass():
    workload = random_workload(5, SHORT)
    plain, slow = (simulate(workload, LLAMA, EngineConfig.latest(), A100, host_seconds=s) for s in (0.0, 0.002))
    assert [each.seconds for each in slow.passes] == pytest.approx([each.seconds + 0.002 for each in plain.passes])


def test_swapped_blocks_take_their_bytes_over_the_links_bandwidth():
    config = EngineConfig.latest(num_gpu_blocks_override=40, preemption_mode="swap", swap_space=1e-3, **POOL)
    workload = random_workload(12, SHORT, seed=5)
    block_bytes = 4 * 2 * 2 * 2 * 16 * 4  # rows, K and V, layers, KV heads, head dim, float32
    slow, fast, costly = (
        simulate(workload, random_config(), config, A100, link=link)
        for link in (HostLink(1e6), HostLink(math.inf), HostLink(math.inf, 0.25))
    )
    blocks = slow.metrics.blocks_swapped
    assert blocks > 0
    assert slow.seconds - fast.seconds == pytest.approx(blocks * block_bytes / 1e6)
    assert costly.seconds - fast.seconds == pytest.approx(blocks * 0.25)


def test_eight_devices_are_eight_times_as_fast_and_hold_what_one_cannot():
    workload = random_workload(5, SHORT)
    config = EngineConfig.latest(max_model_len=64, kv_cache_memory_bytes=1 << 30)
    one, eight = (simulate(workload, LLAMA, config, device) for device in (A100, several(A100, 8)))
    assert eight.seconds == pytest.approx(one.seconds / 8)
    big = MODELS["Llama-3-70B"]
    with pytest.raises(ValueError, match="holds no request"):
        simulate(workload, big, EngineConfig.latest(), A100)
    simulate(workload, big, EngineConfig.latest(), several(A100, 8))


def test_samples_share_their_prompt():
    workload = [WorkloadRequest(0.0, [1] * 65, 8, n=4)]
    shared = run(workload, chapter=3, max_model_len=128)
    apart = run(workload * 4, chapter=3, max_model_len=128)
    assert shared.metrics.tokens_computed < apart.metrics.tokens_computed / 2
    assert shared.metrics.blocks_copied == 0, "all but the last token of the prompt are four whole blocks"


@pytest.mark.parametrize("prompt, output", [(120, 9), (200, 1)])
def test_a_length_that_cannot_be_reached_is_refused(prompt, output):
    with pytest.raises(ValueError, match=f"takes {prompt + output} tokens; at most {MAX_LEN} fit"):
        run([WorkloadRequest(0.0, [1] * prompt, output)])


def test_a_scheduler_of_ones_own():
    class Shortest(Scheduler):
        def add(self, request):
            super().add(request)
            self.waiting.sort(key=lambda r: r.sampling_params.max_tokens)

    workload = [WorkloadRequest(0.0, [1] * 4, length) for length in (30, 20, 10)]
    config = EngineConfig.latest(max_num_seqs=1, kv_cache_memory_bytes=1 << 24)
    simulation = simulate(workload, random_config(), config, A100, scheduler=Shortest)
    assert [r.finish for r in simulation.requests] == sorted((r.finish for r in simulation.requests), reverse=True)


def test_a_scheduler_that_schedules_nothing_is_found_out():
    class Lazy(Scheduler):
        def _admit_waiting(self, *args):
            pass

    config = EngineConfig.latest(kv_cache_memory_bytes=1 << 24)
    with pytest.raises(RuntimeError, match="none can run"):
        simulate([WorkloadRequest(0.0, [1], 1)], random_config(), config, A100, scheduler=Lazy)


# -- static against iteration-level batching (Orca) --------------------------------------------------------------------


def test_static_batching_uses_mean_over_max_of_its_seats():
    seats, outputs = 64, Uniform(1, 100)
    workload = random_workload(8 * seats, (Fixed(4), outputs))
    lengths = [request.output_len for request in workload]
    static, iteration = (run(workload, chapter, max_num_seqs=seats, max_model_len=128) for chapter in (2, 3))
    longest = [max(lengths[first : first + seats]) for first in range(0, len(lengths), seats)]
    assert static.metrics.forward_passes == sum(longest)
    assert static.seat_utilization == pytest.approx(mean(lengths) / mean(longest))
    assert static.seat_utilization == pytest.approx(50.5 / 100, abs=0.03), "mean over max of the distribution"
    assert iteration.seat_utilization > 0.85, "1 but for the last requests, when nobody is left to join"


def test_throughput_and_latency_have_the_shape_of_orcas_figure_10():
    lengths = Uniform(8, 64), LogNormal(40, 1.0, high=256)
    rates = (2, 12, 40)
    curves = {}
    for chapter in (2, 3):
        config = EngineConfig.at_chapter(chapter, max_num_seqs=16, max_model_len=512)
        curves[chapter] = [simulate(random_workload(120, lengths, r), LLAMA, config, A100).summary() for r in rates]
    for curve in curves.values():
        latencies = [point["normalized_latency"] for point in curve]
        assert latencies == sorted(latencies), "more load, more latency"
    for static, iteration in zip(*curves.values(), strict=True):
        assert static["normalized_latency"] > 1.5 * iteration["normalized_latency"]
    low, mid, high = zip(*curves.values(), strict=True)
    assert low[0]["requests_per_second"] == pytest.approx(low[1]["requests_per_second"], rel=0.02), "neither is full"
    assert mid[1]["normalized_latency"] < 1.1 * low[1]["normalized_latency"], "iteration level isn't full yet"
    assert mid[0]["normalized_latency"] > 3 * low[0]["normalized_latency"], "static is"
    assert high[0]["requests_per_second"] < 0.5 * high[1]["requests_per_second"], "where static saturates"


# -- small print -------------------------------------------------------------------------------------------------------


def test_percentiles():
    assert [percentile([1, 2, 3, 4], share) for share in (0.0, 0.25, 0.5, 0.51, 0.99, 1.0)] == [1, 1, 2, 3, 4, 4]
    assert math.isnan(percentile([], 0.5))


def test_the_simulator_loads_no_torch():
    code = """
import sys
import minillm.simulator.simulation, minillm.simulator.reservation, minillm.simulator.timeline
assert not {"torch", "transformers", "triton", "numpy"} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
