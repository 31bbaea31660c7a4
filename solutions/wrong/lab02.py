"""Lab 02's classic mistakes, each a wrong version and the sentence for the learner who made it."""

from collections import deque

import torch

from minillm.compute.attention.online import empty_state, finish_state, online_softmax_update
from minillm.course.checks import mistake

BY_HAND = {"exercise": "2.1", "name": "by_hand", "check": "by hand"}
POOL = {"exercise": "2.2", "name": "MyBlockPool"}
WRITE = {"exercise": "2.3", "name": "make_writable"}
GATHER = {"exercise": "2.4", "name": "gather_attention"}
AWAY = {"exercise": "2.5", "name": "who_gives_way", "check": "gives way"}
BREAK = {"exercise": "2.6", "name": "exposing_trace", "check": "exposed"}
BLOCKS = {"exercise": "2.7", "name": "attend_blocks", "check": "engine"}


# -- 2.1 --------------------------------------------------------------------------------------------------------------


def _hand(**wrong):
    right = {"table A": [1, 4], "table C": [1, 2], "slot": 18, "copies": 1, "free": [5, 6, 7, 8, 3], "empty": 2}
    return right | wrong


@mistake(**BY_HAND, says="nothing is copied, so C reads A's seventh token. A shared block is copied before a write.")
def writes_in_place_by_hand():
    return _hand(**{"table A": [1, 2], "slot": 10, "copies": 0, "free": [4, 5, 6, 7, 8, 3], "empty": 1})


@mistake(**BY_HAND, says="C copies as well, but when it writes it is the only holder of block 2: it writes in place.")
def the_last_holder_copies_by_hand():
    return _hand(**{"table C": [1, 5], "copies": 2, "free": [6, 7, 8, 2, 3]})


@mistake(**BY_HAND, says="the whole table is copied. Block 1 is not written by anybody and stays shared.")
def copies_all_by_hand():
    return _hand(**{"table A": [4, 5], "slot": 22, "copies": 2, "free": [6, 7, 8, 3]})


@mistake(**BY_HAND, says="this is the row as the sequence counts. Its slot is table[6 // 4] · 4 + 6 mod 4.")
def the_row_as_slot():
    return _hand(slot=6)


@mistake(**BY_HAND, says="this is the slot in block 2, before A got a copy of its own: A's second block is 4 now.")
def the_slot_before_the_copy():
    return _hand(slot=10)


@mistake(**BY_HAND, says="B's block is at the front. What is freed goes to the end of the free list.")
def freed_to_the_front_by_hand():
    return _hand(free=[3, 5, 6, 7, 8])


@mistake(**BY_HAND, says="B has ended: its block is free and no longer held with an empty slot.")
def counts_a_free_block():
    return _hand(empty=3)


@mistake(**BY_HAND, says="that was so before the seventh tokens: by now three rows of either second block are filled.")
def counts_before_the_write():
    return _hand(empty=4)


# -- 2.2 --------------------------------------------------------------------------------------------------------------


class _Pool:
    """The lab's frame with right methods."""

    def __init__(self, num_usable):
        self.num_usable = num_usable
        self.ref_counts = [0] * (num_usable + 1)
        self.free = deque(range(1, num_usable + 1))

    @property
    def num_free(self):
        return len(self.free)

    def check_integrity(self, owned):
        counts = [0] * len(self.ref_counts)
        for block in owned:
            counts[block] += 1
        idle = [b for b in range(1, len(counts)) if not counts[b]]
        assert not counts[0] and counts == self.ref_counts and sorted(self.free) == idle
        return True

    def allocate(self, count):
        if count > len(self.free):
            raise ValueError("too few")
        blocks = [self.take() for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def take(self):
        return self.free.popleft()

    def hold(self, blocks):
        for block in blocks:
            if self.ref_counts[block] == 0:
                raise ValueError("free")
            self.ref_counts[block] += 1

    def release(self, blocks):
        for block in blocks:
            if self.ref_counts[block] == 0:
                raise ValueError("free")
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.give_back(block)

    def give_back(self, block):
        self.free.append(block)


@mistake(**POOL, check="plain", says="blocks are taken from the end of the free list. popleft() takes the front.")
class TakesFromTheEnd(_Pool):
    def take(self):
        return self.free.pop()


@mistake(**POOL, check="plain", says="a freed block goes to the front of the list, so that it is reused at once.")
class FreesToTheFront(_Pool):
    def give_back(self, block):
        self.free.appendleft(block)


@mistake(**POOL, check="plain", says="allocate does not count: a block that was handed out has one reference.")
class CountsNothingAtFirst(_Pool):
    def allocate(self, count):
        if count > len(self.free):
            raise ValueError("too few")
        return [self.take() for _ in range(count)]


@mistake(**POOL, check="plain", says="the last free block is never handed out. Refuse only what is more than are free.")
class KeepsTheLastBlock(_Pool):
    def allocate(self, count):
        if count >= len(self.free):
            raise ValueError("too few")
        return super().allocate(count)


FIRST = "a block is free at its first release, though others hold it. Wait for count 0."


@mistake(**POOL, check="edges", says=FIRST)
class FreesAtFirstReleaseOnce(_Pool):
    def release(self, blocks):
        for block in blocks:
            if self.ref_counts[block] == 0:
                raise ValueError("free")
            self.ref_counts[block] -= 1
            if block not in self.free:
                self.free.append(block)


@mistake(**POOL, check="edges", says=FIRST)
class FreesAtFirstRelease(_Pool):
    def release(self, blocks):
        for block in blocks:
            if self.ref_counts[block] == 0:
                raise ValueError("free")
            self.ref_counts[block] -= 1
            self.free.append(block)


@mistake(**POOL, check="edges", says="what was shared never comes back: count down at every release, then look for 0.")
class LeaksWhatWasShared(_Pool):
    def release(self, blocks):
        for block in blocks:
            if self.ref_counts[block] == 0:
                raise ValueError("free")
            if self.ref_counts[block] == 1:
                self.ref_counts[block] = 0
                self.free.append(block)


@mistake(**POOL, check="edges", says="hold sets the count to 2. A third holder needs a third reference: add 1.")
class HoldsAtMostTwice(_Pool):
    def hold(self, blocks):
        for block in blocks:
            if self.ref_counts[block] == 0:
                raise ValueError("free")
            self.ref_counts[block] = 2


@mistake(**POOL, check="edges", says="a block that is named twice was held once. Each naming is a reference.")
class HoldsASet(_Pool):
    def hold(self, blocks):
        super().hold(set(blocks))


@mistake(**POOL, check="edges", says="nothing was refused: the list ran empty on its own. Count first, then take.")
class TakesWithoutLooking(_Pool):
    def allocate(self, count):
        blocks = [self.take() for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks


LATE = "allocate takes what there is and then refuses. Refuse first, with nothing changed."


@mistake(**POOL, check="edges", says=LATE)
class TakesAndThenCounts(_Pool):
    def allocate(self, count):
        blocks = [self.take() for _ in range(min(count, len(self.free)))]
        if len(blocks) < count:
            raise ValueError("too few")
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks


@mistake(**POOL, check="edges", says=LATE)
class TakesBeforeItRefuses(_Pool):
    def allocate(self, count):
        blocks = []
        for _ in range(count):
            if not self.free:
                raise ValueError("too few")
            blocks.append(self.take())
            self.ref_counts[blocks[-1]] = 1
        return blocks


@mistake(
    **POOL, check="edges", says="hold takes a free block. Somebody else will be given it: refuse what nobody holds."
)
class HoldsWhatIsFree(_Pool):
    def hold(self, blocks):
        for block in blocks:
            self.ref_counts[block] += 1


@mistake(**POOL, check="edges", says="a free block can be released again, and its count goes below 0. Refuse that.")
class ReleasesTwice(_Pool):
    def release(self, blocks):
        for block in blocks:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free.append(block)


# -- 2.3 --------------------------------------------------------------------------------------------------------------


def _write(
    pool, table, first, end, size, wanted=None, touched=None, least=1, let_go=True, look=True, negative=False,
    grow_first=False, grow=None,
):  # fmt: skip
    """Right unless one of the last eight says otherwise."""
    if wanted is None:
        wanted = -(-end // size) if first < end else 0
    if touched is None:
        touched = range(first // size, min(wanted, len(table))) if first < end else ()
    shared = [i for i in touched if i < len(table) and pool.ref_counts[table[i]] > least]
    lacking = wanted - len(table)
    grow = max(0, lacking) if grow is None else grow(lacking)
    if look and len(shared) + (lacking if negative else grow) > pool.num_free:
        return None
    copies, early = [], pool.allocate(grow) if grow_first else []
    for i in shared:
        (fresh,) = pool.allocate(1)
        copies.append((table[i], fresh))
        if let_go:
            pool.release([table[i]])
        table[i] = fresh
    table.extend(early if grow_first else pool.allocate(grow))
    return copies


@mistake(
    **WRITE,
    check="plain",
    says="the caller's table has not grown: table = table + … makes another list. Change it in place: table.extend.",
)
def grows_a_list_of_its_own(pool, table, first, end, size):
    mine = list(table)
    copies = _write(pool, mine, first, end, size)
    if copies is not None:
        table[:] = mine[: len(table)]  # single blocks were replaced in place
    return copies


@mistake(**WRITE, check="plain", says="copies are (to, from) here. Wanted is (from, to): the shared block first.")
def copies_the_other_way(pool, table, first, end, size):
    copies = _write(pool, table, first, end, size)
    return copies and [(to, origin) for origin, to in copies]


@mistake(**WRITE, check="edges", says="the table grows before it copies. Fresh blocks for copies come first.")
def grows_first(pool, table, first, end, size):
    return _write(pool, table, first, end, size, grow_first=True)


@mistake(**WRITE, check="edges", says="the table grows by one block at most. A prompt may need several.")
def grows_by_one(pool, table, first, end, size):
    return _write(pool, table, first, end, size, grow=lambda lacking: min(1, max(0, lacking)))


@mistake(
    **WRITE,
    check="edges",
    says="a table that is long enough lacks less than 0 blocks here, which hides what a copy needs. Take 0 at least.",
)
def needs_fewer_than_none(pool, table, first, end, size):
    return _write(pool, table, first, end, size, negative=True)


@mistake(**WRITE, check="edges", says="no row is written (first = end), and yet the table grows.")
def grows_for_no_row(pool, table, first, end, size):
    return _write(pool, table, first, end, size, wanted=-(-end // size))


@mistake(
    **WRITE, check="edges", says="only the last block written is copied. Rows first to end − 1 may begin further up."
)
def copies_the_last_block_only(pool, table, first, end, size):
    return _write(pool, table, first, end, size, touched=[(end - 1) // size] if first < end else ())


@mistake(**WRITE, check="edges", says="blocks behind the last row written are copied as well. Stop at row end − 1.")
def copies_all_that_follows(pool, table, first, end, size):
    return _write(pool, table, first, end, size, touched=range(first // size, len(table)) if first < end else ())


@mistake(**WRITE, check="plain", says="a block that somebody else holds is written in place: the other reads it too.")
def writes_in_place(pool, table, first, end, size):
    return _write(pool, table, first, end, size, touched=())


@mistake(**WRITE, check="plain", says="all shared blocks of the table are copied, not only those about to be written.")
def copies_the_whole_table(pool, table, first, end, size):
    return _write(pool, table, first, end, size, touched=range(len(table)))


@mistake(**WRITE, check="plain", says="the old block is never let go of: it will have a holder for ever. Release it.")
def keeps_the_old_block(pool, table, first, end, size):
    return _write(pool, table, first, end, size, let_go=False)


@mistake(
    **WRITE, check="plain", says="a block of its own is copied too. Only a count above 1 means that others hold it."
)
def copies_what_is_its_own(pool, table, first, end, size):
    return _write(pool, table, first, end, size, least=0)


@mistake(
    **WRITE, check="edges", says="only the first block written is copied. Rows first to end − 1 may reach into more."
)
def copies_the_first_block_only(pool, table, first, end, size):
    return _write(pool, table, first, end, size, touched=[first // size] if first < end else ())


@mistake(
    **WRITE, check="edges", says="end is counted as a row to be written. Rows end at end − 1: ⌈end / size⌉ blocks."
)
def one_row_too_many(pool, table, first, end, size):
    return _write(pool, table, first, end, size, wanted=end // size + 1 if first < end else 0)


@mistake(**WRITE, check="edges", says="no row is written (first = end), so nothing may be copied.")
def copies_for_no_row(pool, table, first, end, size):
    wanted = -(-end // size)
    return _write(pool, table, first, end, size, touched=range(first // size, min(wanted, len(table))))


@mistake(
    **WRITE, check="edges", says="the pool is asked for more than it has, and raises. Count first, and return None."
)
def does_not_look_first(pool, table, first, end, size):
    return _write(pool, table, first, end, size, look=False)


@mistake(
    **WRITE,
    check="edges",
    says="copies are made before it turns out that blocks are lacking: None must change nothing.",
)
def gives_up_half_way(pool, table, first, end, size):
    copies = _write(pool, table, first, min(end, len(table) * size), size)
    grow = max(0, -(-end // size) - len(table))
    if copies is None or grow > pool.num_free:
        return None
    table.extend(pool.allocate(grow))
    return copies


# -- 2.4 --------------------------------------------------------------------------------------------------------------


def _gather(q, k_cache, v_cache, slots, valid=None, scale=None, tiled=False):
    group = len(q) // k_cache.shape[1]
    k, v = k_cache[slots], v_cache[slots]
    if tiled:
        k, v = k.repeat(1, group, 1), v.repeat(1, group, 1)
    else:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,thd->ht", q, k) * (scale or q.shape[1] ** -0.5)
    if valid is not None:
        scores = scores.masked_fill(~valid, float("-inf"))
    return torch.einsum("ht,thd->hd", torch.softmax(scores, dim=1), v)


def _slots(table, length, size):
    t = torch.arange(length)
    return torch.tensor(table)[t // size] * size + t % size


@mistake(
    **GATHER, check="plain", says="the sequence is read on from its first block. Only row 0 to size − 1 lie there."
)
def goes_on_after_the_first_block(q, k_cache, v_cache, table, length, size):
    return _gather(q, k_cache, v_cache, (table[0] * size + torch.arange(length)) % len(k_cache))


@mistake(
    **GATHER, check="edges", says="block and place are mixed up: the block is table[t // size], the place t mod size."
)
def mixes_up_block_and_place(q, k_cache, v_cache, table, length, size):
    t = torch.arange(length)
    return _gather(q, k_cache, v_cache, torch.tensor(table)[t % len(table)] * size + t // len(table))


@mistake(
    **GATHER,
    check="plain",
    says="blocks are counted from 1. Block b begins at slot b · size; block 0 is the null block.",
)
def counts_blocks_from_1(q, k_cache, v_cache, table, length, size):
    return _gather(q, k_cache, v_cache, _slots([block - 1 for block in table], length, size))


@mistake(**GATHER, check="plain", says="scores are q kᵀ, without the division by √d.")
def no_root_of_d(q, k_cache, v_cache, table, length, size):
    return _gather(q, k_cache, v_cache, _slots(table, length, size), scale=1.0)


@mistake(**GATHER, check="plain", says="scores are divided by the root of more than d: the sum is over one head's d.")
def root_of_all(q, k_cache, v_cache, table, length, size):
    return _gather(q, k_cache, v_cache, _slots(table, length, size), scale=q.numel() ** -0.5)


@mistake(**GATHER, check="plain", says="the newest row is left out. Rows 0 to length − 1 are read, its own among them.")
def one_row_too_few(q, k_cache, v_cache, table, length, size):
    return _gather(q, k_cache, v_cache, _slots(table, max(1, length - 1), size))


@mistake(
    **GATHER,
    check="edges",
    says="every block in the table is read whole, so that what others left takes weight. Read `length` rows.",
)
def reads_whole_blocks(q, k_cache, v_cache, table, length, size):
    return _gather(q, k_cache, v_cache, _slots(table, len(table) * size, size))


@mistake(
    **GATHER,
    check="edges",
    says="blocks are read whole and their scores masked, but a weight of 0 times NaN is NaN. Do not read them at all.",
)
def masks_what_it_need_not_read(q, k_cache, v_cache, table, length, size):
    valid = torch.arange(len(table) * size) < length
    return _gather(q, k_cache, v_cache, _slots(table, len(valid), size), valid)


@mistake(**GATHER, check="edges", says="query head h reads KV head h mod Hkv. It is h // group: neighbours share one.")
def heads_go_round(q, k_cache, v_cache, table, length, size):
    return _gather(q, k_cache, v_cache, _slots(table, length, size), tiled=True)


# -- 2.5 --------------------------------------------------------------------------------------------------------------


def _away(
    tables, who, wanted, free, order=None, shared=True, myself=True, stop=True, more=False, whole=True, down=True,
    spared=False, frees=None,
):  # fmt: skip
    holders: dict[int, int] = {}
    for table in tables.values():
        for block in table:
            holders[block] = holders.get(block, 0) + 1
    gone = []
    for name in order or reversed(tables):
        if free >= wanted + more:
            break
        if name == who and not myself:
            continue
        if name == who and spared:
            break
        gone.append(name)
        if name == who and stop:
            break
        freed = 0
        for block in tables[name]:
            holders[block] -= down
            freed += frees(block, holders) if frees else (holders[block] == 0 + (not down) or not shared)
        free += freed if whole else min(1, freed)
    return gone


@mistake(**AWAY, says="the first to have come gives way. Then nobody is sure to get on: take the last.")
def the_first_gives_way(tables, who, wanted, free):
    return _away(tables, who, wanted, free, order=list(tables))


@mistake(**AWAY, says="the one with most blocks gives way. It is the last to have come, whatever it holds.")
def the_largest_gives_way(tables, who, wanted, free):
    return _away(tables, who, wanted, free, order=sorted(tables, key=lambda name: -len(tables[name])))


@mistake(**AWAY, says="a block that others hold too is counted as free. Only one whose last holder goes is.")
def shared_blocks_count_as_free(tables, who, wanted, free):
    return _away(tables, who, wanted, free, shared=False)


@mistake(**AWAY, says="a shared block is never counted as free, not even at its last holder. Count down as they go.")
def never_counts_down(tables, who, wanted, free):
    return _away(tables, who, wanted, free, down=False)


@mistake(**AWAY, says="a block that two others share counts as free at the first of them. Wait for the last.")
def frees_what_two_others_share(tables, who, wanted, free):
    def frees(block, holders):
        return block not in tables[who] and holders[block] < 3

    return _away(tables, who, wanted, free, down=False, frees=frees)


@mistake(**AWAY, says="who asks is spared: when its turn has come it gives way as well, and is named.")
def spares_who_asks(tables, who, wanted, free):
    return _away(tables, who, wanted, free, spared=True)


@mistake(**AWAY, says="what is free already was left out: `free` counts towards `wanted`.")
def ignores_what_is_free(tables, who, wanted, free):
    return _away(tables, who, wanted, 0)


@mistake(
    **AWAY, says="who asks is passed over and an older one gives way for it. It gives way itself when its turn comes."
)
def never_gives_way_itself(tables, who, wanted, free):
    return _away(tables, who, wanted, free, myself=False)


@mistake(**AWAY, says="it goes on after who asks has given way. Then nothing is lacking any more.")
def goes_on_after_itself(tables, who, wanted, free):
    return _away(tables, who, wanted, free, stop=False)


@mistake(**AWAY, says="one gives way though enough is free already: stop at free ≥ wanted.")
def one_block_more_than_wanted(tables, who, wanted, free):
    return _away(tables, who, wanted, free, more=True)


@mistake(
    **AWAY, says="each gives up one block. A sequence gives up all of its own, since it can do nothing with a part."
)
def gives_up_a_block_at_a_time(tables, who, wanted, free):
    return _away(tables, who, wanted, free, whole=False)


# -- 2.6 --------------------------------------------------------------------------------------------------------------


@mistake(**BREAK, says="no block is ever shared: without a fork, counts are 0 or 1 and the first release is the last.")
def nothing_is_shared():
    return [("take", "A", 4), ("drop", "A"), ("take", "B", 4)]


@mistake(**BREAK, says="nobody takes a block that was let go of while another still holds it.")
def nobody_takes_while_it_is_held():
    return [("take", "A", 2), ("fork", "A", "B"), ("drop", "B"), ("drop", "A"), ("take", "C", 4), ("drop", "C")]


@mistake(
    **BREAK, says="after a shared block's last holder has gone, nobody wants all four blocks: a leak stays unseen."
)
def nobody_wants_all():
    return [("take", "A", 2), ("fork", "A", "B"), ("drop", "B"), ("take", "C", 2), ("drop", "C"), ("take", "D", 2)]


@mistake(**BREAK, says="the pool is never emptied, so the block that should not be there is never handed out.")
def never_empties_the_pool():
    return [("take", "A", 1), ("fork", "A", "B"), ("drop", "B"), ("take", "C", 1), ("drop", "C"), ("drop", "A")]


@mistake(**BREAK, says="the trace is longer than 10 actions.")
def too_long():
    return [*nothing_is_shared.version(), ("drop", "B"), *[("take", "C", 1), ("drop", "C")] * 4]


# -- 2.7 --------------------------------------------------------------------------------------------------------------


def _blocks(
    q, k_cache, v_cache, table, length, size, scale, limits=None, whole=False, slot_of=None, key_of=None, end=0,
    update=online_softmax_update, finish=lambda *state: finish_state(*state)[0],
):  # fmt: skip
    if limits is None:
        limits = torch.arange(len(q)) + length - len(q)
    state = empty_state(q)
    for start in range(0, end or length, size):
        count = size if whole else min(size, length - start)
        slot = table[start // size] * size if slot_of is None else slot_of(start)
        keys = torch.arange(start, start + count) if key_of is None else key_of(slot, count)
        scores = q @ k_cache[slot : slot + count].T * scale
        scores = scores.masked_fill(keys > limits.to(q.device)[:, None], float("-inf"))
        state = update(*state, scores, v_cache[slot : slot + count])
    return finish(*state)


@mistake(
    **BLOCKS,
    says="the last block is read whole. Its scores are masked, but a weight of 0 times what others left may be NaN.",
)
def reads_the_last_block_whole(q, k_cache, v_cache, table, length, size, scale):
    return _blocks(q, k_cache, v_cache, table, length, size, scale, whole=True)


@mistake(
    **BLOCKS, says="the mask compares slots of the cache with rows of the sequence. Count rows: start, start + 1, …"
)
def masks_by_slot(q, k_cache, v_cache, table, length, size, scale):
    return _blocks(
        q, k_cache, v_cache, table, length, size, scale, key_of=lambda slot, count: torch.arange(slot, slot + count)
    )


@mistake(**BLOCKS, says="the mask is top left: in decode the one query sees row 0 only. Limits are i + length − N_q.")
def top_left_mask(q, k_cache, v_cache, table, length, size, scale):
    return _blocks(q, k_cache, v_cache, table, length, size, scale, limits=torch.arange(len(q)))


@mistake(**BLOCKS, says="there is no mask. In prefill a query must not see the rows after it.")
def no_mask(q, k_cache, v_cache, table, length, size, scale):
    return _blocks(q, k_cache, v_cache, table, length, size, scale, limits=torch.full((len(q),), length))


@mistake(**BLOCKS, says="rows are read on from the first block, as if the sequence lay in one piece. Ask the table.")
def ignores_the_table(q, k_cache, v_cache, table, length, size, scale):
    first = table[0] * size
    return _blocks(
        q, k_cache, v_cache, table, length, size, scale, slot_of=lambda start: min(first + start, len(k_cache) - size)
    )


@mistake(**BLOCKS, says="scores are divided by √d, but the engine gives a scale of its own.")
def own_scale(q, k_cache, v_cache, table, length, size, scale):
    return _blocks(q, k_cache, v_cache, table, length, size, q.shape[1] ** -0.5)


@mistake(
    **BLOCKS,
    says="the loop goes over the padding too: no row of the sequence is there. Stop when all `length` are read.",
)
def walks_over_the_padding(q, k_cache, v_cache, table, length, size, scale):
    return _blocks(q, k_cache, v_cache, table, length, size, scale, end=len(table) * size)


@mistake(**BLOCKS, says="the mask is off by one: query i sees row i + length − N_q, its own, as well.")
def does_not_see_itself(q, k_cache, v_cache, table, length, size, scale):
    limits = (torch.arange(len(q)) + length - len(q) - 1).clamp(min=0)
    return _blocks(q, k_cache, v_cache, table, length, size, scale, limits=limits)


@mistake(**BLOCKS, says="the mask is off by one: query i sees one row too many, i + length − N_q + 1.")
def sees_the_next(q, k_cache, v_cache, table, length, size, scale):
    limits = torch.arange(len(q)) + length - len(q) + 1
    return _blocks(q, k_cache, v_cache, table, length, size, scale, limits=limits)


@mistake(**BLOCKS, says="the sum was never divided by l. finish_state does it.")
def forgets_to_divide(q, k_cache, v_cache, table, length, size, scale):
    return _blocks(q, k_cache, v_cache, table, length, size, scale, finish=lambda *state: state[2])


@mistake(
    **BLOCKS,
    says="blocks are added up as they are, though each has a maximum of its own. Rescale older work when it rises.",
)
def never_rescales(q, k_cache, v_cache, table, length, size, scale):
    def update(m, l, acc, scores, values):  # noqa: E741
        m_new, own_l, own = online_softmax_update(*empty_state(q), scores, values)
        return torch.maximum(m, m_new), l + own_l, acc + own

    return _blocks(q, k_cache, v_cache, table, length, size, scale, update=update)


@mistake(**BLOCKS, says="exp overflows where scores are large. Subtract the largest so far before you take exp.")
def takes_exp_of_the_scores(q, k_cache, v_cache, table, length, size, scale):
    def update(m, l, acc, scores, values):  # noqa: E741
        p = torch.exp(scores)
        return m, l + p.sum(dim=-1), acc + p @ values

    return _blocks(
        q,
        k_cache,
        v_cache,
        table,
        length,
        size,
        scale,
        update=update,
        finish=lambda _, total, acc: acc / total[:, None],
    )
