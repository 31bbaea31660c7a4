import math
import random
from itertools import pairwise
from statistics import mean, median, stdev

import pytest

from minillm.core.workloads import ALPACA, SHAREGPT, Fixed, LogNormal, Uniform, random_workload, scoreboard


def test_workloads_are_seeded():
    makers = (
        lambda seed: scoreboard(256, seed=seed),
        lambda seed: random_workload(5, rate=2, seed=seed),
    )
    for make in makers:
        assert make(1) == make(1)
        assert make(1) != make(2)


def test_the_scoreboards_workload_has_what_the_papers_need():
    workload = scoreboard(256, requests=320)
    prefixes = {tuple(request.prompt_token_ids[:96]) for request in workload}
    assert len(prefixes) == 4, "shared prefixes"
    arrivals = [request.arrival for request in workload]
    assert arrivals == sorted(arrivals)
    assert 2.5 < arrivals[-1] / len(arrivals) < 3.5, "one request every three passes"
    outputs = [request.output_len for request in workload]
    assert min(outputs) >= 8 and max(outputs) == 128
    assert mean(outputs) < 0.5 * max(outputs), "skewed outputs"
    long = [request for request in scoreboard(256) if len(request.prompt_token_ids) > 400]
    assert len(long) == 2, "two long prompts"
    assert all(0 < token < 256 for request in workload for token in request.prompt_token_ids)


def gaps(workload):
    times = [0.0, *(request.arrival for request in workload)]
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize("lengths, prompt, output", [(SHAREGPT, 161, 338), (ALPACA, 19.3, 58.5)])
def test_means_are_those_of_the_papers_data_sets(lengths, prompt, output):
    rng = random.Random(0)
    for distribution, expected in zip(lengths, (prompt, output), strict=True):
        drawn = [distribution.draw(rng) for _ in range(20_000)]
        assert mean(drawn) == pytest.approx(expected, rel=0.03)
        assert median(drawn) == pytest.approx(distribution.median, rel=0.05)
        assert min(drawn) >= 1 and max(drawn) <= 1024


def test_other_lengths():
    workload = random_workload(300, lengths=(Uniform(3, 6), Fixed(7)))
    assert {len(request.prompt_token_ids) for request in workload} == {3, 4, 5, 6}
    assert {request.output_len for request in workload} == {7}
    drawn = [r.output_len for r in random_workload(300, lengths=(Fixed(1), LogNormal(10, 2.0, low=5, high=20)))]
    assert min(drawn) == 5 and max(drawn) == 20


@pytest.mark.parametrize("cv", [0, 0.5, 1, 4])
def test_arrivals_have_their_rate_and_their_variation(cv):
    between = gaps(random_workload(20_000, (Fixed(1), Fixed(1)), rate=5, cv=cv))
    assert mean(between) == pytest.approx(1 / 5, rel=0.06)
    assert stdev(between) / mean(between) == pytest.approx(cv, rel=0.1, abs=1e-6)


def test_another_rate_stretches_the_same_workload():
    slow, fast = (random_workload(50, rate=rate, seed=3) for rate in (1, 10))
    assert [r.prompt_token_ids for r in slow] == [r.prompt_token_ids for r in fast]
    assert [r.output_len for r in slow] == [r.output_len for r in fast]
    assert [r.arrival for r in slow] == pytest.approx([10 * r.arrival for r in fast])
    assert {r.arrival for r in random_workload(50, rate=math.inf)} == {0}


def test_shared_prefixes_and_samples():
    workload = random_workload(100, (Uniform(2, 4), Fixed(1)), prefixes=3, prefix_len=20, n=4)
    assert len({tuple(request.prompt_token_ids[:20]) for request in workload}) == 3
    assert {len(request.prompt_token_ids) for request in workload} == {22, 23, 24}
    assert {request.n for request in workload} == {4}


@pytest.mark.parametrize("wrong", [{"rate": 0}, {"rate": -1}, {"cv": -1}, {"rate": math.nan}])
def test_no_such_arrivals(wrong):
    with pytest.raises(ValueError, match="rate must be above 0"):
        random_workload(3, **wrong)
