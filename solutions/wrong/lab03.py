"""Lab 03's classic mistakes, each a wrong version and the sentence for the learner who made it."""

from itertools import accumulate, pairwise

import torch

from minillm.course.checks import mistake

BY_HAND = {"exercise": "3.1", "name": "by_hand", "check": "by hand"}
SELECT = {"exercise": "3.2", "name": "select"}
FLATTEN = {"exercise": "3.3", "name": "flatten"}
UNFAIR = {"exercise": "3.4", "name": "first_violation"}
BREAK = {"exercise": "3.5", "name": "exposing_requests", "check": "exposed"}
JOIN = {"exercise": "3.6", "name": "let_join"}


# -- 3.1 --------------------------------------------------------------------------------------------------------------


def _by_hand(**changed):
    right = {
        "static ends": [5, 1, 7, 9, 12],
        "static passes": 12,
        "static utilisation": 15 / 24,
        "iteration ends": [5, 1, 3, 7, 8],
        "iteration passes": 8,
        "iteration utilisation": 15 / 16,
    }
    return right | {name.replace("_", " "): value for name, value in changed.items()}


@mistake(
    **BY_HAND, says="these are the passes in which whole batches end. A request has its last token when it has it."
)
def ends_with_its_batch():
    return _by_hand(static_ends=[5, 5, 9, 9, 12])


@mistake(**BY_HAND, says="passes are counted from 0 here. The first pass is pass 1.")
def counts_from_0():
    return _by_hand(static_ends=[4, 0, 6, 8, 11], iteration_ends=[4, 0, 2, 6, 7])


@mistake(
    **BY_HAND, says="that is mean/max of all five. They are three batches, each of which waits for its own longest."
)
def one_batch_of_five():
    return _by_hand(static_utilisation=3 / 5)


@mistake(**BY_HAND, says="a seat stays empty for a pass after each request. Who waits joins in the very next pass.")
def joins_a_pass_late():
    return _by_hand(iteration_ends=[5, 1, 4, 9, 9], iteration_passes=9, iteration_utilisation=15 / 18)


@mistake(**BY_HAND, says="E sits down after D here. It takes the seat that is free first: A's, after pass 5.")
def waits_for_the_wrong_seat():
    return _by_hand(iteration_ends=[5, 1, 3, 7, 10], iteration_passes=10, iteration_utilisation=15 / 20)


@mistake(**BY_HAND, says="seats that nobody waits for any more count as well: 8 passes have 16 seats.")
def leaves_out_the_last_seat():
    return _by_hand(iteration_utilisation=1.0)


@mistake(**BY_HAND, says="rounded too far. A fraction is exact: tokens / (seats · passes).")
def rounds_utilisation():
    return _by_hand(static_utilisation=0.62, iteration_utilisation=0.94)


@mistake(**BY_HAND, says="that is in percent. A share lies between 0 and 1: tokens / (seats · passes).")
def utilisation_in_percent():
    return _by_hand(static_utilisation=62.5, iteration_utilisation=93.75)


# -- 3.2 --------------------------------------------------------------------------------------------------------------


def _select(
    pool, n_rsrv, max_bs, n_slots, budget, order=None, running=False, go_on=False, again=False, slots_of=None,
    tokens_of=None, strict=0, strict_budget=0, spend=True, in_place=False, passes_over=None, taken=0,
):  # fmt: skip
    """Right unless one of the last arguments says otherwise."""
    batch, refused = [], None
    if in_place:
        pool.sort(key=lambda req: req.arrival)
    for req in sorted(pool, key=order or (lambda req: req.arrival)):
        if req.state == "RUNNING" and not running:
            continue
        first = req.state == "INITIATION"
        slots, tokens = (req.max_tokens if first or again else 0), (req.prompt if first else 1)
        slots = slots_of(req) if slots_of and first else slots
        tokens = tokens_of(req) if tokens_of else tokens
        full = len(batch) + taken >= max_bs or n_rsrv + slots > n_slots - strict or tokens > budget - strict_budget
        if full and (go_on or (passes_over and passes_over(req))):
            refused = req
            continue
        if refused and not go_on and first:
            continue
        if full:
            break
        batch.append(req.name)
        n_rsrv, budget = n_rsrv + slots, budget - (tokens if spend else 0)
    return batch, n_rsrv


@mistake(**SELECT, check="plain", says="requests are taken as they lie in the pool. Sort by arrival first (line 20).")
def does_not_sort(pool, *limits):
    return _select(pool, *limits, order=lambda req: 0)


@mistake(**SELECT, check="plain", says="one that has run reserves again. It holds its reservation already (line 23).")
def reserves_every_time(pool, *limits):
    return _select(pool, *limits, again=True)


@mistake(
    **SELECT, check="plain", says="the prompt's slots are reserved. Orca reserves max_tokens, the worst case (line 24)."
)
def reserves_the_prompt(pool, *limits):
    return _select(pool, *limits, slots_of=lambda req: req.prompt)


@mistake(
    **SELECT, check="plain", says="one that has run costs no token here. In decode it computes one, and that counts."
)
def decodes_for_nothing(pool, *limits):
    return _select(pool, *limits, tokens_of=lambda req: req.prompt if req.state == "INITIATION" else 0)


@mistake(**SELECT, check="edges", says="those that are RUNNING take seats here. max_bs is for the batch being chosen.")
def seats_for_the_running(pool, *limits):
    return _select(pool, *limits, taken=sum(req.state == "RUNNING" for req in pool))


@mistake(
    **SELECT, check="edges", says="those that have run go before those that have not. The order is by arrival alone."
)
def those_that_have_run_first(pool, *limits):
    return _select(pool, *limits, order=lambda req: (req.state == "INITIATION", req.arrival))


@mistake(
    **SELECT,
    check="edges",
    says="behind one that does not fit, those that have run go on. Stop at the first, whoever follows.",
)
def those_that_have_run_overtake(pool, *limits):
    return _select(pool, *limits, passes_over=lambda req: req.state == "INITIATION")


@mistake(
    **SELECT, check="edges", says="while one is RUNNING, one that does not fit is passed over. Stop there all the same."
)
def goes_on_while_one_runs(pool, *limits):
    return _select(pool, *limits, go_on=any(req.state == "RUNNING" for req in pool))


@mistake(**SELECT, check="plain", says="the budget has no effect: a pass may hold only so many tokens.")
def forgets_the_budget(pool, n_rsrv, max_bs, n_slots, budget):
    return _select(pool, n_rsrv, max_bs, n_slots, 10**9)


@mistake(**SELECT, check="plain", says="the budget is compared with each request alone. What was chosen uses it up.")
def never_spends_the_budget(pool, *limits):
    return _select(pool, *limits, spend=False)


@mistake(**SELECT, check="plain", says="the requests themselves are returned. What is asked for is their names.")
def returns_requests(pool, *limits):
    names, n_rsrv = _select(pool, *limits)
    return [req for name in names for req in pool if req.name == name], n_rsrv


REFUSED = "n_rsrv has grown by the slots of one that was refused. Add them once it is chosen (lines 24 to 26)."


def _reserves_first(pool, n_rsrv, max_bs, n_slots, budget, seats_first):
    batch = []
    for req in sorted(pool, key=lambda req: req.arrival):
        if req.state == "RUNNING":
            continue
        if seats_first and len(batch) == max_bs:
            break
        first = req.state == "INITIATION"
        n_rsrv += req.max_tokens if first else 0
        tokens = req.prompt if first else 1
        if len(batch) == max_bs or n_rsrv > n_slots or tokens > budget:
            break
        batch.append(req.name)
        budget -= tokens
    return batch, n_rsrv


@mistake(**SELECT, check="plain", says=REFUSED)
def reserves_for_the_refused(pool, *limits):
    return _reserves_first(pool, *limits, seats_first=True)


@mistake(**SELECT, check="plain", says=REFUSED)
def reserves_before_it_counts_seats(pool, *limits):
    return _reserves_first(pool, *limits, seats_first=False)


@mistake(
    **SELECT, check="edges", says="one that does not fit is passed over, and a later one overtakes it. Stop there."
)
def goes_on_behind_it(pool, *limits):
    return _select(pool, *limits, go_on=True)


@mistake(**SELECT, check="edges", says="one that is RUNNING was chosen. It waits for its newest token (line 19).")
def takes_the_running(pool, *limits):
    return _select(pool, *limits, running=True)


@mistake(
    **SELECT, check="edges", says="the loop ends at one that is RUNNING. It wants nothing now: pass over it (line 19)."
)
def stops_at_the_running(pool, *limits):
    queue = sorted(pool, key=lambda req: req.arrival)
    upto = next((i for i, req in enumerate(queue) if req.state == "RUNNING"), len(queue))
    return _select(queue[:upto], *limits)


@mistake(**SELECT, check="edges", says="an exact fit is refused: n_slots may be reached, but not exceeded (line 25).")
def refuses_the_last_slot(pool, *limits):
    return _select(pool, *limits, strict=1)


@mistake(**SELECT, check="edges", says="the last token of the budget is refused: it may be used up.")
def refuses_the_last_token(pool, *limits):
    return _select(pool, *limits, strict_budget=1)


@mistake(
    **SELECT, check="edges", says="one that has run costs its whole prompt again. In decode it computes one token."
)
def computes_prompts_again(pool, *limits):
    return _select(pool, *limits, tokens_of=lambda req: req.prompt)


@mistake(**SELECT, check="edges", says="the pool itself was sorted. It belongs to the caller: use sorted().")
def sorts_the_pool(pool, *limits):
    return _select(pool, *limits, in_place=True)


# -- 3.3 --------------------------------------------------------------------------------------------------------------


def _flatten(requests, size, position=None, token=None, slot=None, starts=None):
    flat = {"ids": [], "positions": [], "query_start_loc": [0], "slots": []}
    for r in requests:
        begin = len(flat["ids"])
        for i in range(r["new"]):
            p = r["computed"] + i
            flat["ids"].append(token(r, i) if token else r["tokens"][p])
            flat["positions"].append(position(begin, i) if position else p)
            flat["slots"].append(slot(r, p, begin + i) if slot else r["blocks"][p // size] * size + p % size)
        flat["query_start_loc"].append(len(flat["ids"]))
    if starts:
        flat["query_start_loc"] = starts(flat["query_start_loc"])
    return flat


@mistake(**FLATTEN, check="plain", says="positions count through the batch. Each request counts its own tokens.")
def positions_of_the_batch(requests, size):
    return _flatten(requests, size, position=lambda begin, i: begin + i)


@mistake(**FLATTEN, check="plain", says="positions begin at 0 in every pass. They begin at `computed`.")
def positions_from_0(requests, size):
    return _flatten(requests, size, position=lambda begin, i: i)


@mistake(
    **FLATTEN, check="plain", says="query_start_loc lacks the end: it has one number more than there are requests."
)
def no_end(requests, size):
    return _flatten(requests, size, starts=lambda starts: starts[:-1])


@mistake(**FLATTEN, check="plain", says="query_start_loc lacks the 0 at its front.")
def no_beginning(requests, size):
    return _flatten(requests, size, starts=lambda starts: starts[1:])


@mistake(**FLATTEN, check="plain", says="query_start_loc has lengths. It wants their running sum, from 0 on.")
def lengths_for_starts(requests, size):
    return _flatten(requests, size, starts=lambda starts: [b - a for a, b in pairwise(starts)])


@mistake(**FLATTEN, check="plain", says="query_start_loc grows by all tokens of a request. It grows by `new`.")
def starts_by_all_tokens(requests, size):
    lengths = [len(r["tokens"]) for r in requests]
    return _flatten(requests, size, starts=lambda _: [0, *accumulate(lengths)])


@mistake(**FLATTEN, check="plain", says="query_start_loc has a 0 and then lengths. It wants their running sum.")
def a_0_and_lengths(requests, size):
    return _flatten(requests, size, starts=lambda starts: [0, *(b - a for a, b in pairwise(starts))])


@mistake(**FLATTEN, check="plain", says="these are tensors. Return lists of whole numbers.")
def returns_tensors(requests, size):
    return {name: torch.tensor(values) for name, values in _flatten(requests, size).items()}


@mistake(
    **FLATTEN,
    check="edges",
    says="the last `new` tokens are taken, positions and all. The new ones begin at `computed`, which may be earlier.",
)
def the_last_new_ones(requests, size):
    return _flatten([r | {"computed": len(r["tokens"]) - r["new"]} for r in requests], size)


@mistake(**FLATTEN, check="plain", says="slots are the positions: the block table was not asked.")
def no_table(requests, size):
    return _flatten(requests, size, slot=lambda r, p, at: p)


@mistake(
    **FLATTEN, check="plain", says="slots lie in the first block only. Token p is in block p // size of the table."
)
def first_block_only(requests, size):
    return _flatten(requests, size, slot=lambda r, p, at: r["blocks"][0] * size + p)


@mistake(
    **FLATTEN, check="plain", says="the row within a block is p, not p % size: slots run on into a stranger's block."
)
def no_remainder(requests, size):
    return _flatten(requests, size, slot=lambda r, p, at: r["blocks"][p // size] * size + p)


@mistake(**FLATTEN, check="plain", says="ids are a request's first ones. The new tokens begin at `computed`.")
def ids_from_the_front(requests, size):
    return _flatten(requests, size, token=lambda r, i: r["tokens"][i])


@mistake(
    **FLATTEN,
    check="edges",
    says="ids are a request's last ones. If only part of a prompt is computed, they are not: count from `computed`.",
)
def ids_from_the_end(requests, size):
    return _flatten(requests, size, token=lambda r, i: r["tokens"][len(r["tokens"]) - r["new"] + i])


@mistake(
    **FLATTEN,
    check="edges",
    says="`new` was ignored: all tokens up to the last are taken. A pass computes `new` of them.",
)
def ignores_new(requests, size):
    return _flatten([r | {"new": len(r["tokens"]) - r["computed"]} for r in requests], size)


# -- 3.4 --------------------------------------------------------------------------------------------------------------


def _violation(
    trace, arrivals, lengths, order=None, ended=True, ties=False, equal=False, at_end=False, ran_only=False,
    pairs=None, later_first=False, later_goes_on=False, count_from=0,
):  # fmt: skip
    names = sorted(arrivals, key=order or arrivals.get)
    runs = dict.fromkeys(names, 0)
    for n, ran in enumerate(trace):
        for name in ran:
            runs[name] += 1
        if at_end and n + 1 < len(trace):
            continue
        for i, earlier in enumerate(pairs or names):
            others = list(enumerate(pairs or names))
            for j, later in reversed(others) if later_first else others:
                after = j > i if ties or order else arrivals[later] > arrivals[earlier]
                more = runs[later] >= runs[earlier] if equal else runs[later] > runs[earlier]
                if ran_only and not runs[earlier]:
                    continue
                if later_goes_on and runs[later] >= lengths[later]:
                    continue
                if after and more and (not ended or runs[earlier] < lengths[earlier]):
                    return n + count_from, earlier, later
    return None


@mistake(**UNFAIR, check="edges", says="the two came at the same time: neither was the earlier one.")
def breaks_ties(trace, arrivals, lengths):
    return _violation(trace, arrivals, lengths, ties=True)


@mistake(**UNFAIR, check="plain", says="as many passes as a later one is fair. Only fewer is not.")
def equal_is_unfair(trace, arrivals, lengths):
    return _violation(trace, arrivals, lengths, equal=True)


@mistake(**UNFAIR, check="plain", says="only the end of the trace is looked at. It must hold after every pass.")
def looks_at_the_end(trace, arrivals, lengths):
    return _violation(trace, arrivals, lengths, at_end=True)


@mistake(**UNFAIR, check="plain", says="names are taken for the order. The order is that of `arrivals`.")
def order_of_names(trace, arrivals, lengths):
    return _violation(trace, arrivals, lengths, order=lambda name: name)


@mistake(
    **UNFAIR, check="plain", says="one that has not run at all was forgotten. It has run 0 passes, and that counts."
)
def forgets_who_never_ran(trace, arrivals, lengths):
    return _violation(trace, arrivals, lengths, ran_only=True)


@mistake(
    **UNFAIR,
    check="plain",
    says="it is a pair, but not the first: of those wronged take the earliest arrival, not the first name you come to.",
)
def order_of_the_dict(trace, arrivals, lengths):
    return _violation(trace, arrivals, lengths, pairs=list(arrivals))


@mistake(**UNFAIR, check="plain", says="passes are counted from 1 here. The first pass is pass 0.")
def passes_from_1(trace, arrivals, lengths):
    return _violation(trace, arrivals, lengths, count_from=1)


@mistake(
    **UNFAIR, check="plain", says="of those that overtook it, this is the latest to arrive. The earliest is wanted."
)
def the_latest_that_overtook(trace, arrivals, lengths):
    return _violation(trace, arrivals, lengths, later_first=True)


@mistake(
    **UNFAIR, check="plain", says="the order of the dict is taken for that of arrival. Its values say who came when."
)
def dict_order_for_arrival(trace, arrivals, lengths):
    return _violation(trace, arrivals, lengths, order=list(arrivals).index)


@mistake(
    **UNFAIR,
    check="edges",
    says="the later one has ended, but it has run more often all the same: the earlier still lacks.",
)
def forgets_a_later_one_that_ended(trace, arrivals, lengths):
    return _violation(trace, arrivals, lengths, later_goes_on=True)


@mistake(**UNFAIR, check="edges", says="the earlier one has ended and wants nothing more. That wrongs nobody.")
def forgets_that_it_ended(trace, arrivals, lengths):
    return _violation(trace, arrivals, lengths, ended=False)


# -- 3.5 --------------------------------------------------------------------------------------------------------------


@mistake(**BREAK, says="all fit, so nobody overtakes anybody. One must be too large while a smaller one is behind it.")
def everybody_fits():
    return [(0, 1, 2), (0, 2, 3), (1, 1, 3)]


@mistake(**BREAK, says="behind the one that does not fit there is nobody who would: let a smaller one wait there.")
def nobody_behind_the_large_one():
    return [(0, 1, 4), (0, 3, 4), (0, 1, 5)]


@mistake(**BREAK, says="no sum of slots is exactly 8, so refusing the exact fit changes nothing.")
def nothing_is_exact():
    return [(0, 2, 4), (0, 1, 5), (0, 1, 2)]


@mistake(**BREAK, says="no sum of slots is exactly 8, and behind the one that does not fit nobody smaller waits.")
def nothing_exact_and_nobody_behind():
    return [(0, 1, 5), (0, 2, 4)]


@mistake(**BREAK, says="all fit, if only just: nobody needs slots that another frees, and nobody can overtake.")
def all_fit_exactly():
    return [(0, 1, 4), (0, 2, 4)]


@mistake(**BREAK, says="these are more than four requests.")
def five_requests():
    return [(0, 1, 4), (0, 3, 4), (0, 1, 5), (0, 1, 4), (0, 1, 1)]


# -- 3.6 --------------------------------------------------------------------------------------------------------------


@mistake(**JOIN, check="joins", says="one that does not fit is passed over, and a later one overtakes it. Stop there.")
def joins_behind_it(waiting, seats, budget, tokens, admit):
    for request in waiting:
        new = tokens(request)
        if seats > 0 and new <= budget and admit(request):
            seats, budget = seats - 1, budget - new


@mistake(**JOIN, check="joins", says="seats are not counted: `admit` asks nobody about them.")
def forgets_seats(waiting, seats, budget, tokens, admit):
    for request in waiting:
        new = tokens(request)
        if new > budget or not admit(request):
            break
        budget -= new


@mistake(**JOIN, check="joins", says="more tokens join than the budget has: `admit` asks nobody about it.")
def forgets_tokens(waiting, seats, budget, tokens, admit):
    for request in waiting[:seats]:
        if not admit(request):
            break


@mistake(
    **JOIN, check="joins", says="tokens(request) was asked after admit, when it is 0: the budget was never used up."
)
def asks_too_late(waiting, seats, budget, tokens, admit):
    for request in waiting[:seats]:
        if tokens(request) > budget or not admit(request):
            break
        budget -= tokens(request)


@mistake(**JOIN, check="joins", says="the last in line was taken first: waiting[0] is the next.")
def takes_the_last(waiting, seats, budget, tokens, admit):
    for request in reversed(waiting):
        new = tokens(request)
        if seats == 0 or new > budget or not admit(request):
            break
        seats, budget = seats - 1, budget - new


@mistake(**JOIN, check="joins", says="only one joined, though there was room for more: go on until one does not fit.")
def one_a_pass(waiting, seats, budget, tokens, admit):
    for request in waiting[: min(seats, 1)]:
        if tokens(request) <= budget:
            admit(request)


@mistake(**JOIN, check="joins", says="what admit returns was not looked at: it says False if blocks are lacking.")
def ignores_the_blocks(waiting, seats, budget, tokens, admit):
    for request in waiting:
        new = tokens(request)
        if seats == 0 or new > budget:
            break
        admit(request)
        seats, budget = seats - 1, budget - new


@mistake(**JOIN, check="joins", says="an exact fit of the budget is refused: it may be used up.")
def leaves_a_token(waiting, seats, budget, tokens, admit):
    for request in waiting:
        new = tokens(request)
        if seats == 0 or new >= budget or not admit(request):
            break
        seats, budget = seats - 1, budget - new


@mistake(
    **JOIN,
    check="joins",
    says="admit was never called, so nobody joined. Nothing is returned: whoever joins is admitted.",
)
def returns_a_list(waiting, seats, budget, tokens, admit):
    chosen = []
    for request in waiting[:seats]:
        if tokens(request) > budget:
            break
        budget -= tokens(request)
        chosen.append(request)
    return chosen


@mistake(
    **JOIN, check="joins", says="seats are looked at once admit has been called, so one too many joins. Ask before."
)
def asks_for_seats_too_late(waiting, seats, budget, tokens, admit):
    for request in waiting:
        new = tokens(request)
        if new > budget or not admit(request) or seats <= 0:
            break
        seats, budget = seats - 1, budget - new


@mistake(**JOIN, check="joins", says="the smallest were taken first. They overtake those before them in line.")
def takes_the_smallest(waiting, seats, budget, tokens, admit):
    joins_behind_it.version(sorted(waiting, key=tokens), seats, budget, tokens, admit)


@mistake(**JOIN, check="joins", says="the first in line was admitted again and again: `waiting` is a list that stays.")
def always_the_first(waiting, seats, budget, tokens, admit):
    for _ in waiting:
        new = tokens(waiting[0])
        if seats == 0 or new > budget or not admit(waiting[0]):
            break
        seats, budget = seats - 1, budget - new
