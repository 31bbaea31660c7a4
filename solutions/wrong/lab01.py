"""Lab 01's classic mistakes, each a wrong version and the sentence for the learner who made it."""

import torch

from minillm.compute.attention.online import empty_state, finish_state, online_softmax_update
from minillm.course.checks import mistake

BY_HAND = {"exercise": "1.1", "name": "by_hand", "check": "by hand"}
MERGE = {"exercise": "1.2", "name": "merge"}
TILED = {"exercise": "1.3", "name": "tiled_forward"}
CAUSAL = {"exercise": "1.4", "name": "causal_forward", "check": "tiles"}
BREAK = {"exercise": "1.5", "name": "exposing_input", "check": "exposed"}
HEAD = {"exercise": "1.6", "name": "attend_head", "check": "engine"}


# -- 1.1 --------------------------------------------------------------------------------------------------------------


@mistake(**BY_HAND, says="l is never rescaled: what was counted in units of the old largest must change its unit.")
def forgets_to_rescale_by_hand():
    return {"first l": [1, 1.25, 2.25, 2.5], "first o": 6 / 15, "second l": [1, 2, 3, 3.25], "second o": 2.5}


@mistake(**BY_HAND, says="l is multiplied by new ÷ old largest. A larger unit makes the same sum smaller: old ÷ new.")
def rescales_the_wrong_way_by_hand():
    return {"first l": [1, 1.25, 3.5, 3.75], "first o": 6 / 15, "second l": [1, 3, 7, 7.25], "second o": 2.5}


@mistake(**BY_HAND, says="these are the plain sums of the weights. l counts in units of the largest so far.")
def sums_the_weights():
    return {"first l": [4, 5, 13, 15], "first o": 6 / 15, "second l": [1, 3, 7, 8], "second o": 2.5}


def _right_l(first_o, second_o):
    l = {"first l": [1, 1.25, 1.625, 1.875], "second l": [1, 1.5, 1.75, 2]}  # noqa: E741
    return l | {"first o": first_o, "second o": second_o}


@mistake(**BY_HAND, says="l is right, but o is acc over sums that were never rescaled: o is the plain weighted mean.")
def o_of_sums_never_rescaled():
    return _right_l(1.25 / 2.5, 7 / 3.25)


@mistake(**BY_HAND, says="l is right, but acc was never rescaled: it must go into the new unit together with l.")
def o_of_acc_never_rescaled():
    return _right_l(1.25 / 1.875, 7 / 2)


@mistake(**BY_HAND, says="this is acc. The output o is acc / l.")
def o_not_divided_by_l():
    return _right_l(6 / 8, 20 / 4)


@mistake(**BY_HAND, says="this is the sum of weight · value. The output o is that over the sum of the weights.")
def o_not_divided_by_the_weights():
    return _right_l(6, 20)


# -- 1.2 --------------------------------------------------------------------------------------------------------------


@mistake(**MERGE, check="plain", says="l is rescaled but acc is not: both are sums of exp(score − m).")
def merge_without_rescaling_acc(a, b):
    m = torch.maximum(a[0], b[0])
    return m, a[1] * torch.exp(a[0] - m) + b[1] * torch.exp(b[0] - m), a[2] + b[2]


@mistake(**MERGE, check="plain", says="the rescale is the inverse: the factor is exp(old m − new m), never above 1.")
def merge_with_inverse_rescale(a, b):
    m = torch.maximum(a[0], b[0])
    scale_a, scale_b = torch.exp(m - a[0]), torch.exp(m - b[0])
    return m, a[1] * scale_a + b[1] * scale_b, a[2] * scale_a[:, None] + b[2] * scale_b[:, None]


@mistake(
    **MERGE,
    check="edges",
    says="two empty halves give −∞ − (−∞), which is NaN. Where both m are −∞, subtract any finite number instead.",
)
def merge_of_two_empty_halves_is_nan(a, b):
    m = torch.maximum(a[0], b[0])
    scale_a, scale_b = torch.exp(a[0] - m), torch.exp(b[0] - m)
    return m, a[1] * scale_a + b[1] * scale_b, a[2] * scale_a[:, None] + b[2] * scale_b[:, None]


# -- 1.3 --------------------------------------------------------------------------------------------------------------


def _tiles(q, k, v, tile, rescale_acc=None, rescale_l=None, pad=False, divide=False, end=None, scale=None, over=None):
    """Tiled attention of all queries at once, right unless one of the last seven says otherwise."""
    m, l, acc = empty_state(q)  # noqa: E741
    for start in range(0, len(k) if end is None else end, tile):
        scores = q @ k[start : start + tile].T * (scale or q.shape[1] ** -0.5)
        values = v[start : start + tile]
        if pad:
            missing = tile - len(values)
            scores = torch.nn.functional.pad(scores, (0, missing))
            values = torch.nn.functional.pad(values, (0, 0, 0, missing))
        m_new = torch.maximum(m, scores.max(dim=1).values)
        rescale = torch.exp(m - m_new)
        p = torch.exp(scores - m_new[:, None])
        l = l * (rescale_l(m, m_new) if rescale_l else rescale) + p.sum(dim=1)  # noqa: E741
        if rescale_acc:
            rescale = rescale_acc(m, m_new)
        acc = acc * rescale[:, None] + p @ values / (over(p, l)[:, None] if over else 1)
        if divide:
            acc = acc / l[:, None]
        m = m_new
    return acc if divide or over else acc / l[:, None]


def _one(m, m_new):
    return torch.ones_like(m)


@mistake(
    **TILED, check="plain", says="acc is not rescaled when m grows. Rows whose largest score comes first look fine."
)
def no_rescale_of_acc(q, k, v, tile):
    return _tiles(q, k, v, tile, rescale_acc=_one)


@mistake(**TILED, check="plain", says="l is not rescaled when m grows, acc is: both are sums of exp(score − m).")
def no_rescale_of_l(q, k, v, tile):
    return _tiles(q, k, v, tile, rescale_l=_one)


@mistake(**TILED, check="plain", says="nothing is rescaled when m grows: multiply l and acc by exp(old m − new m).")
def no_rescale_at_all(q, k, v, tile):
    return _tiles(q, k, v, tile, rescale_acc=_one, rescale_l=_one)


@mistake(**TILED, check="plain", says="acc is rescaled the wrong way: the factor is exp(old m − new m), never above 1.")
def inverse_rescale(q, k, v, tile):
    return _tiles(q, k, v, tile, rescale_acc=lambda m, m_new: torch.where(m.isinf(), 1.0, torch.exp(m_new - m)))


@mistake(
    **TILED,
    check="plain",
    says="acc is divided by l in every tile, but the next tile adds to it as if it were a sum. Divide once at the end.",
)
def normalises_in_every_tile(q, k, v, tile):
    return _tiles(q, k, v, tile, divide=True)


def _l(q, k):
    scores = q @ k.T * q.shape[1] ** -0.5
    return torch.exp(scores - scores.max(dim=1).values[:, None]).sum(dim=1)[:, None]


@mistake(
    **TILED,
    check="plain",
    says="acc is divided by l in every tile and once more at the end. Tiles keep the sum; divide once, at the end.",
)
def normalises_in_every_tile_and_again(q, k, v, tile):
    return _tiles(q, k, v, tile, divide=True) / _l(q, k)


@mistake(
    **TILED,
    check="plain",
    says="each tile is a softmax of its own, so every tile weighs the same. Carry sums (m, l, acc), and divide once.",
)
def averages_tiles(q, k, v, tile):
    parts = [_tiles(q, k[j : j + tile], v[j : j + tile], tile) for j in range(0, len(k), tile)]
    return sum(parts) / len(parts)


@mistake(**TILED, check="plain", says="each tile is divided by its own sum, and the results are added. Divide once.")
def divides_each_tile_by_its_sum(q, k, v, tile):
    return _tiles(q, k, v, tile, over=lambda p, l: p.sum(dim=1))  # noqa: E741


@mistake(
    **TILED, check="plain", says="p is divided by the l of its moment, and l still grows. Divide once, at the end."
)
def divides_each_tile_by_l_so_far(q, k, v, tile):
    return _tiles(q, k, v, tile, over=lambda p, l: l)  # noqa: E741


@mistake(**TILED, check="plain", says="only the last tile is left: each one starts from an empty state of its own.")
def keeps_the_last_tile(q, k, v, tile):
    last = (len(k) - 1) // tile * tile
    return _tiles(q, k[last:], v[last:], tile)


@mistake(**TILED, check="plain", says="scores are q kᵀ, without the division by √d.")
def no_root_of_d(q, k, v, tile):
    return _tiles(q, k, v, tile, scale=1)


@mistake(**TILED, check="plain", says="scores are divided by d, not by √d.")
def d_without_the_root(q, k, v, tile):
    return _tiles(q, k, v, tile, scale=1 / q.shape[1])


@mistake(**TILED, check="plain", says="this is acc, never divided by l.")
def not_divided_by_l(q, k, v, tile):
    return _tiles(q, k, v, tile) * _l(q, k)


@mistake(**TILED, check="edges", says="the tail of keys is dropped: ⌊N_k / tile⌋ tiles leave N_k mod tile keys unread.")
def drops_the_tail(q, k, v, tile):
    return _tiles(q, k, v, tile, end=len(k) // tile * tile)


@mistake(**TILED, check="plain", says="all scores exist at once, N_q × N_k of them: that is what tiles are to avoid.")
def makes_the_whole_matrix(q, k, v, tile):
    return _tiles(q, k, v, len(k))


@mistake(
    **TILED,
    check="edges",
    says="the tail is padded with scores of 0, and exp(0) is weight like any other. Padding needs a score of −∞.",
)
def tail_padded_with_score_0(q, k, v, tile):
    return _tiles(q, k, v, tile, pad=True)


# -- 1.4 --------------------------------------------------------------------------------------------------------------


def _divide(m, l, acc):  # noqa: E741
    return acc / l[:, None], None


def _causal(q, read, n_k, tile, offset=None, every=False, short=0, finish=finish_state):
    o = torch.empty_like(q)
    for row in range(0, len(q), tile):
        part = q[row : row + tile]
        limits = torch.arange(row, row + len(part)) + (n_k - len(q) if offset is None else offset)
        state = empty_state(part)
        end = n_k if every else min(n_k, int(limits[-1]) + 1 - short)
        for start in range(0, end, tile):
            tile_k, tile_v = read(start // tile)
            keys = torch.arange(start, start + len(tile_k))
            scores = part @ tile_k.T * q.shape[1] ** -0.5
            scores = scores.masked_fill(keys > limits[:, None], float("-inf"))
            state = online_softmax_update(*state, scores, tile_v)
        o[row : row + tile] = finish(*state)[0]
    return o


@mistake(
    **CAUSAL,
    says="the mask is top left: query i sees keys 0 to i. With a cache the last query must see all keys: "
    "i + N_k − N_q (bottom right).",
)
def top_left_mask(q, read, n_k, tile):
    return _causal(q, read, n_k, tile, offset=0)


@mistake(
    **CAUSAL, says="every tile is read, and the mask throws away what was loaded for nothing. Stop the loop earlier."
)
def reads_every_tile(q, read, n_k, tile):
    return _causal(q, read, n_k, tile, every=True)


@mistake(
    **CAUSAL,
    says="the loop stops one key too early: a tile of which only its first key is seen is left out. "
    "Keys 0 to limit are limit + 1 keys.",
)
def stops_one_key_early(q, read, n_k, tile):
    return _causal(q, read, n_k, tile, short=1)


@mistake(
    **CAUSAL,
    says="the last tile is left out: range(limit // tile) stops before it. Tiles 0 to limit // tile are one more.",
)
def stops_one_tile_early(q, read, n_k, tile):
    return _causal(q, read, n_k, tile, short=tile)


@mistake(
    **CAUSAL,
    says="the last tile is left out (range(limit // tile) stops before it), and where none is left, l = 0 gives NaN.",
)
def stops_one_tile_early_and_divides_by_0(q, read, n_k, tile):
    return _causal(q, read, n_k, tile, short=tile, finish=_divide)


@mistake(
    **CAUSAL, says="a row that may see no key is divided by l = 0, which is NaN. Its output must be 0 (finish_state)."
)
def nan_for_rows_without_keys(q, read, n_k, tile):
    return _causal(q, read, n_k, tile, finish=_divide)


@mistake(
    **CAUSAL,
    says="a row that sees no key of a tile read has m = −∞, and −∞ − (−∞) is NaN. Subtract a finite number.",
)
def no_base_for_rows_without_keys(q, read, n_k, tile):
    o = _causal(q, read, n_k, tile)
    blind = torch.arange(len(q)) + n_k - len(q) < 0
    seeing = (~blind).split(tile)  # a tile of queries in which one row sees a key is read, so its blind rows are NaN
    read_for = torch.cat([part.any().expand(len(part)) for part in seeing])
    return o.masked_fill((blind & read_for)[:, None], float("nan"))


# -- 1.5 --------------------------------------------------------------------------------------------------------------


def _input(queries, keys):
    return torch.tensor(queries)[:, None], torch.ones(keys, 1), torch.arange(1.0, keys + 1)[:, None], 2


@mistake(**BREAK, says="no score is large: exp overflows in float32 only above 88, so the maximum was not needed.")
def nothing_is_large():
    return _input([0.0, 0.0], 3)


@mistake(**BREAK, says="this is not float32. In float64 exp overflows only above 709, and a switch may seem harmless.")
def in_float64():
    q, k, v, tile = _input([1000.0, 0.0], 3)
    return q.double(), k.double(), v.double(), tile


@mistake(**BREAK, says="N_q = N_k, where top left and bottom right are the same rule.")
def square():
    return _input([0.0, 100.0, 0.0], 3)


@mistake(**BREAK, says="N_k is a multiple of the tile: there is no tail that could be filled up.")
def whole_tiles():
    return _input([100.0, 0.0], 4)


@mistake(
    **BREAK, says="all scores are large, so a padded key of score 0 has no weight beside them. Make one row small."
)
def everything_is_large():
    return _input([100.0, 100.0], 3)


# -- 1.6 --------------------------------------------------------------------------------------------------------------


def _head(q, k, v, scale, limits):
    state = empty_state(q)
    for start in range(0, len(k), 16):
        scores = q @ k[start : start + 16].T * scale
        keys = torch.arange(start, min(start + 16, len(k)), device=q.device)
        scores = scores.masked_fill(keys > limits.to(q.device)[:, None], float("-inf"))
        state = online_softmax_update(*state, scores, v[start : start + 16])
    return finish_state(*state)[0]


@mistake(**HEAD, says="the mask is top left: prefill is right, but in decode the one query sees key 0 only.")
def top_left_in_the_engine(q, k, v, scale):
    return _head(q, k, v, scale, torch.arange(len(q)))


@mistake(**HEAD, says="there is no mask. In prefill a query must not see the tokens after it.")
def no_mask_in_the_engine(q, k, v, scale):
    return _head(q, k, v, scale, torch.full((len(q),), len(k)))


@mistake(**HEAD, says="scores are divided by √d, but the engine gives a scale of its own: a model may have another.")
def own_scale_in_the_engine(q, k, v, scale):
    return _head(q, k, v, q.shape[1] ** -0.5, torch.arange(len(q)) + len(k) - len(q))


@mistake(
    **HEAD,
    says="scores carry scale and 1/√d, both: causal_forward divides by √d itself, so hand it q · scale · √d.",
)
def scale_and_root_in_the_engine(q, k, v, scale):
    return _head(q, k, v, scale * q.shape[1] ** -0.5, torch.arange(len(q)) + len(k) - len(q))


@mistake(**HEAD, says="scores are q kᵀ without any scale: the engine hands one over.")
def no_scale_in_the_engine(q, k, v, scale):
    return _head(q, k, v, 1.0, torch.arange(len(q)) + len(k) - len(q))
