"""Which tokens sampling keeps, and how often each comes: against plain float64 arithmetic."""

import math
import random

import numpy as np
import pytest
import torch

from minillm.compute.sampling.processors import probabilities
from minillm.compute.sampling.sampler import Sampler
from minillm.core.sampling_params import SamplingParams
from tests.compute.sampling import wrong
from tests.compute.sampling.reference import assert_distributed, expected_probabilities, log, row

DRAWS = 1200
# Out of order, with a tie, and no cut below falls near a rounding error.
LOGITS = [0.3, 2.0, -1.0, 1.2, 1.2, 0.0, -4.0, 1.7, -0.4, 0.9]

PARAMS = {
    "plain": dict(),
    "cold": dict(temperature=0.5),
    "hot": dict(temperature=2.0),
    "top-k": dict(top_k=4),
    "top-k at a tie": dict(top_k=3),
    "top-k of 1": dict(top_k=1, temperature=2.0),
    "top-k above the vocabulary": dict(top_k=99),
    "top-p": dict(top_p=0.7),
    "min-p": dict(min_p=0.3),
    "cold top-p": dict(temperature=0.5, top_p=0.7),
    "hot top-p": dict(temperature=2.0, top_p=0.6),
    "hot min-p": dict(temperature=2.0, min_p=0.4),
    "top-k then top-p": dict(top_k=4, top_p=0.75),
    "min-p then top-p": dict(min_p=0.3, top_p=0.8),
    "hot all": dict(temperature=1.5, top_k=6, top_p=0.8, min_p=0.2),
}


def check_frequencies(name):
    """Thousands of draws, by seed and by output position."""

    def check(sampler):
        params = SamplingParams(max_tokens=None, **PARAMS[name])
        rows = [row(params, seed=i) for i in range(DRAWS // 2)]
        rows += [row(params, seed=11, output=[0] * i) for i in range(DRAWS // 2)]
        logits = torch.tensor([LOGITS]).repeat(len(rows), 1)
        assert_distributed(sampler(logits, rows).token_ids, expected_probabilities(LOGITS, params))

    return check


def kept(sampler, logits: torch.Tensor, **params) -> set[int]:
    """The tokens that turn up in 300 draws: all that have a few per cent."""
    rows = [row(SamplingParams(**params), seed=i) for i in range(300)]
    return set(sampler(logits.repeat(len(rows), 1), rows).token_ids)


def check_top_k_keeps_exactly_k(sampler):
    """Of equals, those of lower id."""
    flat = torch.zeros(1, 9)
    for k in (1, 2, 5, 8):
        assert kept(sampler, flat, top_k=k) == set(range(k))
    stairs = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 3.0]])
    for k, ids in {1: {5}, 2: {5, 1}, 3: {5, 1, 3}, 4: {5, 1, 3, 0}, 5: {5, 1, 3, 0, 2}}.items():
        assert kept(sampler, stairs, top_k=k) == ids
        assert kept(sampler, stairs.to(torch.bfloat16), top_k=k) == ids


def check_top_p_keeps_the_fewest(sampler):
    """As many as reach top_p and no more; 0.5 + 0.3 reaches 0.8, whatever float32 makes of it."""
    half, tenths, seventy = log([[0.2, 0.5, 0.3]]), log([[0.1, 0.2, 0.3, 0.4]]), log([[0.2, 0.1, 0.7]])
    for top_p, ids in {0.3: {1}, 0.5: {1}, 0.51: {1, 2}, 0.8: {1, 2}, 0.81: {0, 1, 2}, 0.999: {0, 1, 2}}.items():
        assert kept(sampler, half, top_p=top_p) == ids, top_p
    for top_p, ids in {0.4: {3}, 0.7: {3, 2}, 0.71: {3, 2, 1}, 0.9: {3, 2, 1}, 0.91: {3, 2, 1, 0}}.items():
        assert kept(sampler, tenths, top_p=top_p) == ids, top_p
    for top_p, ids in {0.7: {2}, 0.71: {2, 0}, 0.9: {2, 0}, 0.91: {2, 0, 1}}.items():
        assert kept(sampler, seventy, top_p=top_p) == ids, top_p


def check_a_tiny_top_p_keeps_one(sampler):
    for top_p in (1e-300, 1e-9, 1e-3):
        assert kept(sampler, log([[0.2, 0.5, 0.3]]), top_p=top_p) == {1}
        assert kept(sampler, torch.zeros(1, 50), top_p=top_p) == {0}


def check_top_p_among_equals(sampler):
    """The lower ids stay, and no more of them than needed."""
    for top_p, count in {0.25: 1, 0.26: 2, 0.5: 2, 0.75: 3, 0.76: 4}.items():
        assert kept(sampler, torch.zeros(1, 4), top_p=top_p) == set(range(count)), top_p


def check_min_p_is_relative(sampler):
    """At least min_p times the most likely one, which always stays."""
    assert kept(sampler, torch.zeros(1, 20), min_p=0.9) == set(range(20)), "none is 0.9 likely, but all are alike"
    chances = log([[0.15, 0.5, 0.05, 0.3]])
    for min_p, ids in {0.1: {0, 1, 2, 3}, 0.11: {0, 1, 3}, 0.3: {0, 1, 3}, 0.6: {1, 3}, 0.61: {1}, 1.0: {1}}.items():
        assert kept(sampler, chances, min_p=min_p) == ids, min_p
        assert kept(sampler, chances.double(), min_p=min_p) == ids, min_p


def check_a_masked_token_is_never_drawn(sampler):
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.5, -math.inf]])
    for params in (dict(), dict(top_k=4), dict(top_p=0.9999), dict(temperature=100.0), dict(min_p=0.0, top_k=5)):
        assert kept(sampler, logits, **params) == {1, 3}


def check_tiny_temperatures(sampler):
    """Down to where a division overflows: the most likely token, and of equals any."""
    for temperature in (1e-3, 1e-20, 1e-38, 1e-44, 1e-300):
        assert kept(sampler, torch.tensor([[1.0, 30.0, 29.0, -5.0]]), temperature=temperature) == {1}
        assert kept(sampler, torch.tensor([[30.0, 1.0, 30.0]]), temperature=temperature) == {0, 2}


FREQUENCIES = {name: check_frequencies(name) for name in PARAMS}
CHECKS = {
    check.__name__: check
    for check in (
        check_top_k_keeps_exactly_k,
        check_top_p_keeps_the_fewest,
        check_a_tiny_top_p_keeps_one,
        check_top_p_among_equals,
        check_min_p_is_relative,
        check_a_masked_token_is_never_drawn,
        check_tiny_temperatures,
    )
} | FREQUENCIES


@pytest.mark.parametrize("name", CHECKS)
def test_sampler(name):
    CHECKS[name](Sampler())


def cut(*order, **more):
    # Without draw's own guard against rows that keep no token.
    return wrong.assemble(chances=wrong.cut(order, **more), pick=wrong.draw_clamped)


def by(kept):
    return wrong.assemble(chances=wrong.top_p_by(kept), pick=wrong.draw_clamped)


RIGHT = ("temperature", "min_p", "top_k", "top_p")


@pytest.mark.parametrize(
    "name", ["hot all", "top-k at a tie", "check_top_p_keeps_the_fewest", "check_min_p_is_relative"]
)
def test_the_right_parts_in_the_right_order_pass(name):
    """So what the wrong versions below fail for is the one thing they change."""
    CHECKS[name](wrong.assemble())
    CHECKS[name](cut(*RIGHT))


def inverted(logit, p):
    return (logit * p.temperature).softmax(-1)


def zero_now_and_then(chances, draws):
    return [0 if u < 0.05 else token for u, token in zip(draws, wrong.draw(chances, draws), strict=True)]


WRONG = {
    "temperature ignored": (cut("min_p", "top_k", "top_p"), ["cold", "hot", "hot all", "cold top-p"]),
    "temperature after the cuts": (
        cut("min_p", "top_k", "top_p", "temperature"),
        ["cold top-p", "hot top-p", "hot min-p", "hot all"],
    ),
    "temperature inverted": (wrong.assemble(chances=wrong.row_by_row(inverted)), ["cold", "hot"]),
    "temperature overflows": (cut(*RIGHT), ["check_tiny_temperatures"]),
    "top-k ignored": (cut("temperature", "min_p", "top_p"), ["top-k", "top-k of 1", "check_top_k_keeps_exactly_k"]),
    "top-k keeps all ties": (cut(*RIGHT, ties=True), ["top-k at a tie", "check_top_k_keeps_exactly_k"]),
    "top-p keeps all ties": (cut(*RIGHT, ties=True), ["check_top_p_among_equals"]),
    "higher ids first": (
        wrong.assemble(chances=wrong.order_by_last),
        ["top-k at a tie", "check_top_k_keeps_exactly_k", "check_top_p_among_equals"],
    ),
    "top-p ignored": (
        cut("temperature", "min_p", "top_k"),
        ["top-p", "top-k then top-p", "check_top_p_keeps_the_fewest"],
    ),
    "top-p before top-k": (cut("temperature", "min_p", "top_p", "top_k"), ["top-k then top-p"]),
    "top-p before min-p": (cut("temperature", "top_k", "top_p", "min_p"), ["min-p then top-p"]),
    "top-p drops the token that crosses": (
        by(lambda sums, p: max(1, int((sums <= p + 1e-6).sum()))),
        ["top-p", "check_top_p_keeps_the_fewest"],
    ),
    "top-p keeps one more": (
        by(lambda sums, p: int((sums < p - 1e-6).sum()) + 2),
        ["top-p", "check_top_p_keeps_the_fewest", "check_a_tiny_top_p_keeps_one", "check_top_p_among_equals"],
    ),
    "top-p may keep none": (by(lambda sums, p: int((sums <= p).sum())), ["check_a_tiny_top_p_keeps_one"]),
    "top-p without room for rounding": (
        by(lambda sums, p: int((sums.double() < p).sum()) + 1),
        ["check_top_p_keeps_the_fewest"],
    ),
    "min-p ignored": (cut("temperature", "top_k", "top_p"), ["min-p", "hot min-p", "check_min_p_is_relative"]),
    "min-p absolute": (
        cut("temperature", "min_p_absolute", "top_k", "top_p"),
        ["min-p", "check_min_p_is_relative"],
    ),
    "last token never drawn": (wrong.assemble(pick=wrong.draw_short), ["hot"]),
    "probability zero drawn": (
        wrong.assemble(pick=zero_now_and_then),
        ["check_a_masked_token_is_never_drawn", "cold top-p"],
    ),
    "seed ignored": (wrong.assemble(number=lambda r: wrong.uniform(0, 0, len(r.output_token_ids))), ["plain", "hot"]),
    "position ignored": (wrong.assemble(number=lambda r: wrong.uniform(r.seed, r.sample_index, 0)), ["plain", "hot"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_sampler_is_noticed(name):
    version, checks = WRONG[name]
    for check in checks:
        with pytest.raises(AssertionError):
            CHECKS[check](version)


def test_every_check_refuses_something():
    refused = {check for _, checks in WRONG.values() for check in checks}
    assert CHECKS.keys() - refused == {"top-k above the vocabulary"}, "which cuts nothing"


# -- probabilities themselves, exactly ------------------------------------------------------------------------------


def random_rows():
    """A batch of every combination: rows that cut nothing sit beside rows that do."""
    rng = random.Random(1)
    rows, logits = [], []
    for _ in range(200):
        params = SamplingParams(
            temperature=rng.choice([0.3, 1.0, 1.7]),
            top_k=rng.choice([0, -1, 1, 3, 10, 40]),
            top_p=rng.choice([1.0, 0.9, 0.37]),
            min_p=rng.choice([0.0, 0.02, 0.4]),
        )
        rows.append(row(params))
        logits.append([rng.choice([rng.gauss(0, 2), rng.randrange(3)]) for _ in range(30)])
    return logits, rows


def check_a_batch_of_every_combination(probabilities, dtype=torch.float32, tolerance=1e-5):
    values, rows = random_rows()
    logits = torch.tensor(values, dtype=dtype)
    got = probabilities(logits, rows)
    assert got.dtype == dtype
    for ours, exact, r in zip(got.tolist(), logits.tolist(), rows, strict=True):
        expected = expected_probabilities(exact, r.params)
        assert [p > 0 for p in ours] == [p > 0 for p in expected], r.params
        assert max(abs(a - b) for a, b in zip(ours, expected, strict=True)) < tolerance, r.params


def check_float64(probabilities):
    check_a_batch_of_every_combination(probabilities, torch.float64, 1e-12)


def check_a_large_nearly_uniform_vocabulary(probabilities):
    """Where a running sum in low precision drifts by whole tokens."""
    noise = np.random.default_rng(0).normal(0, 1e-3, 50_000).astype(np.float32)
    weights = np.exp(np.sort(noise.astype(np.float64))[::-1])
    sums = np.cumsum(weights) / math.fsum(weights)
    rows = [row(top_p=top_p) for top_p in (0.1, 0.5, 0.9, 0.999)]
    got = probabilities(torch.from_numpy(noise).repeat(len(rows), 1), rows)
    for chances, r in zip(got, rows, strict=True):
        exact = int((sums < r.params.top_p).sum()) + 1
        assert abs(int((chances > 0).sum()) - exact) <= 1
        assert abs(chances.double().sum().item() - 1) < 1e-5


def check_top_p_of_1_keeps_the_whole_tail(probabilities):
    """Beside a row that cuts. The running sum reaches 1 by rounding long before the tail ends."""
    logits = torch.cat([torch.tensor([20.0]), torch.zeros(999)])[None].repeat(2, 1)
    cutting, whole = probabilities(logits, [row(top_p=0.5), row(top_p=1.0)])
    assert (cutting > 0).sum() == 1
    assert (whole > 0).all()
    assert torch.equal(whole, probabilities(logits[:1], [row()])[0]), "and changes no bit of it"


def check_logits_are_not_changed(probabilities):
    logits = torch.tensor([LOGITS])
    before = logits.clone()
    probabilities(logits, [row(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1)])
    assert torch.equal(logits, before)


def check_a_vocabulary_of_one(probabilities):
    assert probabilities(torch.tensor([[3.0]]), [row(top_k=1, top_p=0.1, min_p=1.0)]).tolist() == [[1.0]]


EXACT = [
    check_a_batch_of_every_combination,
    check_float64,
    check_a_large_nearly_uniform_vocabulary,
    check_top_p_of_1_keeps_the_whole_tail,
    check_logits_are_not_changed,
    check_a_vocabulary_of_one,
]


@pytest.mark.parametrize("check", EXACT)
def test_probabilities(check):
    check(probabilities)


def in_place(logits, rows):
    logits /= torch.tensor([[r.params.temperature] for r in rows])
    return probabilities(logits, rows)


def in_float32(logits, rows):
    return probabilities(logits.float(), rows).to(logits.dtype)


WRONG_EXACT = {
    "the first row's parameters for all": (wrong.first_rows_parameters, [check_a_batch_of_every_combination]),
    "float32 throughout": (in_float32, [check_float64]),
    "running sum in bfloat16": (
        wrong.top_p_by(lambda sums, p: int((sums.diff(prepend=sums.new_zeros(1)).bfloat16().cumsum(-1) < p).sum()) + 1),
        [check_a_large_nearly_uniform_vocabulary],
    ),
    "top-p of 1 cuts at 1 - 1e-6": (
        wrong.top_p_by(lambda sums, p: int((sums < p - 1e-6).sum()) + 1),
        [check_top_p_of_1_keeps_the_whole_tail],
    ),
    "logits changed in place": (in_place, [check_logits_are_not_changed]),
    "the most likely one may go": (
        wrong.top_p_by(lambda sums, p: int((sums < p).sum())),
        [check_a_vocabulary_of_one],
    ),
}


@pytest.mark.parametrize("name", WRONG_EXACT)
def test_wrong_probabilities_are_noticed(name):
    version, checks = WRONG_EXACT[name]
    for check in checks:
        with pytest.raises(AssertionError):
            check(version)


def test_every_exact_check_refuses_something():
    assert {check for _, checks in WRONG_EXACT.values() for check in checks} == set(EXACT)
