"""Log-probabilities as reported: of the model's own logits, the sampled token first, ranks as the sampler orders."""

import math

import pytest
import torch

from minillm.compute.sampling.sampler import Sampler, top_logprobs
from tests.compute.sampling import wrong
from tests.compute.sampling.reference import row, softmax

LOGITS = [1.0, 3.0, -2.0, 3.0, 0.5, 2.5]
RANKED = [1, 3, 5, 0, 4, 2]  # most likely first, of equals the lower id
TRUE = [math.log(p) for p in softmax(LOGITS)]


def assert_entries(entries, sampled: int, k: int, logprobs=TRUE, ranked=RANKED, tolerance=1e-6):
    assert [entry.token_id for entry in entries] == [sampled, *ranked[:k]]
    assert [entry.rank for entry in entries] == [ranked.index(sampled) + 1, *range(1, k + 1)]
    for entry in entries:
        assert abs(entry.logprob - logprobs[entry.token_id]) < tolerance


def reported(sampler, k=3, dtype=torch.float32, **fields):
    """(token, entries) over thirty seeds."""
    rows = [row(logprobs=k, seed=seed, **fields) for seed in range(30)]
    got = sampler(torch.tensor([LOGITS] * 30, dtype=dtype), rows)
    return list(zip(got.token_ids, got.logprobs, strict=True))


def check_before_temperature(sampler):
    for fields in (dict(), dict(temperature=0.3), dict(temperature=3.0), dict(temperature=0)):
        for token, entries in reported(sampler, **fields):
            assert_entries(entries, token, 3)


def check_before_penalties_and_cuts(sampler):
    for fields in (
        dict(top_k=1),
        dict(top_p=0.1, min_p=0.5),
        dict(temperature=0, logit_bias={2: 100.0, 1: -100.0}),
        dict(output=[1, 3], presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=3.0),
        dict(allowed_token_ids=[2, 4]),
        dict(min_tokens=1, eos=(1, 3)),
    ):
        for token, entries in reported(sampler, **fields):
            assert_entries(entries, token, 3)


def check_sampled_token_first(sampler):
    """Even where it is the most likely one and so comes twice, or is not among the k."""
    seen = set()
    for token, entries in reported(sampler, k=2, temperature=3.0):
        assert_entries(entries, token, 2)
        seen.add(token)
    assert {1, 0} <= seen, "both cases came up"


def check_ranks_of_equals(sampler):
    """Tokens 1 and 3 are equals: ranks 1 and 2, whichever was sampled."""
    ranks = {token: entries[0].rank for token, entries in reported(sampler, temperature=2.0)}
    assert ranks[1] == 1 and ranks[3] == 2


def check_number_of_entries(sampler):
    for k in (0, 1, 5, len(LOGITS)):
        for token, entries in reported(sampler, k=k):
            assert_entries(entries, token, k)


def check_each_row_gets_what_it_asked(sampler):
    asked = [None, 0, 4, None, 1]
    for temperature in (0, 1.0):
        got = sampler(torch.tensor([LOGITS] * 5), [row(logprobs=k, temperature=temperature) for k in asked])
        assert [entries and len(entries) for entries in got.logprobs] == [None, 1, 5, None, 2]


def check_log_probabilities_sum_to_one(sampler):
    token, entries = reported(sampler, k=len(LOGITS), dtype=torch.float64)[0]
    assert_entries(entries, token, len(LOGITS), tolerance=1e-12)
    assert abs(math.fsum(math.exp(entry.logprob) for entry in entries[1:]) - 1) < 1e-12


def check_low_precision_logits_are_normalised_in_float32(sampler):
    """bfloat16 has 8 bits: the logits here are exact in it, their log-probabilities are not."""
    for dtype in (torch.bfloat16, torch.float16):
        for token, entries in reported(sampler, dtype=dtype):
            assert_entries(entries, token, 3)


CHECKS = [
    check_before_temperature,
    check_before_penalties_and_cuts,
    check_sampled_token_first,
    check_ranks_of_equals,
    check_number_of_entries,
    check_each_row_gets_what_it_asked,
    check_log_probabilities_sum_to_one,
    check_low_precision_logits_are_normalised_in_float32,
]


@pytest.mark.parametrize("check", CHECKS)
def test_sampler(check):
    check(Sampler())


def one_more(raw, processed, tokens, wanted):
    return top_logprobs(raw, tokens, [None if k is None else min(k + 1, raw.shape[-1]) for k in wanted])


def in_half_precision(raw, processed, tokens, wanted):
    return top_logprobs(raw.to(torch.bfloat16).log_softmax(-1), tokens, wanted)


WRONG = {
    "after temperature": (
        wrong.report_at_half_temperature,
        [check_before_temperature, check_log_probabilities_sum_to_one],
    ),
    "after penalties": (wrong.report_after_penalties, [check_before_penalties_and_cuts]),
    "not normalised": (wrong.report_logits, [check_before_temperature, check_log_probabilities_sum_to_one]),
    "most likely first": (wrong.report_sorted, [check_sampled_token_first]),
    "ranks from zero": (wrong.report_ranks_from_zero, [check_ranks_of_equals, check_sampled_token_first]),
    "equals share a rank": (wrong.report_equal_ranks, [check_ranks_of_equals]),
    "as many as the neighbour": (wrong.report_one_length, [check_each_row_gets_what_it_asked]),
    "one more than asked": (one_more, [check_number_of_entries]),
    "in bfloat16": (in_half_precision, [check_low_precision_logits_are_normalised_in_float32]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_report_is_noticed(name):
    report, checks = WRONG[name]
    for check in checks:
        with pytest.raises(AssertionError):
            check(wrong.assemble(report=report))


def test_every_check_refuses_something():
    assert {check for _, checks in WRONG.values() for check in checks} == set(CHECKS)


def test_ranks_agree_with_greedy_where_log_probabilities_round_to_equals():
    logits = torch.tensor([[1e-10, 2e-10, 0.0]])
    got = Sampler()(logits, [row(temperature=0, logprobs=3)])
    assert got.token_ids == [1]
    assert [(entry.token_id, entry.rank) for entry in got.logprobs[0]] == [(1, 1), (1, 1), (0, 2), (2, 3)]


def test_of_given_tokens():
    """As for a prompt: the tokens are those that were there, whatever the logits say."""
    got = top_logprobs(torch.tensor([LOGITS] * 2), [2, 3], [1, None])
    assert_entries(got[0], 2, 1)
    assert got[1] is None
    assert top_logprobs(torch.zeros(0, 5), [], []) == []


def test_more_than_the_vocabulary_gives_the_vocabulary():
    assert_entries(top_logprobs(torch.tensor([LOGITS]), [2], [99])[0], 2, len(LOGITS))


def test_impossible_tokens_rank_last():
    entries = top_logprobs(torch.tensor([[0.0, -math.inf, 1.0]]), [1], [3])[0]
    assert (entries[0].logprob, entries[0].rank) == (-math.inf, 3)
