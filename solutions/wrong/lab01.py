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


def _tiles(q, k, v, tile, rescale_acc=None, pad=False, divide=False):
    """Tiled attention of all queries at once, right unless one of the last three says otherwise."""
    m, l, acc = empty_state(q)  # noqa: E741
    for start in range(0, len(k), tile):
        scores = q @ k[start : start + tile].T * q.shape[1] ** -0.5
        values = v[start : start + tile]
        if pad:
            missing = tile - len(values)
            scores = torch.nn.functional.pad(scores, (0, missing))
            values = torch.nn.functional.pad(values, (0, 0, 0, missing))
        m_new = torch.maximum(m, scores.max(dim=1).values)
        rescale = torch.exp(m - m_new)
        p = torch.exp(scores - m_new[:, None])
        l = l * rescale + p.sum(dim=1)  # noqa: E741
        if rescale_acc:
            rescale = rescale_acc(m, m_new)
        acc = acc * rescale[:, None] + p @ values
        if divide:
            acc = acc / l[:, None]
        m = m_new
    return acc if divide else acc / l[:, None]


@mistake(
    **TILED, check="plain", says="acc is not rescaled when m grows. Rows whose largest score comes first look fine."
)
def no_rescale_of_acc(q, k, v, tile):
    return _tiles(q, k, v, tile, rescale_acc=lambda m, m_new: torch.ones_like(m))


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


def _causal(q, read, n_k, tile, offset=None, every=False, short=0):
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
        o[row : row + tile] = finish_state(*state)[0]
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


# -- 1.5 --------------------------------------------------------------------------------------------------------------


def _input(queries, keys):
    return torch.tensor(queries)[:, None], torch.ones(keys, 1), torch.arange(1.0, keys + 1)[:, None], 2


@mistake(**BREAK, says="no score is large: exp overflows in float32 only above 88, so the maximum was not needed.")
def nothing_is_large():
    return _input([0.0, 0.0], 3)


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
