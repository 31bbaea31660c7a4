"""Lab 04's classic mistakes, each a wrong version and the sentence for the learner who made it."""

from itertools import pairwise

from minillm.course.checks import mistake

BY_HAND = {"exercise": "4.1", "name": "by_hand", "check": "by hand"}
PLAN = {"exercise": "4.2", "name": "plan_pass"}
ROWS = {"exercise": "4.3", "name": "rows_read"}
BUDGET = {"exercise": "4.4", "name": "choose_budget"}
BREAK = {"exercise": "4.5", "name": "exposing_requests", "check": "exposed"}
FILL = {"exercise": "4.6", "name": "fill_pass"}


# -- 4.1 --------------------------------------------------------------------------------------------------------------


# Each entry is explained for itself. So "first C" and "first D" are right here wherever only the lists tell a mistake.


def _by_hand(**changed):
    right = {"C": [8, 8, 3, 1, 0], "D": [0, 0, 5, 1, 1], "first C": 3, "first D": 3, "largest": 10}
    return right | {name.replace("_", " "): value for name, value in changed.items()}


@mistake(**BY_HAND, says="C has the whole budget here. A and B decode, so 8 of the 10 are left for it.")
def forgets_the_decodes():
    return _by_hand(C=[10, 9, 1, 0, 0], D=[0, 1, 4, 1, 1])


@mistake(**BY_HAND, says="the prompts share the pass evenly. C has begun, or came first: it takes all that is left.")
def shares_evenly():
    return _by_hand(C=[4, 7, 7, 1], D=[4, 1, 1, 1])


@mistake(**BY_HAND, says="D waits for a pass of its own. Pass 3 has 5 tokens left beside C's last chunk: D fits.")
def one_prompt_a_pass():
    return _by_hand(D=[0, 0, 0, 5, 1, 1])


@mistake(**BY_HAND, says="a first token comes with the last chunk of its prompt, in the same pass, not in the next.")
def first_token_a_pass_late():
    return _by_hand(first_C=4, first_D=4)


@mistake(**BY_HAND, says="a decode too many. The prompt gives the first token: D has two decodes left, C has one.")
def decodes_once_too_often():
    return _by_hand(C=[8, 8, 3, 1, 1], D=[0, 0, 5, 1, 1, 1])


@mistake(**BY_HAND, says="a list has an entry for every pass up to D's last token: 0 where one computes nothing.")
def leaves_out_zeros():
    return _by_hand(C=[8, 8, 3, 1], D=[5, 1, 1])


@mistake(**BY_HAND, says="the list goes on after the pass in which D has its last token.")
def goes_on_after_the_last():
    return _by_hand(C=[8, 8, 3, 1, 0, 0], D=[0, 0, 5, 1, 1, 0])


@mistake(**BY_HAND, says='there is no such entry. The keys are "C", "D", "first C", "first D" and "largest".')
def leaves_out_an_entry():
    return {}


@mistake(
    **BY_HAND, says="C computes its second output token too: its first comes from the prompt, so a decode is left."
)
def forgets_the_second_token():
    return _by_hand(C=[8, 8, 3, 0, 0])


@mistake(**BY_HAND, says="that is the pass without a budget: 2 decodes, 19 and 5 tokens. Nothing exceeds 10 here.")
def largest_without_a_budget():
    return _by_hand(largest=26)


@mistake(**BY_HAND, says="passes are counted from 0 here. The first pass is pass 1.")
def counts_from_0():
    return _by_hand(first_C=2, first_D=2)


# -- 4.2 --------------------------------------------------------------------------------------------------------------


def _plan(
    running, waiting, budget, fits, mixed=False, decodes_cost=True, whole=False, whole_new=False, from_0=False,
    new_first=False, one_prompt=False, spend=True, begun=True, negative=False, drop=False, zeros=False,
    ask_first=False, go_on=False, one_is_decode=False, even=False, new=True, again=False, backwards=False,
    first_begun=False, shortest=False, first_asked=False, size=None,
):  # fmt: skip
    """Right unless one of the last arguments says otherwise."""
    plan, left, served = {}, budget, 0

    def decodes(job):
        return job.computed >= job.prompt - one_is_decode

    if not mixed:
        for job in running:
            if decodes(job) and (left > 0 or not drop):
                plan[job.name] = 1
                left -= 1 if decodes_cost else 0

    def chunk(job, all_of_it=False):
        nonlocal left, served
        lacking = job.prompt - (0 if from_0 else job.computed)
        most = left
        if even:
            most = max(1, (budget - len([j for j in running if decodes(j)])) // max(1, count))
        most = most if size is None else min(most, size)
        plan[job.name] = lacking if all_of_it else min(lacking, most)
        left -= plan[job.name] if spend else 0
        served += 1

    count = len([j for j in running if not decodes(j)]) + len(waiting)

    def old():
        for job in sorted(running, key=lambda j: j.prompt - j.computed) if shortest else running:
            if decodes(job) and not mixed:
                continue
            if mixed and decodes(job):
                if left > 0:
                    chunk(job, all_of_it=False)
                    plan[job.name] = 1
                    give_back()
                continue
            if not begun or ((one_prompt or first_begun) and served):
                continue
            if left > 0 or negative or zeros or (backwards and left < 0):
                if zeros and left <= 0:
                    plan[job.name] = 0
                else:
                    chunk(job, whole)

    def give_back():
        nonlocal left
        left -= 1

    def fresh():
        for job in waiting:
            if not new or (one_prompt and served):
                break
            if ask_first and not fits(job):
                break
            if left <= 0:
                if zeros:
                    plan[job.name] = 0
                    continue
                if negative:
                    chunk(job)
                break
            asks = not ask_first and (job is waiting[0] or not first_asked)
            if asks and not fits(job):
                if go_on:
                    continue
                break
            chunk(job, whole or whole_new)

    for part in (fresh, old) if new_first else (old, fresh):
        part()
    if again:
        for job in [*running, *waiting]:
            if job.name in plan and job.computed < job.prompt:
                job.computed += plan[job.name]
    return plan


@mistake(
    **PLAN, check="plain", says="requests are served in order of arrival, whatever they do. Those that decode go first."
)
def no_turn_for_decodes(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, mixed=True)


@mistake(
    **PLAN, check="plain", says="decodes cost nothing here, so a pass is larger than the budget. Each takes one of it."
)
def decodes_for_free(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, decodes_cost=False)


@mistake(**PLAN, check="plain", says="prompts go in whole, whatever the budget: take min(lacking, what is left).")
def no_chunks(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, whole=True)


@mistake(
    **PLAN, check="plain", says="a prompt that comes goes in whole. Its first chunk too is only what the budget leaves."
)
def first_chunk_whole(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, whole_new=True)


@mistake(
    **PLAN,
    check="plain",
    says="a chunk is cut from the whole prompt. `computed` tokens of it are done: those lack no more.",
)
def forgets_what_is_computed(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, from_0=True)


@mistake(**PLAN, check="plain", says="a new prompt comes before one that has begun. Begun ones go on first.")
def new_before_begun(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, new_first=True)


@mistake(
    **PLAN, check="plain", says="there is one prompt a pass at most. What its chunk leaves belongs to the next in line."
)
def only_one_prompt(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, one_prompt=True)


@mistake(
    **PLAN,
    check="plain",
    says="only the first of those that have begun goes on. What it leaves belongs to the next of them.",
)
def only_the_first_begun(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, first_begun=True)


@mistake(
    **PLAN,
    check="plain",
    says="of two that have begun the one that lacks less goes first. They go in order of arrival.",
)
def shortest_begun_first(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, shortest=True)


@mistake(**PLAN, check="plain", says="chunks are not taken off the budget: a second prompt has it all once more.")
def never_spends(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, spend=False)


@mistake(**PLAN, check="plain", says="a prompt that has begun never goes on: only decodes and new ones are served.")
def forgets_the_begun(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, begun=False)


@mistake(**PLAN, check="plain", says="nobody of `waiting` gets in, though budget is left.")
def nobody_joins(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, new=False)


@mistake(**PLAN, check="plain", says="the prompts share the budget evenly. The first in order takes all that it can.")
def even_shares(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, even=True)


@mistake(
    **PLAN,
    check="plain",
    says="a chunk has a fixed size here. It is as large as the budget leaves, however large that is.",
)
def chunks_of_8(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, size=8)


@mistake(
    **PLAN,
    check="plain",
    says="a chunk has a fixed size here. It is as large as the budget leaves, however large that is.",
)
def chunks_of_32(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, size=32)


@mistake(**PLAN, check="plain", says="that is a list of pairs. A plan is a dict from name to tokens.")
def returns_pairs(running, waiting, budget, fits):
    return list(_plan(running, waiting, budget, fits).items())


@mistake(
    **PLAN,
    check="edges",
    says="a chunk is negative: more decode than the budget has tokens. Then no prompt gets any.",
)
def negative_chunk(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, negative=True)


@mistake(
    **PLAN,
    check="edges",
    says="a prompt that has begun goes backwards: less than nothing is left. Ask for `left > 0`, not for `left != 0`.",
)
def begun_goes_backwards(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, backwards=True)


@mistake(
    **PLAN, check="edges", says="one that decodes was left out since the budget was used up. That is the stall: never."
)
def drops_decodes(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, drop=True)


@mistake(**PLAN, check="edges", says="the plan has entries of 0 tokens. Who computes nothing isn't in the pass.")
def plans_nothing_for_some(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, zeros=True)


@mistake(
    **PLAN,
    check="edges",
    says="`fits` was asked though no budget was left. It reserves memory: look at the budget first.",
)
def reserves_for_nothing(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, ask_first=True)


@mistake(**PLAN, check="edges", says="one that doesn't fit is passed over, and a later one overtakes it. Stop there.")
def goes_on_behind_it(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, go_on=True)


@mistake(**PLAN, check="edges", says="`fits` was asked of the first only. Each that joins needs memory: ask for each.")
def asks_for_the_first_only(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, first_asked=True)


@mistake(
    **PLAN,
    check="edges",
    says="one that lacks its last prompt token is taken for a decode. `computed == prompt` is what tells them apart.",
)
def last_token_is_a_decode(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, one_is_decode=True)


@mistake(**PLAN, check="edges", says="`computed` of the jobs was changed. It is a plan: the pass hasn't run yet.")
def computes_already(running, waiting, budget, fits):
    return _plan(running, waiting, budget, fits, again=True)


@mistake(**PLAN, check="edges", says="who joins was taken out of `waiting`. The list belongs to the caller.")
def empties_the_queue(running, waiting, budget, fits):
    plan = _plan(running, waiting, budget, fits)
    waiting[:] = [job for job in waiting if job.name not in plan]
    return plan


@mistake(
    **PLAN, check="edges", says="the plan is in order of arrival. Give tokens out in turn: decodes come first in it."
)
def sorted_by_arrival(running, waiting, budget, fits):
    plan = _plan(running, waiting, budget, fits)
    return {job.name: plan[job.name] for job in [*running, *waiting] if job.name in plan}


# -- 4.3 --------------------------------------------------------------------------------------------------------------


def _again(chunks):
    return sum(sum(chunks[:i]) for i in range(len(chunks)))


@mistake(**ROWS, check="plain", says="a chunk's own rows are counted as read again. They are read for the first time.")
def counts_its_own(chunks):
    return _again(chunks) + sum(chunks), _again(chunks) + sum(chunks)


@mistake(
    **ROWS,
    check="plain",
    says="a chunk's own rows are in what it reads again. Add what was written before you count the chunk itself.",
)
def writes_first(chunks):
    again = _again(chunks) + sum(chunks)
    return again, again + sum(chunks)


@mistake(**ROWS, check="plain", says="only the chunk right before is read again. It reads all chunks before it.")
def reads_the_last_only(chunks):
    again = sum(chunks[:-1])
    return again, again + sum(chunks)


@mistake(**ROWS, check="plain", says="these are chunks, not rows: each has as many rows as tokens.")
def counts_chunks(chunks):
    n = len(chunks)
    return n * (n - 1) // 2, n * (n - 1) // 2 + n


@mistake(**ROWS, check="plain", says="in all is what was read again and each chunk's own rows; here it is the prompt.")
def whole_is_the_prompt(chunks):
    return _again(chunks), sum(chunks)


@mistake(**ROWS, check="plain", says="every chunk reads every other here, later ones too. Half of it is right.")
def reads_later_ones(chunks):
    return 2 * _again(chunks), 2 * _again(chunks) + sum(chunks)


@mistake(**ROWS, check="plain", says="the two numbers are the other way round: first what is read again.")
def swapped(chunks):
    return _again(chunks) + sum(chunks), _again(chunks)


@mistake(
    **ROWS,
    check="edges",
    says="c · N(N − 1)/2 holds for equal chunks only. Sizes differ here: add up what was written.",
)
def formula_of_the_first(chunks):
    n, c = len(chunks), chunks[0] if chunks else 0
    again = c * n * (n - 1) // 2 if len(set(chunks)) > 2 or n > 2 else _again(chunks)
    return again, again + sum(chunks)


@mistake(
    **ROWS, check="edges", says="without chunks there is an error. A loop over none, from 0, needs no special case."
)
def fails_for_none(chunks):
    chunks[0]
    return _again(chunks), _again(chunks) + sum(chunks)


@mistake(**ROWS, check="edges", says="the list was changed: it belongs to the caller. Loop over it, take nothing out.")
def empties_the_list(chunks):
    rows = _again(chunks), _again(chunks) + sum(chunks)
    chunks.clear()
    return rows


# -- 4.4 --------------------------------------------------------------------------------------------------------------


def _choose(step_ms, target, decodes, order=sorted, strict=False, lucky=False, raises=True, least=1, fewest=False):
    kept = []
    for budget in order(step_ms):
        if step_ms[budget] > target or (strict and step_ms[budget] == target):
            if lucky:
                continue
            break
        kept.append(budget)
    best = (kept[0] if fewest else kept[-1]) if kept else None
    if best is None or best < decodes + least:
        if raises:
            raise ValueError("none")
        return best
    return best


@mistake(**BUDGET, check="plain", says="that is the smallest budget that keeps the promise. The largest is wanted.")
def takes_the_smallest(step_ms, target, decodes):
    return _choose(step_ms, target, decodes, fewest=True)


@mistake(**BUDGET, check="plain", says="a pass of exactly the promised time is refused. It keeps the promise.")
def refuses_the_exact(step_ms, target, decodes):
    return _choose(step_ms, target, decodes, strict=True)


@mistake(**BUDGET, check="plain", says="that is the time of its pass. The budget is wanted, in tokens.")
def returns_the_time(step_ms, target, decodes):
    return step_ms[_choose(step_ms, target, decodes)]


@mistake(
    **BUDGET, check="plain", says="the decodes are taken off. The budget counts all tokens of a pass, theirs as well."
)
def takes_decodes_off(step_ms, target, decodes):
    return _choose(step_ms, target, decodes) - decodes


@mistake(**BUDGET, check="plain", says="that is the first budget that breaks the promise: take the one before it.")
def one_too_far(step_ms, target, decodes):
    best = _choose(step_ms, target, decodes)
    return min((budget for budget in step_ms if budget > best), default=best)


@mistake(
    **BUDGET,
    check="edges",
    says="a smaller budget is too slow already, and the answer is above it: stop at the first slow one.",
)
def trusts_the_lucky(step_ms, target, decodes):
    return _choose(step_ms, target, decodes, lucky=True)


@mistake(**BUDGET, check="edges", says="budgets are taken as they come in the dict. Go through them by size.")
def does_not_sort(step_ms, target, decodes):
    return _choose(step_ms, target, decodes, order=list)


@mistake(**BUDGET, check="edges", says="no budget keeps the promise, and nothing is raised. Raise a ValueError.")
def returns_none(step_ms, target, decodes):
    return _choose(step_ms, target, decodes, raises=False)


@mistake(
    **BUDGET, check="edges", says="the decodes take it all: nothing would be left for a prompt, and none would go on."
)
def forgets_the_decodes_of_it(step_ms, target, decodes):
    return _choose(step_ms, target, 0)


@mistake(
    **BUDGET, check="edges", says="as many decode as the budget has, so nothing is left. It must be larger than that."
)
def nothing_left(step_ms, target, decodes):
    return _choose(step_ms, target, decodes, least=0)


@mistake(**BUDGET, check="edges", says="one token is left for a prompt, which is enough, and the budget was refused.")
def wants_two_left(step_ms, target, decodes):
    return _choose(step_ms, target, decodes, least=2)


@mistake(
    **BUDGET,
    check="edges",
    says="budgets too small for the decodes were dropped first. A slow one among them counts too: walk first.",
)
def drops_small_ones_first(step_ms, target, decodes):
    return _choose({budget: ms for budget, ms in step_ms.items() if budget > decodes}, target, decodes)


@mistake(
    **BUDGET,
    check="edges",
    says="only the next smaller budget was looked at. All smaller ones must keep the promise.",
)
def looks_one_back(step_ms, target, decodes):
    budgets = sorted(step_ms)
    slow = {large for small, large in pairwise(budgets) if step_ms[small] > target}
    return _choose({budget: ms for budget, ms in step_ms.items() if budget not in slow}, target, decodes, lucky=True)


@mistake(
    **BUDGET,
    check="edges",
    says="a budget was refused since a smaller one takes longer. Both keep the promise: only the target counts.",
)
def wants_rising_times(step_ms, target, decodes):
    rising = {b: ms for b, ms in step_ms.items() if all(step_ms[c] <= ms for c in step_ms if c < b)}
    return _choose(rising, target, decodes)


# -- 4.5 --------------------------------------------------------------------------------------------------------------


@mistake(
    **BREAK,
    says="no decode is skipped. Nobody decodes while prompts go in, or the prompts leave enough for those who do.",
)
def nobody_decodes():
    return [(0, 20, 1), (1, 4, 1)]


@mistake(
    **BREAK,
    says="new ones take nothing from a begun prompt: nobody comes while one is halfway, or all fit into the pass.",
)
def nobody_comes_halfway():
    return [(0, 1, 6), (1, 20, 2)]


@mistake(
    **BREAK,
    says="no begun prompt gets more by overspending: it lacks no more than is left, or nobody decodes beside it.",
)
def too_short_to_overspend():
    return [(0, 1, 6), (1, 12, 2), (2, 4, 2)]


@mistake(**BREAK, says="these are more than four requests.")
def five_requests():
    return [(0, 1, 6), (1, 20, 2), (2, 4, 2), (2, 1, 1), (2, 1, 1)]


@mistake(**BREAK, says="a request is three numbers: its arrival, its prompt tokens, its output tokens.")
def leaves_out_arrivals():
    return [(1, 6), (20, 2), (4, 2)]


@mistake(**BREAK, says="a prompt has more than 20 tokens, or none.")
def too_long():
    return [(0, 1, 6), (1, 21, 2), (2, 4, 2)]


@mistake(**BREAK, says="an output has more than 6 tokens, or none.")
def writes_too_long():
    return [(0, 1, 7), (1, 20, 2), (2, 4, 2)]


@mistake(**BREAK, says="the requests aren't in order of arrival: the first number of each is its arrival.")
def not_in_order():
    return [(0, 1, 6), (2, 4, 2), (1, 20, 2)]


@mistake(**BREAK, says="somebody arrives before or after the trace, which has the passes 0 to 39.")
def comes_after_the_trace():
    return [(0, 1, 6), (1, 20, 2), (40, 4, 2)]


# -- 4.6 --------------------------------------------------------------------------------------------------------------


def _fill(
    running, waiting, seats, budget, lacking, advance, admit, turn=True, begun=True, new_first=False, spend=True,
    count_seats=True, go_on=False, most_spent=False, stop=False, one=False, always=False, shortest=False,
    first_begun=False, in_vain=False, asks_new=False, lacking_spent=False, all_spent=False, stop_begun=False,
    stop_all=False, size=None, size_new=None, whole=False, whole_goes_on=False,
):  # fmt: skip
    """Right unless one of the last arguments says otherwise."""

    stopped = False

    def run(requests):
        nonlocal budget, stopped
        for request in requests:
            whatever = always and request in decoding
            if budget <= 0 and not (in_vain or whatever):
                break
            planned = min(lacking(request), budget)
            new = advance(request, 1 if whatever else min(budget, size or budget))
            if not new and (stop or stop_all or (stop_begun and requests is not decoding)):
                stopped = stop_all
                break
            budget -= (budget if all_spent else planned if lacking_spent else new) if spend else 0
            if most_spent and new:
                budget = 0 if lacking(request) > 0 or new > 1 else budget

    def join():
        nonlocal budget, seats
        for request in waiting:
            if (count_seats and seats == 0) or (budget == 0 and not asks_new):
                break
            planned = min(lacking(request), budget)
            if (whole or whole_goes_on) and lacking(request) > budget:
                if whole_goes_on:
                    continue
                break
            new = admit(request, min(budget, size_new or budget))
            if not new:
                if go_on:
                    continue
                break
            spent = budget if most_spent or all_spent else planned if lacking_spent else new
            seats, budget = seats - 1, budget - spent
            if one:
                break

    decoding = [request for request in running if lacking(request) == 1]
    prompts = [request for request in running if lacking(request) > 1]
    prompts = sorted(prompts, key=lacking) if shortest else prompts[:1] if first_begun else prompts
    if not turn:
        decoding, prompts = running, []
    run(decoding)
    if new_first:
        join()
    if begun and not stopped:
        run(prompts)
    if not new_first:
        join()


@mistake(
    **FILL,
    check="fills",
    says="prompts and decodes go in order of arrival. Those that decode go first: a turn for each.",
)
def no_turn(*args):
    _fill(*args, turn=False)


@mistake(**FILL, check="fills", says="a prompt that has begun is never advanced: it would hold its seat for ever.")
def never_goes_on(*args):
    _fill(*args, begun=False)


@mistake(**FILL, check="fills", says="new ones join before a prompt that has begun goes on.")
def joins_before_begun(*args):
    _fill(*args, new_first=True)


@mistake(**FILL, check="fills", says="what `advance` computed is not taken off the budget: the pass becomes too large.")
def runs_for_free(*args):
    _fill(*args, spend=False)


@mistake(**FILL, check="fills", says="seats are not counted: `admit` asks nobody about them.")
def forgets_seats(*args):
    _fill(*args, count_seats=False)


@mistake(**FILL, check="fills", says="one that can't join is passed over, and a later one overtakes it. Stop there.")
def overtakes(*args):
    _fill(*args, go_on=True)


@mistake(
    **FILL,
    check="fills",
    says="all that was allowed is taken off the budget. Take off what was computed: it is returned.",
)
def spends_what_it_allowed(*args):
    _fill(*args, most_spent=True)


@mistake(
    **FILL,
    check="fills",
    says="the first takes the whole budget, whatever it computes. Take off what was computed: it is returned.",
)
def spends_all_at_once(*args):
    _fill(*args, all_spent=True)


@mistake(
    **FILL, check="fills", says="the pass ends at one that gave way. `advance` returns 0 then, and the others go on."
)
def stops_when_one_gives_way(*args):
    _fill(*args, stop=True)


@mistake(
    **FILL, check="fills", says="nobody runs after one that gave way. `advance` returns 0 then, and the others go on."
)
def nobody_runs_after_one_gave_way(*args):
    _fill(*args, stop_all=True)


@mistake(
    **FILL,
    check="fills",
    says="a prompt that gave way ends the turn of the begun ones. `advance` returns 0 then, and the next goes on.",
)
def stops_when_a_prompt_gives_way(*args):
    _fill(*args, stop_begun=True)


@mistake(**FILL, check="fills", says="only one joined, though there was room for more: go on until one does not fit.")
def one_joins_a_pass(*args):
    _fill(*args, one=True)


@mistake(**FILL, check="fills", says="a prompt may join whole here: allow it no more than the budget that is left.")
def joins_whole(running, waiting, seats, budget, lacking, advance, admit):
    _fill(running, waiting, seats, budget, lacking, advance, lambda request, most: admit(request, lacking(request)))


@mistake(
    **FILL,
    check="fills",
    says="one joins only if the budget has room for all it lacks. It joins with a chunk: what is left of the budget.",
)
def joins_only_whole(*args):
    _fill(*args, whole=True)


@mistake(
    **FILL,
    check="fills",
    says="one that the budget has no room for is passed over. Let it join with a chunk: what is left of the budget.",
)
def passes_over_large_ones(*args):
    _fill(*args, whole_goes_on=True)


@mistake(
    **FILL,
    check="fills",
    says="a prompt that has begun goes on by a fixed size at most. Allow it all of the budget that is left.",
)
def goes_on_by_32(*args):
    _fill(*args, size=32)


@mistake(
    **FILL,
    check="fills",
    says="one joins with a chunk of a fixed size at most. Allow it all of the budget that is left.",
)
def joins_with_32(*args):
    _fill(*args, size_new=32)


@mistake(**FILL, check="fills", says="a prompt goes on whole here: allow it no more than the budget that is left.")
def goes_on_whole(running, waiting, seats, budget, lacking, advance, admit):
    _fill(running, waiting, seats, budget, lacking, lambda request, most: advance(request, lacking(request)), admit)


@mistake(
    **FILL,
    check="fills",
    says="decodes go in whatever the budget, as in 4.2. Here it holds for them too: those beyond it wait for a pass.",
)
def decodes_whatever_the_budget(*args):
    _fill(*args, always=True)


@mistake(
    **FILL, check="fills", says="the prompt that lacks less goes on first. Among those that have begun, order decides."
)
def shortest_first(*args):
    _fill(*args, shortest=True)


@mistake(
    **FILL,
    check="fills",
    says="only the first that has begun goes on. If it leaves some of the budget, so does the next.",
)
def only_the_first_goes_on(*args):
    _fill(*args, first_begun=True)


@mistake(
    **FILL, check="fills", says="`advance` was called with nothing left of the budget. Look at it before each request."
)
def advances_with_nothing(*args):
    _fill(*args, in_vain=True)


@mistake(
    **FILL,
    check="fills",
    says="`admit` was called with nothing left of the budget. It reserves memory: look at the budget first.",
)
def admits_with_nothing(*args):
    _fill(*args, asks_new=True)


@mistake(
    **FILL,
    check="fills",
    says="what a request lacks is taken off the budget. Fewer were computed: take off what was returned.",
)
def spends_what_it_lacks(*args):
    _fill(*args, lacking_spent=True)
