"""Prefix caches by themselves: over a pool of blocks whose every row remembers what was written there."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from minillm.memory.block_hash import BlockHashCache
from minillm.memory.block_pool import BlockPool, IntegrityError
from minillm.memory.prefix_cache import Match, Node, PrefixCache
from minillm.memory.radix_cache import RadixCache


class Users:
    """Plays the requests of a cache: takes blocks, writes them, leaves them to the cache, lets go.

    A row's content is the extra and all tokens up to its own, which is what its KV depends on.
    """

    def __init__(self, cache: PrefixCache):
        self.cache, self.pool, self.size = cache, cache.pool, cache.block_size
        self.rows: dict[tuple[int, int], tuple] = {}  # (block, row in it) -> what is written there
        self.locked: list[Node] = []

    def serve(self, tokens, extra=None) -> Node | None:
        """What a request does from its first token to its last. The node that it locks; None if blocks lack."""
        tokens = tuple(tokens)
        match = self.match(tokens, extra)
        node = self.cache.lock(match)
        whole = match.num_tokens // self.size
        new = -(-len(tokens) // self.size) - whole
        if new > self.pool.num_free + self.cache.num_idle_blocks:
            self.cache.unlock(node)
            return None
        if new > self.pool.num_free:
            lacking = new - self.pool.num_free
            assert self.cache.evict(lacking) >= lacking
        blocks = [block for (block,) in match.blocks[:whole]]
        self.pool.hold(blocks)
        blocks += self.pool.allocate(new)
        for i in range(whole * self.size, len(tokens)):  # computed, or copied from a block shared in part
            self.rows[blocks[i // self.size], i % self.size] = extra, tokens[: i + 1]
        deepest = self.cache.insert(tokens, [(block,) for block in blocks], extra)
        self.cache.hold(deepest)
        self.cache.unlock(node)
        self.pool.release(blocks)
        self.locked.append(deepest)
        return deepest

    def keep(self, tokens, extra=None) -> None:
        """Serve, and leave all of it idle."""
        node = self.serve(tokens, extra)
        assert node is not None
        self.let_go(node)

    def let_go(self, node: Node) -> None:
        self.locked.remove(node)
        self.cache.unlock(node)

    def match(self, tokens, extra=None) -> Match:
        """The cache's answer, whose every row must hold what it claims."""
        match = self.cache.match(tokens, extra)
        assert len(match.blocks) == -(-match.num_tokens // self.size)
        for i in range(match.num_tokens):
            (block,) = match.blocks[i // self.size]
            assert self.pool.ref_counts[block], "a block that is free"
            assert self.rows[block, i % self.size] == (extra, tuple(tokens[: i + 1])), f"row {i} is another prefix's"
        return match

    def check(self) -> bool:
        return self.cache.check_integrity() and self.pool.check_integrity(self.cache.owned_blocks())


def radix(blocks: int = 16, block_size: int = 1, page_size: int = 1) -> Users:
    return Users(RadixCache(BlockPool(blocks), block_size, page_size))


def hashed(blocks: int = 16, block_size: int = 1, **how) -> Users:
    return Users(BlockHashCache(BlockPool(blocks), block_size, **how))


# (kind, block size, tokens that are shared as one)
SHAPES = [(radix, 1, 1), (radix, 4, 1), (radix, 4, 2), (radix, 4, 4), (radix, 16, 1), (radix, 16, 4), (radix, 16, 16)]
SHAPES += [(hashed, 1, 1), (hashed, 4, 4), (hashed, 16, 16)]
ALL = pytest.mark.parametrize("kind, size, unit", SHAPES, ids=lambda v: getattr(v, "__name__", v))


def make(kind, size: int, unit: int, blocks: int = 16) -> Users:
    return radix(blocks, size, unit) if kind is radix else hashed(blocks, size)


def edges(users: Users) -> list[tuple]:
    """(start, tokens) of every node, sorted."""
    return sorted((node.start, node.tokens) for node in users.cache.nodes())


# -- match and insert ---------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("common", [0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 40])
def test_the_longest_prefix_is_found_in_whole_units(kind, size, unit, common):
    users = make(kind, size, unit, blocks=160)
    first, second = list(range(100, 140)), [*range(100, 100 + common), *range(200, 240 - common)]
    users.keep(first)
    assert users.match(second).num_tokens == common // unit * unit
    users.keep(second)
    for tokens in (first, second):
        assert users.match(tokens).num_tokens == 40 // unit * unit
        assert users.match([*tokens, 7]).num_tokens == 40 // unit * unit
        for short in range(40):
            assert users.match(tokens[:short]).num_tokens == short // unit * unit
    assert users.match([1, *first]).num_tokens == 0
    assert users.match([]).num_tokens == 0
    assert users.check()


@ALL
def test_what_is_there_already_is_not_kept_twice(kind, size, unit):
    users = make(kind, size, unit, blocks=80)
    tokens = list(range(32))
    users.keep(tokens)
    before, free = edges(users), users.pool.num_free
    other = users.pool.allocate(32 // size)  # the same, computed by somebody else
    node = users.cache.insert(tokens, [(block,) for block in other])
    assert node.end == 32
    users.pool.release(other)
    assert (edges(users), users.pool.num_free) == (before, free)
    assert users.check()


@ALL
def test_a_shorter_one_adds_nothing_and_a_longer_one_its_end(kind, size, unit):
    users = make(kind, size, unit, blocks=80)
    tokens = list(range(48))
    users.keep(tokens[:32])
    free = users.pool.num_free
    users.keep(tokens[:16])
    assert users.pool.num_free == free and users.cache.num_tokens == 32
    users.keep(tokens)
    assert users.pool.num_free == free - 16 // size and users.cache.num_tokens == 48
    assert users.match(tokens).num_tokens == 48
    assert users.check()


def test_edges_are_as_long_as_they_can_be():
    users = radix()
    users.keep("abcd")
    assert edges(users) == [(0, tuple("abcd"))]
    users.keep("abxy")
    assert edges(users) == [(0, ("a", "b")), (2, ("c", "d")), (2, ("x", "y"))]
    users.keep("ab")
    users.keep("abcdef")
    assert edges(users) == [(0, ("a", "b")), (2, ("c", "d")), (2, ("x", "y")), (4, ("e", "f"))]
    users.keep("q")
    assert edges(users)[-1] == (4, ("e", "f")) and (0, ("q",)) in edges(users)
    assert users.check()


@pytest.mark.parametrize("at", range(1, 12))
def test_a_split_leaves_every_block_where_it_was(at):
    """At a block's end the halves have their own blocks; inside one both hold it, and it counts once."""
    users = radix(blocks=3, block_size=4)
    users.keep(range(12))
    (whole,) = users.cache.nodes()
    blocks = list(whole.blocks)
    upper = users.cache.lock(users.match(range(at)))
    (lower,) = upper.children.values()
    assert (upper.start, upper.end, lower.start, lower.end) == (0, at, at, 12)
    assert upper.blocks == blocks[: -(-at // 4)] and lower.blocks == blocks[at // 4 :]
    inside = at % 4 != 0
    for i, (block,) in enumerate(blocks):
        assert users.pool.ref_counts[block] == (2 if inside and i == at // 4 else 1)
    assert users.cache.num_idle_blocks == 3 - -(-at // 4), "the shared one is not free for the taking"
    assert users.match(range(12)).blocks == blocks
    assert users.check()
    users.cache.unlock(upper)
    assert users.cache.num_idle_blocks == 3 and users.cache.evict(3) == 3
    assert users.pool.num_free == 3 and not list(users.cache.nodes())


def test_a_block_split_twice_is_held_three_times_and_counts_once():
    users = radix(blocks=1, block_size=4)
    users.keep(range(4))
    for at in (2, 1, 3):
        users.cache.unlock(users.cache.lock(users.match(range(at))))
    assert [(start, len(tokens)) for start, tokens in edges(users)] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert users.pool.ref_counts[1] == 4 and users.cache.num_idle_blocks == 1
    assert users.check()
    assert users.cache.evict(1) == 1 and users.pool.num_free == 1


def test_a_branch_inside_a_block_has_a_copy_of_it():
    users = radix(blocks=8, block_size=4)
    users.keep("abcdef")
    users.keep("abXY")
    stem, copy = users.match("abcdef").blocks[0], users.match("abXY").blocks[0]
    assert stem != copy
    users.keep("abXYZ")
    assert users.match("abXYZ").blocks[0] == copy
    assert users.match("ab").blocks == [stem]
    assert users.pool.num_free == 8 - 4
    assert users.check()


@ALL
def test_extras_never_meet(kind, size, unit):
    users = make(kind, size, unit, blocks=160)
    tokens = list(range(32))
    extras = [None, (None, None), ("adapter", None), (None, "adapter"), ("adapter", "salt")]
    for number, extra in enumerate(extras):
        assert users.match(tokens, extra).num_tokens == 0, extras[:number]
        users.keep(tokens, extra)
        assert users.match(tokens, extra).num_tokens == 32
    blocks = [block for extra in extras for block in users.match(tokens, extra).blocks]
    assert len(set(blocks)) == len(blocks) == 5 * 32 // size
    assert users.check()
    assert users.cache.evict(10**9) == len(blocks) and users.cache._roots == {}, "no root is left behind"


def test_a_page_divides_a_block():
    for page in (0, 3, 8, -1):
        with pytest.raises(ValueError, match=f"page_size is {page}; it must divide block_size, 4"):
            RadixCache(BlockPool(1), 4, page)


def test_two_groups_go_together():
    """A token has a row in every KV group: blocks come in tuples, and are idle and evicted in tuples."""
    pool = BlockPool(12)
    cache = RadixCache(pool, 2)
    blocks = pool.allocate(6)
    cache.insert(range(6), [tuple(blocks[i : i + 2]) for i in (0, 2, 4)])
    pool.release(blocks)
    assert cache.num_idle_blocks == 6
    assert cache.evict(3) == 4, "whole tuples"
    assert cache.match(range(6)).blocks == [(1, 2)] and pool.num_free == 10
    assert cache.check_integrity()


# -- locks and eviction -------------------------------------------------------------------------------------------


@ALL
def test_what_is_locked_is_spared_and_the_rest_is_not(kind, size, unit):
    users = make(kind, size, unit, blocks=4)
    users.keep(range(4 * size))
    node = users.cache.lock(users.match(range(2 * size)))
    assert node.end == 2 * size and users.cache.num_idle_blocks == 2
    assert users.cache.evict(100) == 2
    assert users.match(range(4 * size)).num_tokens == 2 * size
    assert users.cache.evict(1) == 0 and users.check()
    users.cache.unlock(node)
    assert users.cache.num_idle_blocks == 2
    assert users.cache.evict(100) == 2 and users.pool.num_free == 4
    assert users.check()


@ALL
def test_a_lock_is_counted(kind, size, unit):
    users = make(kind, size, unit, blocks=3)
    users.keep(range(3 * size))
    first, second = (users.cache.lock(users.match(range(n * size))) for n in (3, 2))
    users.cache.unlock(first)
    assert users.cache.num_idle_blocks == 1, "the second still uses two of the three blocks"
    users.cache.unlock(second)
    assert users.cache.num_idle_blocks == 3
    with pytest.raises(IntegrityError, match="unlocked more often"):
        users.cache.unlock(second)


@ALL
def test_of_a_leaf_no_more_than_needed_is_taken_from_its_end(kind, size, unit):
    users = make(kind, size, unit, blocks=8)
    users.keep(range(5 * size))
    for left in (4, 3, 2, 1, 0):
        assert users.cache.evict(1) == 1
        assert users.match(range(5 * size)).num_tokens == left * size
        assert users.pool.num_free == 8 - left and users.check()
    assert users.cache.evict(1) == 0


@ALL
def test_leaves_go_in_order_of_last_use_and_then_their_parents(kind, size, unit):
    users = make(kind, size, unit, blocks=12)
    stem = list(range(2 * size))
    branches = {name: stem + [ord(name)] * (2 * size) for name in "abc"}
    for tokens in branches.values():
        users.keep(tokens)
    users.cache.unlock(users.cache.lock(users.match(branches["a"])))  # used again: b is the oldest now

    def cached() -> dict[str, int]:
        return {name: users.match(tokens).num_tokens // size for name, tokens in branches.items()}

    assert cached() == {"a": 4, "b": 4, "c": 4}
    seen = []
    while users.cache.evict(1):
        seen.append(tuple(cached().values()))
        assert users.check()
    assert seen == [(4, 3, 4), (4, 2, 4), (4, 2, 3), (4, 2, 2), (3, 2, 2), (2, 2, 2), (1, 1, 1), (0, 0, 0)]


@ALL
def test_a_dropped_node_takes_all_below_it_along(kind, size, unit):
    users = make(kind, size, unit, blocks=12)
    users.keep(range(4 * size))
    users.keep([*range(3 * size), *[99] * size])
    users.keep([5] * size)
    node = users.cache.lock(users.match(range(2 * size)))
    users.cache.unlock(node)
    users.cache.drop(node)
    left = users.match(range(4 * size)).num_tokens
    assert left == (size if kind is hashed else 0), "of a radix tree's edge all, of blocks one alone"
    assert users.match([5] * size).num_tokens == size
    assert users.cache.num_idle_blocks == 1 + left // size and users.pool.num_free == 11 - left // size
    assert users.check()


@ALL
def test_a_match_that_no_longer_stands_is_not_locked(kind, size, unit):
    users = make(kind, size, unit, blocks=4)
    users.keep(range(4 * size))
    match = users.match(range(3 * size))
    users.cache.evict(1)
    users.cache.unlock(users.cache.lock(match))  # what it names is all there
    match = users.match(range(3 * size))
    users.cache.evict(1)
    with pytest.raises(IntegrityError, match="evicted or split before it was locked"):
        users.cache.lock(match)
    match = users.match(range(2 * size))
    users.cache.evict(100)
    users.keep(range(2 * size))
    with pytest.raises(IntegrityError, match="evicted or split before it was locked"):
        users.cache.lock(match)
    assert users.check()


def test_a_match_whose_edge_was_split_below_it_is_not_locked():
    users = radix()
    users.keep(range(6))
    match = users.match(range(3))
    users.cache.unlock(users.cache.lock(users.match(range(4))))
    with pytest.raises(IntegrityError, match="evicted or split before it was locked"):
        users.cache.lock(match)
    assert users.check()


# -- hashes that collide ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_equal_hashes_never_give_another_prefix(values, seed):
    """``Users.match`` looks at every row; with so few hashes almost every block collides."""
    users = hashed(blocks=40, block_size=2, hash_function=lambda key: hash(key) % values)
    rng = random.Random(seed)
    for _ in range(60):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
        extra = rng.choice([None, "a"])
        users.keep(tokens, extra)
        users.match([*tokens, 1, 1], extra)
        assert len(list(users.cache.nodes())) <= values
        assert users.check()


def test_of_two_prefixes_with_one_hash_the_first_stays():
    users = hashed(blocks=8, block_size=2, hash_function=lambda key: 7)
    users.keep([1, 2])
    users.keep([3, 4])
    assert users.match([1, 2]).num_tokens == 2 and users.match([3, 4]).num_tokens == 0
    assert users.pool.num_free == 7, "what is not kept is not held"
    users.cache.evict(1)
    users.keep([3, 4])
    assert users.match([3, 4]).num_tokens == 2


# -- cost ---------------------------------------------------------------------------------------------------------


def cost(users: Users, tokens) -> int:
    before = users.cache.num_compared
    users.cache.match(tokens)
    return users.cache.num_compared - before


@ALL
def test_a_lookup_is_linear_in_what_it_finds(kind, size, unit):
    users = make(kind, size, unit, blocks=3000)
    n = 64 * size
    tokens = list(range(2 * n))
    users.keep(tokens)
    one, two = cost(users, tokens[:n]), cost(users, tokens)
    assert n <= one <= n + 2 * unit and 2 * n <= two <= 2 * n + 2 * unit
    for end in range(size, n, size):  # as many edges as there can be
        users.cache.unlock(users.cache.lock(users.match(tokens[:end])))
    assert n <= cost(users, tokens[:n]) <= 2 * n + 2 * unit
    assert cost(users, [-1] * 2 * n) <= unit, "it parts from all others at once"
    assert cost(users, [*tokens[:n], *[-1] * n]) <= 2 * n + 3 * unit, "what comes after is not looked at"


# -- against a dictionary -----------------------------------------------------------------------------------------


class Model:
    """What should be there, without tree or blocks: for each prefix of whole units its last use and its users."""

    def __init__(self, unit: int):
        self.unit = unit
        self.last_use: dict[tuple, int] = {}
        self.users: Counter = Counter()
        self.clock = 0

    def prefixes(self, tokens, extra) -> list[tuple]:
        return [(extra, tuple(tokens[:end])) for end in range(self.unit, len(tokens) + 1, self.unit)]

    def match(self, tokens, extra) -> int:
        there = [each for each in self.prefixes(tokens, extra) if each in self.last_use]
        return len(there[-1][1]) if there else 0

    def use(self, tokens, extra, count: int) -> None:
        self.clock += 1
        for each in self.prefixes(tokens, extra):
            self.last_use[each] = self.clock
            self.users[each] += count

    def idle_leaves(self) -> list[tuple]:
        parents = {(extra, tokens[: -self.unit]) for extra, tokens in self.last_use}
        return [each for each in self.last_use if each not in parents and not self.users[each]]

    def evict(self, count: int) -> None:
        """The least recently used leaves, one by one."""
        for _ in range(count):
            oldest = min(self.idle_leaves(), key=self.last_use.__getitem__)
            del self.last_use[oldest]


@ALL
@pytest.mark.parametrize("seed", range(2))
def test_random_operations_agree_with_a_dictionary(kind, size, unit, seed):
    """Twenty times 500 operations. Where a unit is a block, even what is evicted, and in which order, is the same."""
    rng = random.Random(seed)
    users, model = make(kind, size, unit, blocks=rng.randint(6, 16)), Model(unit)
    exact = size == unit
    inside: list[tuple] = []  # what the users that have not let go have locked: node, tokens, extra
    evicted = served = refused = 0

    def settle(before: set) -> None:
        """Take over what was evicted, and check that it might be."""
        there = {
            (extra, prefix) for extra, prefix in before if users.cache.match(prefix, extra).num_tokens == len(prefix)
        }
        gone = before - there
        assert not any(model.users[each] for each in gone), "somebody uses it"
        if gone:
            newest = max(model.last_use[each] for each in gone)
            for each in gone:
                del model.last_use[each]
            for extra, prefix in model.idle_leaves():
                if not any(e == extra and p[: len(prefix)] == prefix for e, p in gone):
                    assert model.last_use[extra, prefix] >= newest, "there was an older leaf"

    def evict(blocks: int) -> None:
        nonlocal evicted
        before, idle = set(model.last_use), users.cache.num_idle_blocks
        freed = users.cache.evict(blocks)
        assert freed == min(blocks, idle) and users.cache.num_idle_blocks == idle - freed
        evicted += freed
        if exact:
            model.evict(freed)
        else:
            settle(before)

    for _ in range(500):
        extra = rng.choice([None, None, "a"])
        tokens = tuple(rng.randrange(2) for _ in range(rng.randint(0, 4 * size)))
        choice = rng.random()
        if choice < 0.35:
            # As ``Users.serve``, the model told of each step.
            match = users.match(tokens, extra)
            assert match.num_tokens == model.match(tokens, extra)
            hit = tokens[: match.num_tokens]
            new = -(-len(tokens) // size) - match.num_tokens // size
            node = users.cache.lock(match)
            model.use(hit, extra, 1)
            if new > users.pool.num_free + users.cache.num_idle_blocks:
                refused += 1
                users.cache.unlock(node)
                model.use(hit, extra, -1)
            else:
                if new > users.pool.num_free:
                    evict(new - users.pool.num_free)
                users.cache.unlock(node)
                model.use(hit, extra, -1)
                deepest = users.serve(tokens, extra)
                assert deepest is not None and deepest.end == len(tokens) // unit * unit
                model.use(tokens, extra, 1)
                inside.append((deepest, tokens, extra))
                served += 1
        elif choice < 0.5:
            assert users.match(tokens, extra).num_tokens == model.match(tokens, extra)
        elif choice < 0.85 and inside:
            node, tokens, extra = inside.pop(rng.randrange(len(inside)))
            users.let_go(node)
            model.use(tokens, extra, -1)
        elif choice < 0.9:
            evict(rng.randint(1, 3))
        assert users.check()
        assert users.cache.num_tokens == unit * len(model.last_use)
    assert evicted > 20 and served > 50 and refused > 0


# -- planted faults -----------------------------------------------------------------------------------------------


def grown(kind) -> Users:
    """A stem with two branches, one locked, block size 2."""
    users = radix(12, 2) if kind is radix else hashed(12, 2)
    users.serve([1, 2, 3, 4, 5, 6])
    users.keep([1, 2, 3, 4, 7, 8])
    users.keep([9, 9])
    assert users.check()
    return users


def node_of(users: Users, *tokens) -> Node:
    return users.cache.match(tokens).node


LOCKED, IDLE, ALONE = (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 7, 8), (9, 9)


def wrong_count(users):
    users.cache.num_idle_blocks += 1


def lock_without_its_parents(users):
    node_of(users, *LOCKED).locks += 1


def lock_that_no_user_has(users):
    for each in node_of(users, *ALONE).path():
        each.locks += 1


def freed_block(users):
    users.pool.release(node_of(users, *LOCKED).blocks[0])


def block_that_somebody_uses(users):
    users.pool.hold(node_of(users, *IDLE).blocks[0])


def leaf_that_eviction_does_not_find(users):
    users.cache._leaves.clear()


def leaf_with_an_old_entry(users):
    node_of(users, *ALONE).last_use += 1000


def node_in_the_wrong_place(users):
    node_of(users, *ALONE).start = 2


def node_that_its_parent_does_not_find(users):
    node = node_of(users, *ALONE)
    node.parent.children["elsewhere"] = node.parent.children.pop(node.detail)


def node_without_tokens(users):
    node_of(users, *ALONE).tokens = ()


def block_too_few(users):
    node_of(users, *LOCKED).blocks = []


def block_too_many(users):
    node_of(users, *LOCKED).blocks.append((12,))


FAULTS = {
    wrong_count: "blocks are idle",
    lock_without_its_parents: "is locked and its parent is not",
    lock_that_no_user_has: "blocks are idle",
    freed_block: "holds a free block",
    block_that_somebody_uses: "is idle and somebody uses its block",
    leaf_that_eviction_does_not_find: "an idle leaf that eviction would not find",
    leaf_with_an_old_entry: "an idle leaf that eviction would not find",
    node_in_the_wrong_place: "hangs below one that ends at 0",
    node_that_its_parent_does_not_find: "is not found from its parent",
    node_without_tokens: "the node of tokens 0 to 0 has 1 blocks",
    block_too_few: "has 0 blocks of 2",
    block_too_many: "has 2 blocks instead of 1",
}


@pytest.mark.parametrize("kind", [radix, hashed])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(kind, fault):
    users = grown(kind)
    fault(users)
    with pytest.raises(IntegrityError, match=FAULTS[fault]):
        users.cache.check_integrity()


def test_a_match_is_plain_data():
    match = radix().match([1, 2])
    assert match == replace(match) and (match.num_tokens, match.blocks) == (0, [])
