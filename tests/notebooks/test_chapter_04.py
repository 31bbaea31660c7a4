"""What chapter 04's cells lean on: the timeline by time, Algorithm 3 on plain data, rows read again, the quiz."""

import random
from itertools import pairwise

import pytest

from minillm.core.config import EngineConfig
from minillm.core.presets import DEVICES, MODELS
from minillm.core.workloads import WorkloadRequest
from minillm.course import quiz
from minillm.course.batch_timeline import (
    BUDGETS,
    CHUNK_PRESETS,
    WHOLE,
    chunk_rows,
    chunk_run,
    chunk_widget,
    timeline_svg,
)
from minillm.scheduling.sarathi import Job, first_stall, largest_budget, next_pass, rows_read_again, stall_free
from minillm.simulator.simulation import simulate


def queues(seed: int, count: int = 25):
    """Jobs in order of arrival, seats, and a budget that no number of decodes uses up."""
    rng = random.Random(seed)
    for _ in range(count):
        seats = rng.randint(1, 5)
        arrivals = sorted(rng.randint(0, 9) for _ in range(rng.randint(1, 8)))
        jobs = [(f"{i}", rng.randint(1, 30), rng.randint(1, 9), arrival) for i, arrival in enumerate(arrivals)]
        yield jobs, seats, rng.randint(seats + 1, 16)


def run_of(jobs, seats, budget):
    return stall_free([Job(*job) for job in jobs], seats, budget)


# -- the widget --------------------------------------------------------------------------------------------------------


def test_presets_answer_the_tasks():
    rows = {(row["prompt"], str(row["budget"])): row for row in chunk_rows()}
    assert len(rows) == len(CHUNK_PRESETS)
    longest = {budget: float(row["longest"]) for (prompt, budget), row in rows.items() if prompt == "4,096"}
    assert max(int(b.replace(",", "")) for b in longest if b != WHOLE and longest[b] <= 30) == 512
    first = {budget: int(row["first token, ms"]) for (prompt, budget), row in rows.items() if prompt == "4,096"}
    assert abs(first["512"] - first[WHOLE]) < 10, "1: it pays nothing"
    assert longest["128"] - longest["64"] < 0.2 and first["64"] > 1.9 * first["128"], "2: gaps stop, first tokens grow"
    short = [{k: v for k, v in rows["256", budget].items() if k != "budget"} for budget in (WHOLE, "512")]
    assert short[0] == short[1], "3: nothing changes"


@pytest.mark.parametrize("budget", BUDGETS)
def test_no_pass_is_larger_than_the_budget_and_all_that_decode_are_in_it(budget):
    run = chunk_run(budget, 2000, running=3, prompts=2)
    assert [sum(chunks) for chunks in run.chunks] == [2000, 2000]
    assert run.rows_again == sum(map(rows_read_again, run.chunks)) and (budget != WHOLE or run.rows_again == 0)
    for frame in run.frames:
        if budget != WHOLE:
            assert sum(frame.prompt.values()) + len(frame.output) <= budget
        started = {"0", "1", "2"} & {*frame.prompt, *frame.output, *frame.waiting}
        assert budget == WHOLE or not started & set(frame.waiting)
    assert run.longest_gap == max(run.gaps) >= run.usual_gap


def test_a_smaller_budget_never_makes_the_longest_gap_longer():
    longest = [chunk_run(budget, 4096).longest_gap for budget in BUDGETS]
    assert all(b <= a + 1e-9 for a, b in pairwise(longest))


def test_what_cannot_be_drawn_is_refused():
    for arguments, said in (
        ({"running": 9}, "9 running"),
        ({"prompt": 9000}, "9000 tokens"),
        ({"budget": 4, "running": 4}, "nothing is left"),
        ({"budget": 64, "prompt": 7936, "prompts": 4}, "more than 220 passes"),
    ):
        with pytest.raises(ValueError, match=said):
            chunk_run(**arguments)


def test_shell_shows_the_run_and_its_refusals():
    panel = chunk_widget()
    assert "197.6 ms" in panel.view.value and "read again 0" in panel.view.value
    panel.controls["budget"].value = 512
    assert "26.2 ms" in panel.view.value and "18,288" in panel.view.value
    panel.controls["prompt"].value = 7936
    panel.controls["prompts"].value = 4
    panel.controls["budget"].value = 64
    assert "Not possible:" in panel.view.value and "220 passes" in panel.view.value
    run = chunk_run(512)
    assert timeline_svg(run.frames, run.names, by_time=True).count("class='prompt'") == 1 + sum(
        len(frame.prompt) for frame in run.frames
    )


# -- Algorithm 3 -------------------------------------------------------------------------------------------------------


def test_algorithm_3_is_the_engines_scheduler():
    for jobs, seats, budget in queues(1):
        workload = [WorkloadRequest(float(arrival), [1] * prompt, output) for _, prompt, output, arrival in jobs]
        config = EngineConfig.at_chapter(4, max_num_seqs=seats, max_num_batched_tokens=budget)
        # One second for the host makes all passes alike; arrivals a little earlier, since passes take a little more.
        workload = [WorkloadRequest(max(0.0, w.arrival - 0.1), w.prompt_token_ids, w.output_len) for w in workload]
        run = simulate(workload, MODELS["tiny"], config, DEVICES["A100 80GB"], host_seconds=1.0)
        plans = [plan for plan in run_of(jobs, seats, budget) if plan]
        assert [each.scheduled for each in run.passes] == plans


def test_nobody_is_left_out_and_no_pass_exceeds_the_budget():
    for jobs, seats, budget in queues(2):
        trace = run_of(jobs, seats, budget)
        assert max(sum(plan.values()) for plan in trace) <= budget
        assert first_stall(trace, [Job(*job) for job in jobs]) is None
        for name, prompt, output, _ in jobs:
            assert sum(plan.get(name, 0) for plan in trace) == prompt + output - 1


def test_who_is_left_out_is_found():
    def prompts_first(batch, queue, budget, can_allocate):
        batch += [queue.pop(0) for _ in list(queue)]
        plan = {}
        for job in sorted(batch, key=lambda job: job.computed == job.prompt):
            plan[job.name] = min(max(1, job.prompt - job.computed), budget - sum(plan.values()))
        return plan

    jobs = [("A", 2, 7, 0), ("C", 13, 2, 2)]
    assert first_stall(stall_free([Job(*j) for j in jobs], 4, 8, prompts_first), [Job(*j) for j in jobs]) == (2, "A")


def test_more_decodes_than_budget_are_all_served_and_no_prompt_goes_on():
    batch = [Job(str(i), 1, 5, computed=1) for i in range(9)] + [Job("p", 13, 2, computed=3)]
    queue = [Job("n", 4, 2)]
    assert next_pass(batch, queue, 8, lambda job: True) == {str(i): 1 for i in range(9)} and len(queue) == 1


def test_rows_read_again():
    rng = random.Random(3)
    for _ in range(50):
        chunks = [rng.randint(1, 40) for _ in range(rng.randint(0, 9))]
        counted = sum(1 for i in range(len(chunks)) for j in range(i) for _ in range(chunks[j]))
        assert rows_read_again(chunks) == counted
        n, c = len(chunks), 7
        assert rows_read_again([c] * n) == c * n * (n - 1) // 2


def test_largest_budget_trusts_no_lucky_measurement():
    steps = {64: 0.008, 128: 0.009, 256: 0.031, 512: 0.029}
    assert largest_budget(steps, 0.03) == 128 and largest_budget(steps, 0.031) == 512
    with pytest.raises(ValueError, match=r"64 tokens take 0\.0080"):
        largest_budget(steps, 0.001)
    with pytest.raises(ValueError, match="nothing was measured"):
        largest_budget({}, 1)


def test_the_quizs_numbers_are_what_passes_do():
    for prompt, budget, decoding in ((400, 64, 14), (9, 6, 1), (13, 8, 2)):
        jobs = [Job(str(i), 1, 99) for i in range(decoding)]
        trace = stall_free([*jobs, Job("p", prompt, 1, 1)], decoding + 1, budget)
        chunks = [plan["p"] for plan in trace if "p" in plan]
        assert len(chunks) == quiz.chunk_passes(prompt, budget, decoding)
    assert quiz.rows_again(4096, 512) == rows_read_again([512] * 8)
    assert quiz.rows_again(1000, 300) == rows_read_again([300, 300, 300, 100])
    steps = {"128": 9, "256": 13, "512": 26, "1024": 53}
    assert quiz.budget_for(steps, 30) == largest_budget({int(k): v for k, v in steps.items()}, 30) == 512
