"""The uniform numbers. Each property is a check that also runs on wrong generators, which it must refuse."""

import functools
import itertools
import random

import numpy as np
import pytest

from minillm.compute.sampling.draws import ACCEPT, DRAFT, RESAMPLE, SAMPLE, uniform
from tests.compute.sampling.reference import critical_value

PURPOSES = (SAMPLE, ACCEPT, RESAMPLE, DRAFT)
MANY = 2000


@functools.cache
def streams(draw) -> dict[str, np.ndarray]:
    """Many numbers along each of the things that a draw depends on."""
    return {
        "position": np.array([draw(7, 0, i, SAMPLE) for i in range(MANY)]),
        "seed": np.array([draw(i, 0, 0, SAMPLE) for i in range(MANY)]),
        "sample": np.array([draw(7, i, 5, SAMPLE) for i in range(MANY)]),
    }


def check_range(draw):
    for name, numbers in streams(draw).items():
        assert numbers.min() >= 0 and numbers.max() < 1, name
        assert len(set(numbers)) == MANY, f"{name}: 53 random bits do not repeat so soon"


def check_pure(draw):
    places = list(itertools.product((0, 2**64 - 1), (0, 3), (0, 100_000), PURPOSES))
    first = [draw(*place) for place in places]
    shuffled = random.Random(0).sample(range(len(places)), len(places))
    again = {i: draw(*places[i]) for i in shuffled}
    assert first == [again[i] for i in range(len(places))], "the order of asking matters"


def check_all_arguments_matter(draw):
    grid = list(itertools.product(range(5), range(5), range(5), PURPOSES))
    assert len({draw(*place) for place in grid}) == len(grid)


def check_large_seeds(draw):
    seeds = [0, 2**31, 2**32, 2**63, 2**63 + 1, 2**64 - 1]
    assert len({draw(seed, 0, 0, SAMPLE) for seed in seeds}) == len(seeds)


def check_mean_and_variance(draw):
    for name, numbers in streams(draw).items():
        # Four standard errors of a uniform number's mean, and of its mean square deviation (variance 1/180).
        assert abs(numbers.mean() - 1 / 2) < 4 * (1 / 12 / MANY) ** 0.5, name
        assert abs(((numbers - 1 / 2) ** 2).mean() - 1 / 12) < 4 * (1 / 180 / MANY) ** 0.5, name


def check_uniform(draw):
    for name, numbers in streams(draw).items():
        seen = np.histogram(numbers, bins=20, range=(0, 1))[0]
        statistic = ((seen - MANY / 20) ** 2 / (MANY / 20)).sum()
        assert statistic < critical_value(19), name
        # Too even is not random either: below the chi-square's lower tail.
        assert statistic > 3, name


def check_neighbours_do_not_correlate(draw):
    for name, numbers in streams(draw).items():
        for lag in (1, 2, 3):
            r = np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]
            assert abs(r) < 4 / MANY**0.5, (name, lag)
        # Correlation can vanish where dependence does not: pairs fill the square evenly too.
        pairs = np.histogram2d(numbers[:-1:2], numbers[1::2], bins=6, range=[(0, 1), (0, 1)])[0]
        expected = MANY / 2 / 36
        assert ((pairs - expected) ** 2 / expected).sum() < critical_value(35), name


def check_purposes_do_not_correlate(draw):
    by_purpose = [np.array([draw(1, 0, i, purpose) for i in range(1000)]) for purpose in PURPOSES]
    for one, two in itertools.combinations(by_purpose, 2):
        assert abs(np.corrcoef(one, two)[0, 1]) < 4 / 1000**0.5


CHECKS = [
    check_range,
    check_pure,
    check_all_arguments_matter,
    check_large_seeds,
    check_mean_and_variance,
    check_uniform,
    check_neighbours_do_not_correlate,
    check_purposes_do_not_correlate,
]


@pytest.mark.parametrize("check", CHECKS)
def test_uniform(check):
    check(uniform)


def global_generator():
    generator = random.Random(0)
    return lambda *_: generator.random()


def golden_ratio(seed, sample, position, purpose):
    """Equally spread, but a number follows from the one before it."""
    return (0.618033988749895 * position + 0.414213562373095 * seed + 0.732050807568877 * sample + purpose / 7) % 1


def three_terms(seed, sample, position, purpose):
    return random.Random(seed + 1000 * sample + position + purpose / 10).random()


WRONG = {
    "one global generator": (global_generator, [check_pure]),
    "seed ignored": (lambda: lambda s, i, p, use: uniform(0, i, p, use), [check_all_arguments_matter, check_range]),
    "sample index ignored": (lambda: lambda s, i, p, use: uniform(s, 0, p, use), [check_all_arguments_matter]),
    "position ignored": (lambda: lambda s, i, p, use: uniform(s, i, 0, use), [check_all_arguments_matter]),
    "purpose ignored": (
        lambda: lambda s, i, p, use: uniform(s, i, p, 0),
        [check_all_arguments_matter, check_purposes_do_not_correlate],
    ),
    "seed and position added": (lambda: three_terms, [check_all_arguments_matter]),
    "seed cut to 32 bits": (lambda: lambda s, i, p, use: uniform(s % 2**32, i, p, use), [check_large_seeds]),
    "a lattice": (lambda: golden_ratio, [check_neighbours_do_not_correlate, check_uniform]),
    "half the range": (lambda: lambda *place: uniform(*place) / 2, [check_mean_and_variance, check_uniform]),
    "squeezed": (lambda: lambda *place: uniform(*place) ** 1.1, [check_mean_and_variance]),
    "from -1": (lambda: lambda *place: 2 * uniform(*place) - 1, [check_range]),
    "one at the end": (lambda: lambda *place: round(uniform(*place), 3), [check_range]),
    "purposes mirrored": (
        lambda: lambda s, i, p, use: uniform(s, i, p) if use == 0 else 1 - uniform(s, i, p) + use * 1e-12,
        [check_purposes_do_not_correlate],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_generator_is_noticed(name):
    make, checks = WRONG[name]
    for check in checks:
        with pytest.raises(AssertionError):
            check(make())


def test_every_check_refuses_something():
    assert {check for _, checks in WRONG.values() for check in checks} == set(CHECKS)


def test_a_seed_draws_the_same_in_every_version():
    """A seed that someone noted down is a promise: another generator breaks it, and every stored output with it."""
    drawn = [uniform(0, 0, 0), uniform(42, 1, 2, ACCEPT), uniform(2**64 - 1, 0, 1)]
    assert drawn == [0.011546754286331562, 0.2644795445746845, 0.7732437294502089]
