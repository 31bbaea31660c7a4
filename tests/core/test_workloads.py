import math
import random
from itertools import pairwise
from statistics import mean, median, stdev

import pytest

from minillm.core.workloads import (
    ALPACA,
    SHAREGPT,
    Fixed,
    LogNormal,
    Uniform,
    chat,
    few_shot,
    random_workload,
    scoreboard,
    self_consistency,
    tree_of_thought,
)


def test_workloads_are_seeded():
    makers = (
        lambda seed: scoreboard(256, seed=seed),
        lambda seed: random_workload(5, rate=2, seed=seed),
        lambda seed: few_shot(seed=seed),
        lambda seed: chat(seed=seed),
        lambda seed: tree_of_thought(seed=seed),
        lambda seed: self_consistency(seed=seed),
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


# -- shared prefixes --------------------------------------------------------------------------------------------------


def prompts_of(workload) -> list[tuple[int, ...]]:
    assert {request.arrival for request in workload} == {0} and {request.n for request in workload} == {1}
    return [tuple(request.prompt_token_ids) for request in workload]


def assert_interleaved(families: list) -> None:
    """Neighbours are mostly of different families: whoever serves by arrival keeps changing."""
    changes = sum(a != b for a, b in pairwise(families))
    assert changes > len(families) / 2


def test_few_shot_questions_share_their_tasks_examples():
    prompts = prompts_of(few_shot(tasks=3, questions=7, examples=2, example_len=10, question_len=5, vocab_size=100))
    stems = [prompt[:20] for prompt in prompts]
    assert sorted(stems.count(stem) for stem in set(stems)) == [7, 7, 7]
    assert all(21 <= len(prompt) <= 25 for prompt in prompts)
    assert all(0 < token < 100 for prompt in prompts for token in prompt)
    assert_interleaved(stems)


def test_each_turn_of_a_chat_begins_with_all_that_was_said():
    workload = chat(conversations=4, turns=5, system_len=10, turn_len=6, answer_len=8)
    prompts = prompts_of(workload)
    assert len({prompt[:10] for prompt in prompts}) == 1 and {request.output_len for request in workload} == {8}
    first = [prompt for prompt in prompts if len(prompt) <= 16]
    assert len(first) == 4
    families = [next(i for i, begin in enumerate(first) if prompt[: len(begin)] == begin) for prompt in prompts]
    for family in range(4):
        said = [prompt for prompt, of in zip(prompts, families, strict=True) if of == family]
        assert len(said) == 5
        for before, after in pairwise(said):
            assert after[: len(before)] == before
            assert 1 <= len(after) - len(before) - 8 <= 6, "an answer of 8, then the next message"
    assert_interleaved(families)


def test_a_tree_of_thought_branches_at_every_prompt():
    prompts = prompts_of(tree_of_thought(problems=4, depth=3, branches=2, problem_len=10, thought_len=4))
    assert sorted(map(len, prompts)) == [10] * 4 + [14] * 8 + [18] * 16
    for prompt in prompts:
        below = [other for other in prompts if len(other) == len(prompt) + 4 and other[: len(prompt)] == prompt]
        assert len(below) == (2 if len(prompt) < 18 else 0)
        assert all(prompts.index(prompt) < prompts.index(other) for other in below), "a thought comes after its problem"
    assert_interleaved([prompt[:10] for prompt in prompts])


def test_self_consistency_asks_the_same_again():
    prompts = prompts_of(self_consistency(questions=4, samples=6, examples_len=20, question_len=5))
    assert [prompts.count(prompt) for prompt in set(prompts)] == [6] * 4
    assert len({prompt[:20] for prompt in prompts}) == 1 and all(21 <= len(prompt) <= 25 for prompt in prompts)
    assert_interleaved(prompts)
