"""The online softmax against softmax in float64: any order, any split, nothing seen yet, huge scores."""

import math
import random

import pytest
import torch

from minillm.compute.attention.online import empty_state, finish_state, merge_states, online_softmax_update

ROWS, KEYS, DIM = 3, 40, 5


def scores_and_values(keys=KEYS, seed=0, masked=0.3, factor=3.0):
    """float64 scores [ROWS, keys], some of them −∞, and values [keys, DIM]. The last row is masked throughout."""
    generator = torch.Generator().manual_seed(seed)
    scores = factor * torch.randn(ROWS, keys, generator=generator, dtype=torch.float64)
    scores[torch.rand(ROWS, keys, generator=generator) < masked] = -math.inf
    scores[-1] = -math.inf
    return scores, torch.randn(keys, DIM, generator=generator, dtype=torch.float64)


def whole(scores, values):
    """softmax(scores) values and logsumexp, by torch; a row that sees nothing is 0 and −∞."""
    return scores.softmax(-1).nan_to_num(0.0) @ values, scores.logsumexp(-1)


def nothing_seen(dtype=torch.float64):
    return empty_state(torch.ones(ROWS, DIM, dtype=dtype))


def cut(rng: random.Random, keys: int) -> list[list[int]]:
    """The keys in random order, cut into 1 to 6 blocks."""
    order = rng.sample(range(keys), keys)
    places = sorted(rng.sample(range(1, keys), rng.randrange(6)))
    return [order[a:b] for a, b in zip([0, *places], [*places, keys], strict=True)]


def by_updates(scores, values, blocks, update=online_softmax_update):
    state = nothing_seen()
    for block in blocks:
        state = update(*state, scores[:, block], values[block])
    return state


def by_merges(scores, values, blocks, rng, merge=merge_states, update=online_softmax_update):
    """A state for each block, and two of them merged, at random, until one is left: any tree, any order."""
    states = [update(*nothing_seen(), scores[:, block], values[block]) for block in blocks]
    while len(states) > 1:
        a, b = (states.pop(rng.randrange(len(states))) for _ in range(2))
        states.append(merge(*a, *b))
    return states[0]


def assert_whole(state, scores, values, finish=finish_state):
    for got, want in zip(finish(*state), whole(scores, values), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def check_updates(update):
    rng = random.Random(0)
    for seed in range(100):
        scores, values = scores_and_values(seed=seed)
        assert_whole(by_updates(scores, values, cut(rng, KEYS), update), scores, values)


def check_merges(merge):
    rng = random.Random(1)
    for seed in range(100):
        scores, values = scores_and_values(seed=seed)
        assert_whole(by_merges(scores, values, cut(rng, KEYS), rng, merge), scores, values)
    a = by_updates(*scores_and_values(), [range(KEYS)])
    for state in (merge(*a, *nothing_seen()), merge(*nothing_seen(), *a)):
        assert all(torch.equal(x, y) for x, y in zip(state, a, strict=True)), "(−∞, 0, 0) is neutral"
    nothing = merge(*nothing_seen(), *nothing_seen())
    assert all(torch.equal(x, y) for x, y in zip(nothing, nothing_seen(), strict=True))


# -- what is right --------------------------------------------------------------------------------------------------


def test_updates_in_any_order_and_any_split():
    check_updates(online_softmax_update)


def test_merges_in_any_order_of_any_split():
    check_merges(merge_states)


def test_state_is_the_largest_score_and_two_sums():
    scores, values = scores_and_values()
    m, l, acc = by_updates(scores, values, [range(7), range(7, KEYS)])  # noqa: E741
    seen = slice(ROWS - 1)
    weights = (scores - scores.max(-1, keepdim=True).values).exp()[seen]
    torch.testing.assert_close(m, scores.max(-1).values, rtol=0, atol=0)
    torch.testing.assert_close(l[seen], weights.sum(-1), rtol=1e-12, atol=0)
    torch.testing.assert_close(acc[seen], weights @ values, rtol=1e-12, atol=1e-12)


def test_a_row_by_hand():
    """Weights 4, 1, 8, 2: l is 1, 1.25, then 1.625 because 8 is the new largest, then 15/8."""
    weights, values = [4.0, 1.0, 8.0, 2.0], [1.0, 0.0, 0.0, 1.0]
    state = tuple(x[:1] for x in nothing_seen())
    sums = []
    for weight, value in zip(weights, values, strict=True):
        score = torch.tensor([[math.log(weight)]], dtype=torch.float64)
        state = online_softmax_update(*state, score, torch.full((1, DIM), value, dtype=torch.float64))
        sums.append(state[1].item())
    assert sums == pytest.approx([1, 1.25, 1.625, 1.875], abs=1e-12)
    o, lse = finish_state(*state)
    assert o[0].tolist() == pytest.approx([6 / 15] * DIM, abs=1e-12)
    assert lse.item() == pytest.approx(math.log(15), abs=1e-12)


def test_masked_blocks_first_last_and_throughout():
    scores, values = scores_and_values(masked=0)
    scores[:, :8] = scores[:, -8:] = -math.inf
    blocks = [range(8), range(8, 20), range(20, KEYS - 8), range(KEYS - 8, KEYS)]
    state = by_updates(scores, values, blocks)
    assert_whole(state, scores, values)
    o, lse = finish_state(*state)
    assert not o[-1].any() and lse[-1] == -math.inf
    assert o.isfinite().all()


def test_a_state_that_has_seen_nothing():
    m, l, acc = nothing_seen()  # noqa: E741
    assert (m == -math.inf).all() and not l.any() and not acc.any()
    assert m.shape == l.shape == (ROWS,) and acc.shape == (ROWS, DIM)
    o, lse = finish_state(m, l, acc)
    assert torch.equal(o, torch.zeros(ROWS, DIM, dtype=torch.float64))
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("dtype, factor", [(torch.float32, 1e30), (torch.float64, 1e300), (torch.float64, 1000.0)])
def test_huge_scores_neither_overflow_nor_vanish(dtype, factor):
    scores, values = scores_and_values(factor=factor)
    scores, values = scores.to(dtype), values.to(dtype)
    rng = random.Random(2)
    want = whole(scores, values)
    for _ in range(20):
        state = nothing_seen(dtype)
        for block in cut(rng, KEYS):
            part = online_softmax_update(*nothing_seen(dtype), scores[:, block], values[block])
            state = merge_states(*state, *part)
        for got, expected in zip(finish_state(*state), want, strict=True):
            torch.testing.assert_close(got, expected)
            assert got[:-1].isfinite().all()


def test_low_precision_of_a_long_row_stays_close():
    """100 blocks in float32 lose no more than softmax itself does, a few times over."""
    scores, values = scores_and_values(keys=1000, masked=0)
    narrow_scores, narrow_values = scores.float(), values.float()
    state = nothing_seen(torch.float32)
    for start in range(0, 1000, 10):
        block = slice(start, start + 10)
        state = online_softmax_update(*state, narrow_scores[:, block], narrow_values[block])
    o, lse = finish_state(*state)
    want_o, want_lse = whole(narrow_scores.double(), narrow_values.double())
    torch.testing.assert_close(o.double(), want_o, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=0)


def test_merge_takes_any_shape_of_rows():
    """Heads and rows, as attention's partial results have them."""
    parts = []
    for seed in (0, 1):
        scores, values = scores_and_values(seed=seed)
        parts.append(by_updates(scores, values, [range(KEYS)]))
    flat = merge_states(*parts[0], *parts[1])
    folded = merge_states(*(x[None].expand(2, *x.shape) for part in parts for x in part))
    for x, y in zip(flat, folded, strict=True):
        assert torch.equal(x, y[1])


# -- what is wrong --------------------------------------------------------------------------------------------------


def no_rescale_of_acc(m, l, acc, scores, values):  # noqa: E741
    m_new, l_new, _ = online_softmax_update(m, l, acc, scores, values)
    base = torch.where(m_new == -math.inf, 0.0, m_new)
    return m_new, l_new, acc + torch.exp(scores - base[:, None]) @ values


def inverse_rescale(m, l, acc, scores, values):  # noqa: E741
    m_new, _, _ = online_softmax_update(m, l, acc, scores, values)
    base = torch.where(m_new == -math.inf, 0.0, m_new)
    rescale = torch.where(m == -math.inf, 0.0, torch.exp(base - m))
    p = torch.exp(scores - base[:, None])
    return m_new, l * rescale + p.sum(-1), acc * rescale[:, None] + p @ values


def nan_on_nothing(m, l, acc, scores, values):  # noqa: E741
    m_new = torch.maximum(m, scores.max(dim=-1).values)
    rescale, p = torch.exp(m - m_new), torch.exp(scores - m_new[:, None])
    return m_new, l * rescale + p.sum(-1), acc * rescale[:, None] + p @ values


def normalised_in_every_block(m, l, acc, scores, values):  # noqa: E741
    m, l, acc = online_softmax_update(m, l, acc, scores, values)  # noqa: E741
    return m, l, acc / torch.where(l == 0, 1.0, l)[:, None]


def largest_score_of_the_last_block(m, l, acc, scores, values):  # noqa: E741
    _, l_new, acc_new = online_softmax_update(m, l, acc, scores, values)
    return scores.max(dim=-1).values, l_new, acc_new


@pytest.mark.parametrize(
    "wrong",
    [no_rescale_of_acc, inverse_rescale, nan_on_nothing, normalised_in_every_block, largest_score_of_the_last_block],
)
def test_a_wrong_update_fails(wrong):
    with pytest.raises(AssertionError):
        check_updates(wrong)


def plain_sum(m_a, l_a, acc_a, m_b, l_b, acc_b):
    return torch.maximum(m_a, m_b), l_a + l_b, acc_a + acc_b


def nan_on_two_empty_halves(m_a, l_a, acc_a, m_b, l_b, acc_b):
    m = torch.maximum(m_a, m_b)
    scale_a, scale_b = torch.exp(m_a - m), torch.exp(m_b - m)
    return m, l_a * scale_a + l_b * scale_b, acc_a * scale_a[..., None] + acc_b * scale_b[..., None]


def one_sided(m_a, l_a, acc_a, m_b, l_b, acc_b):
    """Right only while the first state holds the larger score."""
    base = torch.where(m_a == -math.inf, 0.0, m_a)
    scale = torch.exp(m_b - base)
    return m_a, l_a + l_b * scale, acc_a + acc_b * scale[..., None]


def mean_of_outputs(m_a, l_a, acc_a, m_b, l_b, acc_b):
    m, l, _ = merge_states(m_a, l_a, acc_a, m_b, l_b, acc_b)  # noqa: E741
    o = (finish_state(m_a, l_a, acc_a)[0] + finish_state(m_b, l_b, acc_b)[0]) / 2
    return m, l, o * l[..., None]


@pytest.mark.parametrize("wrong", [plain_sum, nan_on_two_empty_halves, one_sided, mean_of_outputs])
def test_a_wrong_merge_fails(wrong):
    with pytest.raises(AssertionError):
        check_merges(wrong)


def test_a_wrong_end_fails():
    scores, values = scores_and_values()
    state = by_updates(scores, values, [range(KEYS)])
    for wrong in (
        lambda m, total, acc: (acc / total[:, None], finish_state(m, total, acc)[1]),  # 0 / 0 where nothing is seen
        lambda m, total, acc: (finish_state(m, total, acc)[0], torch.log(total)),  # without m
        lambda m, total, acc: (acc, finish_state(m, total, acc)[1]),  # not divided
    ):
        with pytest.raises(AssertionError):
            assert_whole(state, scores, values, wrong)
