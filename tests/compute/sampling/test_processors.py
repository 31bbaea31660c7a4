"""Masks, bias and penalties, against the same rules in plain Python."""

import math
import random

import pytest
import torch

from minillm.compute.sampling.processors import process_logits
from minillm.core.sampling_params import SamplingParams
from tests.compute.sampling import wrong
from tests.compute.sampling.reference import expected_logits, row

LOGITS = [1.5, -2.0, 0.0, 3.0, -0.5, 0.25, 2.0, -1.0]


def assert_processed(process, values, rows, dtype=torch.float64, tolerance=1e-12):
    logits = torch.tensor(values, dtype=dtype)
    got = process(logits.clone(), rows)
    for ours, exact, r in zip(got.tolist(), logits.tolist(), rows, strict=True):
        expected = expected_logits(exact, r)
        for token, (a, b) in enumerate(zip(ours, expected, strict=True)):
            assert a == b or abs(a - b) <= tolerance, (token, a, b, r)


def one(process, prompt=(), output=(), eos=(), **params):
    assert_processed(process, [LOGITS], [row(SamplingParams(**params), 0, 0, prompt, output, eos)])


def check_presence(process):
    """Once, for tokens of the output alone."""
    one(process, prompt=[0, 1], output=[1, 3, 3, 3], presence_penalty=0.7)
    one(process, prompt=[0, 1], output=[], presence_penalty=0.7)
    one(process, output=[4], presence_penalty=-2.0)


def check_frequency(process):
    """Once for each time, for tokens of the output alone."""
    one(process, prompt=[0, 1, 1], output=[1, 3, 3, 3], frequency_penalty=0.3)
    one(process, prompt=[0], output=[4, 4], frequency_penalty=-1.0)
    one(process, output=[2, 2, 5], frequency_penalty=0.1, presence_penalty=0.4)


def check_repetition(process):
    """Divides positive logits and multiplies negative ones, once, for prompt and output; below 1 it rewards."""
    one(process, prompt=[0, 1], output=[], repetition_penalty=1.5)
    one(process, prompt=[], output=[3, 4, 4], repetition_penalty=2.0)
    one(process, prompt=[0, 1, 2, 2], output=[2, 1, 7], repetition_penalty=0.5)


def check_bias(process):
    one(process, logit_bias={0: 2.5, 7: -100.0})
    # Before the repetition penalty: what is divided or multiplied is the biased logit.
    one(process, prompt=[0, 1], logit_bias={0: -2.0, 1: 3.0}, repetition_penalty=2.0)


def check_allowed_tokens(process):
    one(process, allowed_token_ids=[1, 4])
    one(process, allowed_token_ids=[4, 4, 1])
    # Neither a bias nor a penalty brings others back.
    one(
        process,
        prompt=[0, 1],
        output=[2, 4],
        allowed_token_ids=[1, 4],
        logit_bias={0: 50.0, 1: 1.0},
        repetition_penalty=0.5,
    )


def check_min_tokens(process):
    """Bars end tokens and stop tokens until the output has so many, ignored or not."""
    for length in range(4):
        one(process, output=[0] * length, eos=(2, 5), min_tokens=2, stop_token_ids=[6])
    one(process, output=[0], eos=(2,), min_tokens=2, ignore_eos=True)
    one(process, output=[0], eos=(), min_tokens=2)


def check_everything_in_one_batch(process):
    rng = random.Random(0)
    rows, values = [], []
    for _ in range(100):
        params = SamplingParams(
            presence_penalty=rng.choice([0, 0.5, -0.3]),
            frequency_penalty=rng.choice([0, 0.2, -0.1]),
            repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
            logit_bias=rng.choice([None, {}, {3: 1.0, 5: -2.0}]),
            allowed_token_ids=rng.choice([None, None, [2, 3, 5, 7]]),
            min_tokens=rng.choice([0, 3]),
            stop_token_ids=rng.choice([[], [2, 4]]),
        )
        history = [rng.randrange(8) for _ in range(10)]
        cut = rng.randrange(10)
        rows.append(row(params, 0, 0, history[:cut], history[cut:], eos=(1,)))
        values.append([rng.gauss(0, 2) for _ in range(8)])
    assert_processed(process, values, rows)
    assert_processed(process, values, rows, torch.float32, 1e-5)


CHECKS = [
    check_presence,
    check_frequency,
    check_repetition,
    check_bias,
    check_allowed_tokens,
    check_min_tokens,
    check_everything_in_one_batch,
]


@pytest.mark.parametrize("check", CHECKS)
def test_process_logits(check):
    check(process_logits)


@pytest.mark.parametrize("check", CHECKS)
def test_the_rules_token_by_token_pass_too(check):
    """So what the wrong versions below fail for is the one rule they break."""
    check(wrong.process())


def penalties_in_float32(logits, rows):
    return process_logits(logits.float(), rows).to(logits.dtype)


WRONG = {
    "prompt counts for all penalties": (wrong.process(prompt_counts=True), [check_presence, check_frequency]),
    "presence for each time": (wrong.process(presence_each_time=True), [check_presence]),
    "frequency once": (wrong.process(frequency_once=True), [check_frequency]),
    "repetition divides negative logits": (wrong.process(divide_always=True), [check_repetition]),
    "repetition for each time": (wrong.process(repetition_each_time=True), [check_repetition]),
    "repetition of the output only": (wrong.process(repetition_of_output_only=True), [check_repetition]),
    "bias after the penalties": (wrong.process(bias_last=True), [check_bias]),
    "allowed tokens ignored": (wrong.process(masks=False), [check_allowed_tokens]),
    "stop tokens not barred": (wrong.process(stop_tokens_stay=True), [check_min_tokens]),
    "end tokens not barred": (wrong.process(eos_stays=True), [check_min_tokens]),
    "barred one token too long": (wrong.process(off_by_one=True), [check_min_tokens]),
    "float32 throughout": (penalties_in_float32, [check_frequency, check_everything_in_one_batch]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_noticed(name):
    version, checks = WRONG[name]
    for check in checks:
        with pytest.raises(AssertionError):
            check(version)


def test_every_check_refuses_something():
    assert {check for _, checks in WRONG.values() for check in checks} == set(CHECKS)


def test_worked_by_hand():
    """The reference above is code as well."""
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0, logit_bias={6: 1.0})
    logits = torch.tensor([LOGITS])
    process_logits(logits, [row(params, 0, 0, prompt=[0, 1], output=[3, 3, 4])])
    expected = [0.75, -4.0, 0.0, 1.5 - 0.5 - 0.5, -1.0 - 0.5 - 0.25, 0.25, 3.0, -1.0]
    assert logits[0].tolist() == expected


def test_untouched_rows_keep_every_bit():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    process_logits(logits, [row(output=[1, 2]), row(output=[1, 2], presence_penalty=1.0)])
    assert torch.equal(logits[0], before[0])
    assert (logits[1] != before[1]).nonzero().flatten().tolist() == [1, 2]


def test_masked_tokens_stay_masked_under_extreme_settings():
    params = SamplingParams(
        allowed_token_ids=[1, 2], logit_bias={0: 1e6, 1: -1e6}, repetition_penalty=1e6, frequency_penalty=-2.0
    )
    logits = torch.tensor([LOGITS])
    process_logits(logits, [row(params, 0, 0, prompt=[0, 1, 2], output=[0, 0])])
    assert [math.isfinite(x) for x in logits[0].tolist()] == [False, True, True, False, False, False, False, False]
    assert not logits.isnan().any()
