"""Greedy choice, independence of the rows beside, and what a draw depends on."""

import random

import pytest
import torch

from minillm.compute.sampling.sampler import Sampler
from minillm.core.sampling_params import SamplingParams
from tests.compute.sampling import wrong
from tests.compute.sampling.reference import row

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_greedy_takes_the_lowest_of_equals(sampler):
    """In every dtype and wherever the equals stand, alone, and where log-probabilities or a penalty are asked for."""
    variants = [dict(), dict(logprobs=2), dict(min_tokens=1), dict(logit_bias={0: -1.0})]
    for dtype in DTYPES:
        for size in (2, 17, 1000, 4096 + 5):
            places = [(0, size - 1), (size // 2, size - 1), (size - 2, size - 1), tuple(range(size))]
            logits = torch.full((len(places), size), -3.0)
            for logit, place in zip(logits, places, strict=True):
                logit[list(place)] = 2.0
            for fields in variants:
                rows = [row(temperature=0, max_tokens=None, eos=(), **fields) for _ in places]
                expected = [place[0] for place in places]
                if "logit_bias" in fields:
                    expected = [place[1] if place[0] == 0 else place[0] for place in places]
                assert sampler(logits.to(dtype), rows).token_ids == expected, (dtype, size, fields)


def check_equal_in_bfloat16(sampler):
    """Two logits that bfloat16 does not tell apart are a tie there."""
    logits = torch.tensor([[0.0, 1.0, 1.001]])
    assert sampler(logits, [row(temperature=0)]).token_ids == [2]
    assert sampler(logits.to(torch.bfloat16), [row(temperature=0)]).token_ids == [1]


# -- neighbours -----------------------------------------------------------------------------------------------------

KINDS = [
    dict(temperature=0),
    dict(temperature=0, logprobs=3),
    dict(temperature=0, repetition_penalty=1.5, presence_penalty=0.5),
    dict(temperature=0, allowed_token_ids=[3, 9, 27]),
    dict(),
    dict(temperature=0.6, logprobs=0),
    dict(temperature=1.4, top_k=5),
    dict(top_p=0.6, logprobs=5),
    dict(min_p=0.2, frequency_penalty=1.0),
    dict(temperature=2.0, top_k=7, top_p=0.9, min_p=0.01, logit_bias={5: 4.0, 6: -4.0}),
    dict(min_tokens=5, stop_token_ids=[1, 2]),
]


def a_batch(copies: int = 3, size: int = 60):
    rng = random.Random(3)
    rows = []
    for i in range(copies * len(KINDS)):
        history = [rng.randrange(size) for _ in range(rng.randrange(12))]
        cut = rng.randrange(len(history) + 1)
        rows.append(row(SamplingParams(**KINDS[i % len(KINDS)]), i, i % 2, history[:cut], history[cut:], eos=(0,)))
    logits = torch.randn(len(rows), size, generator=torch.Generator().manual_seed(0)) * 2
    logits[:, 30] = logits[:, 20]  # ties, too
    return logits, rows


def check_rows_do_not_depend_on_neighbours(sampler):
    """Alone, in any company and in any order: the same token, and the same log-probabilities."""
    logits, rows = a_batch()
    alone = [sampler(logits[i : i + 1], rows[i : i + 1]) for i in range(len(rows))]
    rng = random.Random(0)
    everybody = list(range(len(rows)))
    groups = [everybody, everybody[::-1], rng.sample(everybody, 20), [4] * 5]
    groups += [[i, other] for i in (0, 4, 7) for other in range(len(KINDS))]
    for group in groups:
        got = sampler(logits[group], [rows[i] for i in group])
        assert len(got.logprobs) == len(group)
        for i, token, entries in zip(group, got.token_ids, got.logprobs, strict=True):
            assert [token] == alone[i].token_ids, (i, group)
            assert [entries] == alone[i].logprobs, (i, group)


def check_logits_are_not_changed(sampler):
    """They may be a view of the model's buffers."""
    logits, rows = a_batch(copies=1)
    before = logits.clone()
    sampler(logits, rows)
    assert torch.equal(logits, before)


# -- what a draw depends on -----------------------------------------------------------------------------------------

FLAT = torch.zeros(1, 5000)


def drawn(sampler, **place) -> int:
    return sampler(FLAT, [row(max_tokens=None, **place)]).token_ids[0]


def check_a_draw_repeats(sampler):
    places = [dict(seed=s, sample=i, output=[0] * n) for s in (0, 2**63, 2**64 - 1) for i in (0, 2) for n in (0, 9)]
    first = [drawn(sampler, **place) for place in places]
    assert [drawn(sampler, **place) for place in places[::-1]] == first[::-1]


def mostly_different(tokens) -> bool:
    """Forty draws from 5,000 tokens: a pair of equals is likely enough, three pairs are not."""
    return len(set(tokens)) >= len(tokens) - 2


def check_seeds_differ(sampler):
    assert mostly_different([drawn(sampler, seed=seed) for seed in range(40)])


def check_samples_differ(sampler):
    """The n samples of a prompt share a seed."""
    assert mostly_different([drawn(sampler, seed=1, sample=i) for i in range(40)])


def check_positions_differ(sampler):
    assert mostly_different([drawn(sampler, seed=1, output=[7] * n) for n in range(40)])


def check_only_the_number_of_output_tokens_counts(sampler):
    """Not which they are, and not the prompt: a chunked, cached or resumed prompt may be described otherwise."""
    tokens = {
        drawn(sampler, seed=5, prompt=prompt, output=output)
        for prompt in ([], [1], [1, 2, 3])
        for output in ([1, 2, 3], [7, 7, 7])
    }
    assert len(tokens) == 1


CHECKS = [
    check_greedy_takes_the_lowest_of_equals,
    check_equal_in_bfloat16,
    check_rows_do_not_depend_on_neighbours,
    check_logits_are_not_changed,
    check_a_draw_repeats,
    check_seeds_differ,
    check_samples_differ,
    check_positions_differ,
    check_only_the_number_of_output_tokens_counts,
]


@pytest.mark.parametrize("check", CHECKS)
def test_sampler(check):
    check(Sampler())


@pytest.mark.parametrize("check", CHECKS)
def test_assembled_parts_are_the_sampler(check):
    """The wrong versions below differ from this one by a single part."""
    check(wrong.assemble())


def in_place(logits, rows):
    if logits.dtype == torch.float32:
        logits[:, 0] += 1.0
    return Sampler()(logits, rows)


def in_bfloat16(logits, rows):
    return Sampler()(logits.to(torch.bfloat16), rows)


def greedy_if_the_first_is(logits, rows):
    """One decision for the whole batch."""
    if rows[0].params.greedy:
        rows = [row(temperature=0, seed=r.seed) for r in rows]
    return Sampler()(logits, rows)


def position_in_batch(logits, rows):
    numbers = iter(range(len(rows)))
    return wrong.assemble(number=lambda r: wrong.uniform(r.seed, r.sample_index, next(numbers)))(logits, rows)


def numbered(place):
    return wrong.assemble(number=lambda r: wrong.uniform(*place(r)))


WRONG = {
    "last of equals": (
        wrong.assemble(best=wrong.last_of_equals),
        [check_greedy_takes_the_lowest_of_equals, check_equal_in_bfloat16],
    ),
    "compares in bfloat16": (in_bfloat16, [check_equal_in_bfloat16]),
    "one global generator": (
        wrong.assemble(number=wrong.GlobalGenerator()),
        [check_rows_do_not_depend_on_neighbours, check_a_draw_repeats, check_only_the_number_of_output_tokens_counts],
    ),
    "the first row's parameters": (
        wrong.assemble(chances=wrong.first_rows_parameters),
        [check_rows_do_not_depend_on_neighbours],
    ),
    "greedy if the first row is": (greedy_if_the_first_is, [check_rows_do_not_depend_on_neighbours]),
    "row of the batch as position": (position_in_batch, [check_rows_do_not_depend_on_neighbours]),
    "as many log-probabilities as the neighbour": (
        wrong.assemble(report=wrong.report_one_length),
        [check_rows_do_not_depend_on_neighbours],
    ),
    "logits changed in place": (in_place, [check_logits_are_not_changed]),
    "seed ignored": (numbered(lambda r: (0, r.sample_index, len(r.output_token_ids))), [check_seeds_differ]),
    "sample index ignored": (numbered(lambda r: (r.seed, 0, len(r.output_token_ids))), [check_samples_differ]),
    "position ignored": (numbered(lambda r: (r.seed, r.sample_index, 0)), [check_positions_differ]),
    "prompt counted in the position": (
        numbered(lambda r: (r.seed, r.sample_index, len(r.prompt_token_ids) + len(r.output_token_ids))),
        [check_only_the_number_of_output_tokens_counts],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_sampler_is_noticed(name):
    version, checks = WRONG[name]
    for check in checks:
        with pytest.raises(AssertionError):
            check(version)


def test_every_check_refuses_something():
    assert {check for _, checks in WRONG.values() for check in checks} == set(CHECKS)


def test_no_rows():
    got = Sampler()(torch.zeros(0, 5), [])
    assert (got.token_ids, got.logprobs) == ([], [])
