"""What chapter 03's cells lean on: the timeline widget, Algorithm 1 on plain data, numbers of the quiz."""

import random
from itertools import pairwise

import pytest

from minillm.core.config import EngineConfig
from minillm.core.presets import DEVICES
from minillm.core.workloads import WorkloadRequest
from minillm.course import quiz
from minillm.course.batch_timeline import (
    MAX_REQUESTS,
    PRESETS,
    batch_run,
    marks,
    preset_rows,
    timeline_of,
    timeline_svg,
    timeline_text,
    timeline_widget,
    whole_numbers,
)
from minillm.scheduling.iteration import IterationBatching
from minillm.scheduling.orca import Req, first_unfair, orca, select, serve
from minillm.scheduling.policies import StaticBatching
from minillm.simulator.simulation import simulate
from tests.support import random_config

BATCHINGS = {"static": StaticBatching().may_admit, "iteration": IterationBatching().may_admit}


def queues(seed: int, count: int = 20):
    rng = random.Random(seed)
    for _ in range(count):
        yield [rng.randint(1, 12) for _ in range(rng.randint(1, 9))], rng.randint(1, 4), rng.randint(0, 3)


# -- the widget --------------------------------------------------------------------------------------------------------


def test_presets_answer_the_tasks():
    rows = {row["setting"]: row for row in preset_rows()}
    assert len(rows) == len(PRESETS)
    one, equal = rows["static, one batch"], rows["static, equal lengths"]
    assert one["seats at work"] == one["mean/max of all"] == "44%" and equal["seats at work"] == "100%"
    assert rows["iteration, one batch"] == one | {"setting": "iteration, one batch"}, "nothing gained"
    queue = {name.split(",")[0] + name.split(",")[1]: row["passes"] for name, row in rows.items() if "queue" in name}
    assert queue == {"static mixed queue": 80, "static sorted queue": 44, "iteration mixed queue": 46}
    first = [int(n) for n in rows["first come, long ones first"]["latencies"].split()]
    mlfq = [int(n) for n in rows["MLFQ, long ones first"]["latencies"].split()]
    assert [a - b for a, b in zip(first, mlfq, strict=True)] == [-3, -3, 20, 20, 20]


@pytest.mark.parametrize("policy", ["static", "iteration"])
def test_the_real_scheduler_does_what_counters_do(policy):
    for lengths, seats, every in queues(1):
        run = batch_run(lengths, policy, seats, every)
        lines = serve(lengths, seats, BATCHINGS[policy], [i * every for i in range(len(lengths))])
        # The simulator has no frames for passes in which nobody is there.
        busy = [n for n in range(len(lines[0])) if any(line[n] == "#" for line in lines)]
        drawn = [[m in ("prompt", "output") for m in marks(run.frames, str(i))] for i in range(len(lengths))]
        assert drawn == [[line[n] == "#" for n in busy] for line in lines]
        assert run.latencies == [line.rindex("#") + 1 - i * every for i, line in enumerate(lines)]


def test_static_batches_use_mean_over_max_of_their_seats():
    for lengths, _, _ in queues(2):
        run = batch_run(lengths, "static", len(lengths))
        assert run.utilisation == pytest.approx(run.mean_over_max) and run.passes == max(lengths)


def test_what_cannot_be_drawn_is_refused():
    for lengths, said in (
        ([], "no lengths"),
        ([1] * (MAX_REQUESTS + 1), "13 requests"),
        ([0], "of 0"),
        ([99], "of 99"),
    ):
        with pytest.raises(ValueError, match=said):
            batch_run(lengths)
    with pytest.raises(ValueError, match="'x' is no whole number"):
        whole_numbers("3, x")


def test_text_and_drawing_show_the_frames():
    run = batch_run([2, 6, 1], "static", 2)
    assert timeline_text(run.frames, list("ABC")) == "     A  P#----\n     B  P#####\n     C  ......P"
    svg = timeline_svg(run.frames, list("ABC"))
    assert [svg.count(f"<rect class='{kind}'") - 1 for kind in ("prompt", "output", "idle", "waiting")] == [3, 6, 4, 6]
    assert timeline_svg(run.frames, list("ABC"), by_time=True).count("<rect") == svg.count("<rect")
    jobs = [WorkloadRequest(0.0, [1] * 5, 2), WorkloadRequest(0.0, [1] * 5, 1)]
    config = EngineConfig.at_chapter(3, max_num_seqs=1, kv_cache_memory_bytes=1 << 24)
    assert timeline_of(simulate(jobs, random_config(), config, DEVICES["A100 80GB"])) == "  0: 2  P#\n  1: 1  ..P"


def test_shell_shows_the_run_and_its_refusals():
    panel = timeline_widget()
    assert "36 passes" in panel.view.value and "44%" in panel.view.value
    panel.controls["lengths"].value = "2, 20, 2, 20, 2, 20, 2, 20"
    panel.controls["seats"].value = 2
    assert "80 passes" in panel.view.value
    panel.controls["policy"].value = "iteration"
    assert "46 passes" in panel.view.value and "96%" in panel.view.value
    panel.controls["lengths"].value = "2, many"
    assert "Not possible:" in panel.view.value and "many" in panel.view.value


# -- Algorithm 1 -------------------------------------------------------------------------------------------------------


def pool(lengths, most=12):
    return [Req(i, n, most) for i, n in enumerate(lengths)]


def test_algorithm_1_with_slots_enough_is_the_engines_scheduler():
    for lengths, seats, _ in queues(3):
        trace = [ids for ids, _ in orca(pool(lengths), 1, seats, 10**6)]
        run = batch_run(lengths, "iteration", seats)
        assert trace == [[int(i) for i in sorted([*f.prompt, *f.output], key=int)] for f in run.frames]


def test_algorithm_1_keeps_its_limits_and_its_invariant():
    for lengths, seats, workers in queues(4):
        trace = orca(pool(lengths), workers + 1, seats, 30)
        assert all(len(ids) <= seats and reserved <= 30 for ids, reserved in trace)
        assert sum(len(ids) for ids, _ in trace) == sum(lengths)
        assert first_unfair([ids for ids, _ in trace], lengths) is None
        for (before, _), (after, _) in pairwise(trace):
            assert workers == 0 or not set(before) & set(after), "in flight, so not chosen again"


def test_overtaking_is_caught():
    def impatient(pool, n_rsrv, max_bs, n_slots):
        batch = []
        for req in sorted(pool, key=lambda req: req.arrival):
            fits, more = select([req], n_rsrv, max_bs - len(batch), n_slots)
            batch, n_rsrv = batch + fits, more
        return batch, n_rsrv

    lengths = [3, 5, 2]
    requests = [Req(0, 3, 6), Req(1, 5, 8), Req(2, 2, 4)]
    trace = [ids for ids, _ in orca(requests, 1, 4, 10, impatient)]
    assert first_unfair(trace, lengths) == (0, 1, 2)
    assert first_unfair([[0], [0, 1], [1]], [2, 5]) is None and first_unfair([[1]], [1, 1]) == (0, 0, 1)


def test_the_quizs_numbers_are_what_batches_do():
    for lengths, seats, _ in queues(5):
        assert quiz.static_passes(lengths, seats) == batch_run(lengths, "static", seats).passes
        assert quiz.iteration_passes(lengths, seats) == batch_run(lengths, "iteration", seats).passes
    batch, _ = select(pool([3] * 9, 8), 0, 4, 20)
    assert len(batch) == quiz.admitted_at_once(20, 8, 4) == 2
    assert quiz.padded_rows([4, 1, 1]) == 12
    # The quiz's quotations of the chapter: static batches of many are worse than of few.
    shares = [quiz.static_batch_utilisation([6, 10, 14, 50][:n]) for n in (2, 3, 4)]
    assert shares == sorted(shares, reverse=True)
