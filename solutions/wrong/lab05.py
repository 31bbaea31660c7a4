"""Lab 05's classic mistakes, each a wrong version and the sentence for the learner who made it."""

from minillm.course.checks import mistake

BY_HAND = {"exercise": "5.1", "name": "by_hand", "check": "by hand"}
INSERT = {"exercise": "5.2", "name": "insert"}
EVICT = {"exercise": "5.3", "name": "evict"}
ORDER = {"exercise": "5.4", "name": "in_order"}
BREAK = {"exercise": "5.5", "name": "exposing_actions", "check": "exposed"}
LOOKUP = {"exercise": "5.6", "name": "lookup"}


# -- 5.1 --------------------------------------------------------------------------------------------------------------


def _by_hand(**changed):
    right = {"found": [0, 2, 3, 0], "edges": 6, "tokens": 9, "hit rate": 5 / 14, "whole": ["abeg", "xy"]}
    return right | {name.replace("_", " "): value for name, value in changed.items()}


@mistake(
    **BY_HAND, says="abeg is compared with abcd only. The tree knows abef as well, which it follows one token more."
)
def compares_with_the_first():
    return _by_hand(found=[0, 2, 2, 0], hit_rate=4 / 14)


@mistake(**BY_HAND, says="these are prompts, or leaves. What they have in common is an edge too: ab, and e below it.")
def counts_leaves():
    return _by_hand(edges=4)


@mistake(**BY_HAND, says="these are all tokens asked. What is found is kept once.")
def counts_shared_tokens_twice():
    return _by_hand(tokens=14)


@mistake(**BY_HAND, says="that is the share of prompts that found something. A hit rate counts tokens.")
def counts_prompts_that_hit():
    return _by_hand(hit_rate=2 / 4)


@mistake(**BY_HAND, says="the newest leaves have gone here. The least recently used go first: cd, then f.")
def evicts_the_newest():
    return _by_hand(whole=["abcd", "abef"])


@mistake(
    **BY_HAND, says="one prompt only has gone. Its leaf cd frees 2 tokens, for ab is used by others: one more goes."
)
def lets_a_whole_prompt_go():
    return _by_hand(whole=["abef", "abeg", "xy"])


# -- 5.2 --------------------------------------------------------------------------------------------------------------


def _insert(
    root, tokens, split=True, deep=True, whole=False, empty_leaf=False, all_tokens=False, relink=True, rekey=True,
    parent=True, locks=True, swap=False, children=True, last=True, half=True, rest_of_edge=False,
):  # fmt: skip
    """Right unless one of the switches says otherwise."""
    node, found = root, 0
    Node = type(root)
    while found < len(tokens) and tokens[found] in node.children:
        child = node.children[tokens[found]]
        rest, same = tokens[found:], 0
        while same < min(len(child.tokens), len(rest)) and child.tokens[same] == rest[same]:
            same += 1
        found += len(child.tokens) if whole else same
        if same < len(child.tokens):
            if not split:
                node = child
                break
            if not half and same == len(rest):
                return found
            if swap:  # the node becomes the upper half
                lower = Node(child.tokens[same:], child)
                lower.children, lower.locks, lower.last_use = child.children, child.locks, child.last_use
                child.tokens, child.children = child.tokens[:same], {lower.tokens[0]: lower}
                node = child
                break
            upper = Node(child.tokens[:same], node)
            if locks:
                upper.locks = child.locks
            if last:
                upper.last_use = child.last_use
            if relink:
                node.children[child.tokens[0]] = upper
            first = child.tokens[0]
            child.tokens = child.tokens if rest_of_edge else child.tokens[same:]
            if parent:
                child.parent = upper
            if not children:
                child.children = {}
            upper.children[child.tokens[0] if rekey else first] = child
            node = upper
            break
        node = child
        if not deep:
            break
    if found < len(tokens) or empty_leaf:
        key = tokens[found] if found < len(tokens) else ""
        node.children[key] = Node(tokens if all_tokens else tokens[found:], node)
    return found


@mistake(**INSERT, check="plain", says="the edge isn't cut where they part: the rest hangs below all of it.")
def does_not_split(root, tokens):
    return _insert(root, tokens, split=False)


@mistake(**INSERT, check="plain", says="the walk ends after one edge. While whole edges match, go on below them.")
def walks_one_edge(root, tokens):
    return _insert(root, tokens, deep=False)


@mistake(**INSERT, check="plain", says="a whole edge is counted as found, though the prompt parts from it halfway.")
def counts_the_whole_edge(root, tokens):
    return _insert(root, tokens, whole=True)


@mistake(
    **INSERT, check="plain", says="a prompt that is there already got an empty leaf. Nothing is left: add nothing."
)
def adds_an_empty_leaf(root, tokens):
    return _insert(root, tokens, empty_leaf=True)


@mistake(**INSERT, check="plain", says="the new leaf has the whole prompt. What stands above it is not repeated.")
def repeats_the_prompt(root, tokens):
    return _insert(root, tokens, all_tokens=True)


@mistake(
    **INSERT, check="plain", says="the parent still leads to the lower half: put the upper half into its children."
)
def does_not_relink(root, tokens):
    return _insert(root, tokens, relink=False)


@mistake(**INSERT, check="plain", says="the lower half kept the tokens that the upper half has now. Cut them off.")
def keeps_the_whole_edge_below(root, tokens):
    return _insert(root, tokens, rest_of_edge=True)


@mistake(
    **INSERT,
    check="plain",
    says="the lower half is filed under the first token of the whole edge. It begins with another now.",
)
def keeps_the_old_key(root, tokens):
    return _insert(root, tokens, rekey=False)


@mistake(**INSERT, check="edges", says="a prompt that ends within an edge must cut it too, so that a node ends there.")
def no_split_at_the_end(root, tokens):
    return _insert(root, tokens, half=False)


@mistake(**INSERT, check="edges", says="the lower half's `parent` is still the old one: it must be the upper half.")
def forgets_the_parent(root, tokens):
    return _insert(root, tokens, parent=False)


@mistake(**INSERT, check="edges", says="the upper half is not locked. Who uses the lower half uses it too.")
def forgets_the_locks(root, tokens):
    return _insert(root, tokens, locks=False)


@mistake(**INSERT, check="edges", says="the upper half was never used, it says: give it the node's `last_use`.")
def forgets_the_last_use(root, tokens):
    return _insert(root, tokens, last=False)


@mistake(**INSERT, check="edges", says="what hung below the node is lost in the split. It stays below the lower half.")
def loses_the_children(root, tokens):
    return _insert(root, tokens, children=False)


@mistake(
    **INSERT,
    check="edges",
    says="the node became the upper half. Whoever holds it means its end, so it must stay the lower one.",
)
def node_becomes_the_upper_half(root, tokens):
    return _insert(root, tokens, swap=True)


# -- 5.3 --------------------------------------------------------------------------------------------------------------


def _evict(
    root, num_tokens, newest=False, inner=False, locked=False, once=False, enough=None, edge=False, remove=True,
    count_leaves=False, below_locked=False, stop=False, first=False, with_root=False, longest=False,
):  # fmt: skip
    """Right unless one of the switches says otherwise."""
    gone, freed, leaves = [], 0, None
    while (freed <= num_tokens if enough == "over" else freed < num_tokens or (first and not gone)) or enough == "all":
        below = list(root.children.values())
        for node in below:
            below += node.children.values()
        if with_root:
            below.append(root)
        candidates = [n for n in below if inner or not n.children]
        if stop and candidates and min(candidates, key=lambda n: n.last_use).locks:
            break
        candidates = [n for n in candidates if locked or not n.locks]
        if below_locked:
            candidates = [n for n in candidates if not n.parent.locks]
        if once:
            leaves = candidates if leaves is None else leaves
            candidates = [n for n in leaves if n.parent.children.get(n.tokens[0]) is n]
        if not candidates:
            break
        if longest:
            leaf = max(candidates, key=lambda n: (len(n.tokens), -n.last_use))
        else:
            leaf = (max if newest else min)(candidates, key=lambda n: n.last_use)
        if leaf is root:
            gone.append("")
            break
        if remove:
            del leaf.parent.children[leaf.tokens[0]]
        freed += 1 if count_leaves else len(leaf.tokens)
        prefix, node = "", leaf
        while node.parent is not None:
            prefix, node = node.tokens + prefix, node.parent
        gone.append(leaf.tokens if edge else prefix)
        if not remove and len(gone) > 20:
            break
    return gone


@mistake(**EVICT, check="plain", says="the most recently used goes. The least recently used has the smallest last_use.")
def newest_first(root, num_tokens):
    return _evict(root, num_tokens, newest=True)


@mistake(**EVICT, check="plain", says="the longest leaf goes first. The order is that of last_use.")
def longest_first(root, num_tokens):
    return _evict(root, num_tokens, longest=True)


@mistake(**EVICT, check="plain", says="one that is locked has gone: somebody reads its KV in the next pass.")
def ignores_locks(root, num_tokens):
    return _evict(root, num_tokens, locked=True)


@mistake(**EVICT, check="plain", says="the leaves were collected once. A node whose last child has gone is one, too.")
def collects_leaves_once(root, num_tokens):
    return _evict(root, num_tokens, once=True)


@mistake(**EVICT, check="plain", says="one leaf too many: stop as soon as num_tokens are free.")
def one_too_many(root, num_tokens):
    return _evict(root, num_tokens, enough="over")


@mistake(**EVICT, check="plain", says="everything that is idle has gone. Stop as soon as num_tokens are free.")
def clears_all(root, num_tokens):
    return _evict(root, num_tokens, enough="all")


@mistake(**EVICT, check="plain", says="that is the leaf's edge. A prefix is all tokens from the root on.")
def returns_edges(root, num_tokens):
    return _evict(root, num_tokens, edge=True)


@mistake(**EVICT, check="plain", says="the leaf is still in its parent's children.")
def does_not_remove(root, num_tokens):
    return _evict(root, num_tokens, remove=False)


@mistake(**EVICT, check="plain", says="leaves are counted. What must become free is num_tokens tokens.")
def counts_leaves_evicted(root, num_tokens):
    return _evict(root, num_tokens, count_leaves=True)


@mistake(
    **EVICT,
    check="edges",
    says="an inner node has gone, and with it all below. Its KV is their beginning: leaves only.",
)
def takes_inner_nodes(root, num_tokens):
    return _evict(root, num_tokens, inner=True)


@mistake(**EVICT, check="edges", says="the root was let go. It has no tokens; if nothing else is left, stop.")
def takes_the_root(root, num_tokens):
    return _evict(root, num_tokens, with_root=True)


@mistake(**EVICT, check="edges", says="a leaf has gone though 0 tokens were wanted. Ask before the first one, too.")
def takes_one_at_least(root, num_tokens):
    return _evict(root, num_tokens, first=True)


@mistake(
    **EVICT,
    check="edges",
    says="an idle leaf below a locked node stays. A lock keeps the way up, not what hangs below.",
)
def spares_what_hangs_below_a_lock(root, num_tokens):
    return _evict(root, num_tokens, below_locked=True)


@mistake(
    **EVICT, check="edges", says="it stops at the oldest leaf because that is locked. Pass over it: others may go."
)
def stops_at_a_locked_one(root, num_tokens):
    return _evict(root, num_tokens, stop=True)


@mistake(**EVICT, check="edges", says="min() of nothing: if no leaf may go, stop and return what has gone.")
def fails_with_nothing_idle(root, num_tokens):
    gone = _evict(root, num_tokens)
    if not gone and num_tokens:
        raise ValueError("min() iterable argument is empty")
    return gone


# -- 5.4 --------------------------------------------------------------------------------------------------------------


def _in_order(
    waiting, cached, patience, most, sign=-1, reverse=False, share=False, starved=True, fair=True, limit=True,
    at=False, last=False, always=False,
):  # fmt: skip
    def key(request):
        _, prompt, overtaken = request
        long = starved and (overtaken > patience if at else overtaken >= patience)
        score = cached(prompt) / len(prompt) if share else cached(prompt)
        if long and fair:
            return (2 if last else 0), 0
        return (0 if long else 1), sign * score

    names = [name for name, _, _ in waiting]
    if always:
        for _, prompt, _ in waiting:
            cached(prompt)
    if limit and len(waiting) > most:
        return names
    if reverse:  # of equals the last one first
        return [name for name, _, _ in sorted(reversed(waiting), key=key)]
    return [name for name, _, _ in sorted(waiting, key=key)]


@mistake(**ORDER, check="plain", says="the shortest prefix goes first. sorted() begins with the smallest: negate it.")
def shortest_first(*args):
    return _in_order(*args, sign=1)


@mistake(**ORDER, check="plain", says="of equals the last comes first. Arrival decides: sort ascending, by −tokens.")
def last_of_equals_first(*args):
    return _in_order(*args, reverse=True)


@mistake(
    **ORDER, check="plain", says="the share of the prompt decides. What counts is tokens that need not be computed."
)
def by_share(*args):
    return _in_order(*args, share=True)


@mistake(**ORDER, check="plain", says="nobody is ever starved here: `patience` has no effect.")
def ignores_patience(*args):
    return _in_order(*args, starved=False)


@mistake(**ORDER, check="plain", says="those that were overtaken too often go last. They go first.")
def starved_last(*args):
    return _in_order(*args, last=True)


@mistake(**ORDER, check="edges", says="among the starved the cache decides again. They go in order of arrival.")
def starved_by_prefix(*args):
    return _in_order(*args, fair=False)


@mistake(
    **ORDER,
    check="edges",
    says="who was overtaken exactly `patience` times is not helped. Once that is reached, it goes first.",
)
def starved_too_late(*args):
    return _in_order(*args, at=True)


@mistake(**ORDER, check="edges", says="more than `most` wait and are ordered all the same. Then arrival decides.")
def ignores_most(*args):
    return _in_order(*args, limit=False)


@mistake(
    **ORDER, check="edges", says="prompts are looked up although more than `most` wait: that is the cost to be saved."
)
def looks_up_in_vain(*args):
    return _in_order(*args, always=True)


# -- 5.5 --------------------------------------------------------------------------------------------------------------

EXPOSING = [("ask", "x", "ab"), ("ask", "x", "abc"), ("evict", 1), ("ask", "x", "ab"), ("ask", "x", "ac")]


@mistake(**BREAK, says="nobody asks under another salt for what is there: a cache that ignores salts finds the same.")
def one_salt():
    return EXPOSING


@mistake(**BREAK, says="every prompt goes on where another ended, so that no edge needs to be split. Let two part.")
def nothing_parts():
    return [*EXPOSING[:4], ("ask", "y", "ab")]


@mistake(
    **BREAK,
    says="nothing was evicted, or nobody asked for it afterwards: an inner node that has gone is missed by no one.",
)
def never_evicts():
    return [("ask", "x", "ab"), ("ask", "x", "ac"), ("ask", "y", "ab")]


@mistake(**BREAK, says="there are more than six actions. One eviction and one question for each mistake are enough.")
def too_many_actions():
    return [*EXPOSING, ("ask", "y", "ab"), ("ask", "y", "cc")]


@mistake(**BREAK, says='an action is ("ask", "x" or "y", letters a to d, at most 6) or ("evict", a number).')
def no_action():
    return [*EXPOSING, ("ask", "y", "abxy")]


# -- 5.6 --------------------------------------------------------------------------------------------------------------


def _lookup(
    root, tokens, size, place=True, childs=True, cut=True, down=False, count_edge=False, deep=True, above=False,
    flat=False, stop=True,
):  # fmt: skip
    """Right unless one of the switches says otherwise."""
    node, found, blocks = root, 0, []
    while (child := node.children.get(tokens[found : found + 1])) is not None:
        edge, rest, same = child.tokens, tokens[found:], 0
        while same < min(len(edge), len(rest)) and edge[same] == rest[same]:
            same += 1
        before, node, found = node, child, found + (len(edge) if count_edge else same)
        first = child.start // size
        own = child.blocks[: -(-found // size) - first] if cut else list(child.blocks)
        if not place:
            blocks = blocks + own
        elif not childs and len(blocks) > first:
            blocks = blocks + own[1:]
        else:
            blocks = blocks[:first] + own
        if found < child.end or not deep or (count_edge and same < len(edge)):
            if above and found < child.end:
                node = before
            if stop or not node.children:
                break
    if down:
        found = found // size * size
        blocks = blocks[: found // size]
    return node, found, [b for entry in blocks for b in entry] if flat else blocks


@mistake(
    **LOOKUP,
    check="blocks",
    says="a child's blocks are put behind the parent's. If they meet in a block, it counts once.",
)
def appends_blocks(root, tokens, size):
    return _lookup(root, tokens, size, place=False)


@mistake(
    **LOOKUP,
    check="blocks",
    says="where they meet in a block, the parent's was taken. Only the child's has the child's rows.",
)
def keeps_the_parents_block(root, tokens, size):
    return _lookup(root, tokens, size, childs=False)


@mistake(
    **LOOKUP, check="blocks", says="all blocks of the last edge are there, though the prompt parts from it before."
)
def takes_all_blocks(root, tokens, size):
    return _lookup(root, tokens, size, cut=False)


@mistake(**LOOKUP, check="blocks", says="the match is rounded down to whole blocks. Any token counts here.")
def whole_blocks_only(root, tokens, size):
    return _lookup(root, tokens, size, down=True)


@mistake(**LOOKUP, check="blocks", says="a whole edge is counted as found, though the prompt parts from it halfway.")
def counts_whole_edges(root, tokens, size):
    return _lookup(root, tokens, size, count_edge=True)


@mistake(**LOOKUP, check="blocks", says="the walk ends after one edge. While whole edges match, go on below them.")
def looks_at_one_edge(root, tokens, size):
    return _lookup(root, tokens, size, deep=False)


@mistake(
    **LOOKUP, check="blocks", says="of an edge reached in part the parent is returned. The deepest node is the child."
)
def returns_the_parent(root, tokens, size):
    return _lookup(root, tokens, size, above=True)


@mistake(
    **LOOKUP,
    check="blocks",
    says="blocks are plain numbers. An entry of `blocks` has an id for each KV group: keep it.",
)
def flattens_blocks(root, tokens, size):
    return _lookup(root, tokens, size, flat=True)
