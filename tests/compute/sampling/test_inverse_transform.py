"""draw(): from probabilities and a uniform number to a token."""

import math
import random

import pytest
import torch

from minillm.compute.sampling.sampler import draw
from tests.compute.sampling import wrong

JUST_UNDER_1 = math.nextafter(1, 0)
EDGES = [0.0, 5e-324, 1e-300, 0.5, 1 - 1e-9, JUST_UNDER_1]


def check_probability_zero_is_never_drawn(draw):
    for chances in ([0, 0, 0.25, 0, 0.75, 0, 0], [0, 1, 0], [1, 0], [0, 1], [0.1] * 10 + [0]):
        table = torch.tensor([chances] * len(EDGES))
        for u, token in zip(EDGES, draw(table, EDGES), strict=True):
            assert 0 <= token < len(chances) and chances[token] > 0, (chances, u)


def check_the_ends_are_reached(draw):
    """u = 0 draws the first possible token, u just under 1 the last."""
    for chances in ([0, 0.25, 0.5, 0.25, 0], [1e-6, 1 - 2e-6, 1e-6], [0.125] * 8):
        possible = [i for i, chance in enumerate(chances) if chance]
        assert draw(torch.tensor([chances] * 2), [0.0, JUST_UNDER_1]) == [possible[0], possible[-1]]


def check_sums_that_miss_one(draw):
    """Probabilities of float32 or bfloat16 do not quite sum to 1; the shares of the tokens stay right all the same."""
    for scale in (0.5, 1 - 1e-6, 1 + 1e-6, 2.0):
        chances = torch.tensor([0, 0.25, 0.25, 0.5, 0]) * scale
        us = [0.0, 0.2499, 0.2501, 0.4999, 0.5001, 1 - 1e-7, JUST_UNDER_1]
        assert draw(chances.expand(len(us), -1), us) == [1, 1, 2, 2, 3, 3, 3]


def check_first_token_whose_sum_exceeds_u(draw):
    rng = random.Random(0)
    for size in (1, 2, 7, 300):
        weights = [rng.random() * rng.choice([0, 1, 1e-3]) for _ in range(size - 1)] + [1.0]
        chances = torch.tensor([weights], dtype=torch.float64) / sum(weights)
        us = [rng.random() for _ in range(100)]
        running, expected = chances[0].cumsum(0).tolist(), []
        for u in us:
            expected.append(next(i for i, total in enumerate(running) if total > u * running[-1]))
        assert draw(chances.expand(len(us), -1), us) == expected


def check_rows_are_their_own(draw):
    chances = torch.eye(5)[[3, 0, 4, 1]]
    assert draw(chances, [0.1, 0.9, 0.0, JUST_UNDER_1]) == [3, 0, 4, 1]


def check_a_large_vocabulary(draw):
    """50,000 equal tokens: a running sum in low precision stalls or overshoots."""
    size = 50_000
    chances = torch.full((1, size), 1 / size)
    us = [(i + 0.5) / size for i in (0, 1, 777, size // 2, size - 2, size - 1)]
    assert draw(chances.expand(len(us), -1), us) == [0, 1, 777, size // 2, size - 2, size - 1]


CHECKS = [
    check_probability_zero_is_never_drawn,
    check_the_ends_are_reached,
    check_sums_that_miss_one,
    check_first_token_whose_sum_exceeds_u,
    check_rows_are_their_own,
    check_a_large_vocabulary,
]


@pytest.mark.parametrize("check", CHECKS)
def test_draw(check):
    check(draw)


def draw_by_first_row(chances, draws):
    return draw(chances[:1].expand(len(draws), -1), draws)


def draw_in_half_precision(chances, draws):
    running = chances.to(torch.bfloat16).cumsum(-1).double()
    return torch.searchsorted(running, torch.tensor(draws).double()[:, None] * running[:, -1:])[:, 0].tolist()


WRONG = {
    "from the left": (wrong.draw_from_the_left, [check_probability_zero_is_never_drawn, check_the_ends_are_reached]),
    "u not scaled": (wrong.draw_unscaled, [check_sums_that_miss_one]),
    "u not scaled, id clamped": (wrong.draw_clamped, [check_sums_that_miss_one]),
    "u scaled short of 1": (wrong.draw_short, [check_the_ends_are_reached, check_first_token_whose_sum_exceeds_u]),
    "from the other end": (wrong.draw_backwards, [check_the_ends_are_reached, check_first_token_whose_sum_exceeds_u]),
    "everybody by the first row": (draw_by_first_row, [check_rows_are_their_own]),
    "sum in bfloat16": (draw_in_half_precision, [check_a_large_vocabulary]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_draw_is_noticed(name):
    version, checks = WRONG[name]
    for check in checks:
        with pytest.raises(AssertionError):
            check(version)


def test_every_check_refuses_something():
    assert {check for _, checks in WRONG.values() for check in checks} == set(CHECKS)


@pytest.mark.parametrize("bad", [[math.nan, 0.5], [math.nan] * 2, [math.inf, 0.0]])
def test_no_token_is_made_up_from_what_is_no_number(bad):
    with pytest.raises(ValueError, match="not numbers"):
        draw(torch.tensor([[0.5, 0.5], bad]), [0.5, 0.5])
