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


@mistake(**BY_HAND, says="abeg begins with abe, as abef does: the edge ef is cut once more, behind e.")
def forgets_the_second_cut():
    return _by_hand(edges=5, tokens=10)


@mistake(**BY_HAND, says="the root is counted too. It has no edge above it: there is one edge less than nodes.")
def counts_the_root():
    return _by_hand(edges=7)


@mistake(**BY_HAND, says="that is found over kept. A hit rate is over all tokens *asked*, found or not.")
def divides_by_tokens_kept():
    return _by_hand(hit_rate=5 / 9)


@mistake(
    **BY_HAND, says="that is the mean of four shares. Tokens count alike, whichever prompt they are of: divide sums."
)
def averages_shares():
    return _by_hand(hit_rate=(0 + 2 / 4 + 3 / 4 + 0) / 4)


@mistake(**BY_HAND, says="a hit rate is a share here, 0 to 1, not percent.")
def gives_percent():
    return _by_hand(hit_rate=500 / 14)


@mistake(**BY_HAND, says="that is rounded. Give the fraction itself, such as 3 / 4, or more digits.")
def rounds_the_rate():
    return _by_hand(hit_rate=0.36)


@mistake(**BY_HAND, says="that is text. Without the quotes Python computes the fraction.")
def gives_text():
    return _by_hand(hit_rate="text")


@mistake(**BY_HAND, says="no dict was returned. Its keys: 'found', 'edges', 'tokens', 'hit rate', 'whole'.")
def returns_no_dict():
    return None


# -- 5.2 --------------------------------------------------------------------------------------------------------------


def _insert(
    root, tokens, split=True, deep=True, whole=False, empty_leaf=False, all_tokens=False, relink=True, rekey=True,
    parent=True, locks=True, swap=False, children=True, last=True, half=True, rest_of_edge=False, below=(),
    leaf_parent=None, upper_parent=None, lower=(), walked=(), by_edge=False, added=False, single=False,
    own_child=False,
):  # fmt: skip
    """Right unless one of the switches says otherwise."""
    node, found = root, 0
    Node = type(root)
    choice = {"root": root, "nobody": None}
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
            upper = Node(child.tokens[:same], choice.get(upper_parent, node))
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
            if own_child:
                upper.children[upper.tokens[0]] = upper
            for name in lower:
                setattr(child, name, 0)
            node = upper
            break
        node = child
        for name in walked:
            setattr(node, name, getattr(node, name) + 1)
        if not deep:
            break
    if found < len(tokens) or empty_leaf:
        left = tokens if all_tokens else tokens[found:]
        if by_edge and node.parent:
            left = tokens[len(node.tokens) :]
        above, kept = choice.get(leaf_parent, node), found
        while single and kept < len(tokens):
            node.children[tokens[kept]] = node = Node(tokens[kept], node)
            kept += 1
        if not single:
            leaf = node.children[tokens[found] if found < len(tokens) else ""] = Node(left, above)
            for name in below:
                setattr(leaf, name, getattr(node, name))
    return len(tokens) - found if added else found


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


@mistake(
    **INSERT, check="plain", says="each edge has one token. An edge holds as many as it can: all that is left of it."
)
def one_token_an_edge(root, tokens):
    return _insert(root, tokens, single=True)


@mistake(**INSERT, check="plain", says="that is the prompt's length. Return how many of its tokens were there already.")
def returns_the_length(root, tokens):
    _insert(root, tokens)
    return len(tokens)


def _whole_edges(root, tokens):
    """The deepest node that whole edges lead to, and the tokens down to it."""
    node, found = root, 0
    while (child := node.children.get(tokens[found : found + 1])) and tokens.startswith(child.tokens, found):
        node, found = child, found + len(child.tokens)
    return node, found


@mistake(
    **INSERT,
    check="plain",
    says="only whole edges count as found, like the chapter's `match_whole_edges`. What edge and prompt have in common "
    "before they part was there as well.",
)
def finds_whole_edges_only(root, tokens):
    found = _whole_edges(root, tokens)[1]
    _insert(root, tokens)
    return found


@mistake(
    **INSERT,
    check="plain",
    says="only whole edges are followed: the new leaf takes the place of the edge that begins alike. Cut that in two.",
)
def overwrites_the_edge(root, tokens):
    node, found = _whole_edges(root, tokens)
    if found < len(tokens):
        node.children[tokens[found]] = type(root)(tokens[found:], node)
    return found


@mistake(
    **INSERT,
    check="plain",
    says="a child is filed under all tokens of its edge. Its key in `children` is the first one alone.",
)
def files_under_the_edge(root, tokens):
    below = [root]
    for node in below:
        node.children = {child.tokens[0]: child for child in node.children.values()}
        below += node.children.values()
    found, below = _insert(root, tokens), [root]
    for node in below:
        below += node.children.values()
        node.children = {child.tokens: child for child in node.children.values()}
    return found


@mistake(**INSERT, check="plain", says="these are the tokens that were added. Return how many were there already.")
def returns_the_added(root, tokens):
    return _insert(root, tokens, added=True)


@mistake(
    **INSERT, check="plain", says="a node is returned, as the chapter's `insert` does. Here it is a number of tokens."
)
def returns_the_node(root, tokens):
    _insert(root, tokens)
    return type(root)()


@mistake(
    **INSERT,
    check="plain",
    says="a node has become its own child, so the way down never ends. Below the upper half is the old node.",
)
def is_its_own_child(root, tokens):
    return _insert(root, tokens, own_child=True)


@mistake(**INSERT, check="plain", says="nothing is returned. Return how many of the tokens were there already.")
def returns_no_count(root, tokens):
    _insert(root, tokens)


@mistake(
    **INSERT,
    check="plain",
    says="the leaf's tokens were counted from the last edge's beginning. All edges above it count: tokens[found:].",
)
def cuts_by_the_last_edge(root, tokens):
    return _insert(root, tokens, by_edge=True)


@mistake(**INSERT, check="edges", says="a prompt that ends within an edge must cut it too, so that a node ends there.")
def no_split_at_the_end(root, tokens):
    return _insert(root, tokens, half=False)


def _ends_within(root, tokens):
    """Whether a prompt that is there ends where no node does."""
    node, found = root, 0
    while found < len(tokens) and tokens[found] in node.children:
        node = node.children[tokens[found]]
        same = min(len(node.tokens), len(tokens) - found)
        if node.tokens[:same] != tokens[found : found + same]:
            return False
        if same < len(node.tokens):
            return True
        found += same
    return False


@mistake(
    **INSERT,
    check="edges",
    says="if a prompt ends within an edge, what hung below that is lost. It stays below the lower half.",
)
def loses_the_children_at_the_end(root, tokens):
    return _insert(root, tokens, children=not _ends_within(root, tokens))


@mistake(
    **INSERT,
    check="edges",
    says="if a prompt ends within an edge, the upper half's `parent` is the root. It's the node whose child was cut.",
)
def ends_below_the_root(root, tokens):
    return _insert(root, tokens, upper_parent="root" if _ends_within(root, tokens) else None)


@mistake(
    **INSERT,
    check="edges",
    says="if a prompt ends within an edge, the lower half's `parent` is still the old one: it must be the upper half.",
)
def forgets_the_parent_at_the_end(root, tokens):
    return _insert(root, tokens, parent=not _ends_within(root, tokens))


@mistake(**INSERT, check="edges", says="the lower half's `parent` is still the old one: it must be the upper half.")
def forgets_the_parent(root, tokens):
    return _insert(root, tokens, parent=False)


@mistake(**INSERT, check="edges", says="the upper half has no parent. Hand it the node above, which leads to it.")
def upper_half_without_parent(root, tokens):
    return _insert(root, tokens, upper_parent="nobody")


@mistake(
    **INSERT,
    check="edges",
    says="the upper half's `parent` is the root, even deep in the tree. It's the node whose child was cut.",
)
def upper_half_below_the_root(root, tokens):
    return _insert(root, tokens, upper_parent="root")


@mistake(**INSERT, check="edges", says="the new leaf has no parent. Hand it the node below which it hangs.")
def leaf_without_parent(root, tokens):
    return _insert(root, tokens, leaf_parent="nobody")


@mistake(
    **INSERT, check="edges", says="the new leaf's `parent` is the root. It's the node whose `children` it stands in."
)
def leaf_below_the_root(root, tokens):
    return _insert(root, tokens, leaf_parent="root")


@mistake(
    **INSERT,
    check="edges",
    says="the new leaf took over `locks`. Nobody uses it yet: only an upper half takes over, from its lower one.",
)
def leaf_takes_locks(root, tokens):
    return _insert(root, tokens, below=("locks",))


@mistake(
    **INSERT,
    check="edges",
    says="the new leaf took over `last_use`. It is 0 as long as nobody has used it; only an upper half takes over.",
)
def leaf_takes_the_last_use(root, tokens):
    return _insert(root, tokens, below=("last_use",))


@mistake(**INSERT, check="edges", says="the lower half's `locks` are gone. It is the old node, with all its users.")
def lower_half_loses_locks(root, tokens):
    return _insert(root, tokens, lower=("locks",))


@mistake(
    **INSERT,
    check="edges",
    says="the lower half's `last_use` is gone. A split uses nobody: only its tokens and its parent change.",
)
def lower_half_loses_the_last_use(root, tokens):
    return _insert(root, tokens, lower=("last_use",))


@mistake(
    **INSERT,
    check="edges",
    says="a node on the way was locked. `insert` locks nobody: it only hands on what is there, in a split.",
)
def locks_on_the_way(root, tokens):
    return _insert(root, tokens, walked=("locks",))


def _way(root, tokens):
    node, end = root, 0
    while end < len(tokens):
        node = node.children[tokens[end]]
        end += len(node.tokens)
        yield node


@mistake(
    **INSERT,
    check="edges",
    says="every node of the way was locked, the last one too. `insert` locks nobody: that's for who runs.",
)
def locks_the_whole_way(root, tokens):
    found = _insert(root, tokens)
    for node in _way(root, tokens):
        node.locks += 1
    return found


@mistake(
    **INSERT,
    check="edges",
    says="every node of the way has a `last_use` of 0, as the chapter's `insert` leaves it. Leave it alone.",
)
def dates_the_way_with_0(root, tokens):
    found = _insert(root, tokens)
    for node in _way(root, tokens):
        node.last_use = 0
    return found


@mistake(**INSERT, check="edges", says="the `last_use` of a node on the way was changed. `insert` leaves it as it is.")
def dates_the_way(root, tokens):
    return _insert(root, tokens, walked=("last_use",))


@mistake(**INSERT, check="edges", says="the root was locked. `insert` locks nobody, the root neither.")
def locks_the_root(root, tokens):
    root.locks += 1
    return _insert(root, tokens)


@mistake(**INSERT, check="edges", says="the root's `last_use` was changed. `insert` dates no one, the root neither.")
def dates_the_root(root, tokens):
    root.last_use = 0
    return _insert(root, tokens)


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
    count_leaves=False, below_locked=False, stop=False, first=False, with_root=False, longest=False, rounds=False,
    parent_next=False, count_prefix=False, whole=True, never_over=None, freed_locks=False, stays=None,
):  # fmt: skip
    """Right unless one of the switches says otherwise."""
    gone, freed, leaves, emptied = [], 0, None, [None]
    while (freed <= num_tokens if enough == "over" else freed < num_tokens or (first and not gone)) or enough == "all":
        below = list(root.children.values())
        for node in below:
            below += node.children.values()
        if with_root:
            below.append(root)
        candidates = [n for n in below if inner or not n.children]
        if stop and candidates and min(candidates, key=lambda n: n.last_use).locks:
            break
        candidates = [
            n
            for n in candidates
            if locked is True or not n.locks or (locked and n.locks != 1) or (freed_locks and n in emptied)
        ]
        if below_locked:
            candidates = [n for n in candidates if not n.parent.locks]
        if once:
            leaves = candidates if leaves is None else leaves
            candidates = [n for n in leaves if n.parent.children.get(n.tokens[0]) is n]
        if rounds:
            leaves = [n for n in leaves or [] if n.parent.children.get(n.tokens[0]) is n] or candidates
            candidates = leaves
        if parent_next and emptied[-1] in candidates:
            candidates = [emptied[-1]]
        if never_over == "skip":
            candidates = [n for n in candidates if len(n.tokens) <= num_tokens - freed]
        if not candidates:
            break
        if longest:
            leaf = max(candidates, key=lambda n: (len(n.tokens), -n.last_use))
        else:
            leaf = (max if newest else min)(candidates, key=lambda n: n.last_use)
        if leaf is root:
            gone.append("")
            break
        if never_over == "stop" and len(leaf.tokens) > num_tokens - freed:
            break
        prefix, node = "", leaf
        while node.parent is not None:
            prefix, node = node.tokens + prefix, node.parent
        gone.append(leaf.tokens if edge else prefix)
        if not whole and len(leaf.tokens) > num_tokens - freed:
            leaf.tokens = leaf.tokens[: freed - num_tokens]
            break
        if remove:
            del leaf.parent.children[leaf.tokens[0]]
        emptied.append(leaf.parent)
        if stays:
            setattr(leaf.parent, stays, getattr(leaf.parent, stays) - 1)
        freed += 1 if count_leaves else len(prefix) if count_prefix else len(leaf.tokens)
        if not remove and len(gone) > 20:
            break
    return gone


def _num_tokens(node):
    return len(node.tokens) + sum(map(_num_tokens, node.children.values()))


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
    check="plain",
    says="the parent went right behind its leaf. It is a leaf now, but its own `last_use` decides when it goes.",
)
def parent_goes_next(root, num_tokens):
    return _evict(root, num_tokens, parent_next=True)


@mistake(
    **EVICT,
    check="plain",
    says="leaves go in rounds. Look for them anew after each: one that has just become a leaf may be the oldest.",
)
def leaves_in_rounds(root, num_tokens):
    return _evict(root, num_tokens, rounds=True)


@mistake(
    **EVICT,
    check="plain",
    says="the last leaf was cut short, as the chapter's and the engine's `evict` do. Here a leaf goes whole.",
)
def trims_the_last(root, num_tokens):
    return _evict(root, num_tokens, whole=False)


@mistake(
    **EVICT, check="plain", says="the whole prefix is counted as free. What is above the leaf stays: count its edge."
)
def counts_the_prefix(root, num_tokens):
    return _evict(root, num_tokens, count_prefix=True)


@mistake(
    **EVICT, check="plain", says="it stops before a leaf that frees more than is needed. More is fine, less is not."
)
def stops_before_too_much(root, num_tokens):
    return _evict(root, num_tokens, never_over="stop")


@mistake(
    **EVICT,
    check="plain",
    says="a leaf that frees more than is needed was passed over. Only age decides: the oldest goes, whole.",
)
def skips_what_is_too_long(root, num_tokens):
    return _evict(root, num_tokens, never_over="skip")


@mistake(**EVICT, check="plain", says="a number is returned. Return the prefixes that have gone, a list.")
def returns_a_number(root, num_tokens):
    before = _num_tokens(root)
    _evict(root, num_tokens)
    return before - _num_tokens(root)


@mistake(**EVICT, check="plain", says="nothing is returned. Return the prefixes that have gone, in order.")
def returns_no_prefixes(root, num_tokens):
    _evict(root, num_tokens)


@mistake(
    **EVICT,
    check="plain",
    says="the `last_use` of a node that stays was changed. Only its `children` may: it wasn't used.",
)
def dates_the_parent(root, num_tokens):
    return _evict(root, num_tokens, stays="last_use")


@mistake(
    **EVICT, check="plain", says="the `locks` of a node that stays were changed. An idle leaf had no users to take off."
)
def unlocks_the_parent(root, num_tokens):
    return _evict(root, num_tokens, stays="locks")


@mistake(
    **EVICT, check="plain", says="nodes are returned. A prefix is a string: all tokens from the root to the leaf's end."
)
def returns_nodes(root, num_tokens):
    return [type(root)() for _ in _evict(root, num_tokens)]


@mistake(
    **EVICT, check="plain", says="a set is returned, which has no order. Return a list: what went first stands first."
)
def returns_a_set(root, num_tokens):
    return set(_evict(root, num_tokens))


@mistake(
    **EVICT,
    check="plain",
    says="the `parent` of a node that stays was changed. Only its `children` may, if a leaf went.",
)
def parents_become_the_root(root, num_tokens):
    gone = _evict(root, num_tokens)
    below = list(root.children.values())
    for node in below:
        below += node.children.values()
        node.parent = root
    return gone


@mistake(**EVICT, check="plain", says="the root's `last_use` was changed. Of what stays only `children` may change.")
def dates_the_root_in_evict(root, num_tokens):
    root.last_use = 0
    return _evict(root, num_tokens)


@mistake(**EVICT, check="plain", says="the root's `locks` were changed. Of what stays only `children` may change.")
def unlocks_the_root(root, num_tokens):
    root.locks -= 1
    return _evict(root, num_tokens)


@mistake(
    **EVICT,
    check="edges",
    says="a leaf with two users has gone. `locks` counts them: any number but 0 means that it is in use.",
)
def two_locks_are_idle(root, num_tokens):
    return _evict(root, num_tokens, locked="unless one")


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
    before = _num_tokens(root)
    gone = _evict(root, num_tokens)
    if before - _num_tokens(root) < num_tokens:
        raise ValueError("min() iterable argument is empty")
    return gone


@mistake(
    **EVICT,
    check="edges",
    says="a locked node went once its child had gone. It is a leaf then, and still in use: ask for `locks` each time.",
)
def forgets_locks_of_new_leaves(root, num_tokens):
    return _evict(root, num_tokens, freed_locks=True)


@mistake(
    **EVICT,
    check="edges",
    says="in an empty tree the root is a leaf, and has no parent to be taken from. It is no candidate: it stays.",
)
def takes_the_root_from_nobody(root, num_tokens):
    gone = _evict(root, num_tokens, with_root=True)
    if "" in gone:
        raise AttributeError("'NoneType' object has no attribute 'children'")
    return gone


@mistake(
    **EVICT, check="edges", says="the first of no leaves was asked for. If none may go, return what has gone so far."
)
def takes_the_first_of_none(root, num_tokens):
    before = _num_tokens(root)
    gone = _evict(root, num_tokens)
    if before - _num_tokens(root) < num_tokens:
        raise IndexError("list index out of range")
    return gone


# -- 5.4 --------------------------------------------------------------------------------------------------------------


def _in_order(
    waiting, cached, patience, most, sign=-1, reverse=False, share=False, starved=True, fair=True, limit=True,
    at=False, last=False, always=False, by_name=False, built_in=False, in_place=False, early=False, help_all=False,
    one=False, most_first=False, tie=False,
):  # fmt: skip
    patience = 4 if built_in else patience
    helped = [request for request in waiting if request[2] >= patience]

    def key(request):
        name, prompt, overtaken = request
        long = starved and (overtaken > patience if at else overtaken >= patience)
        score = cached(prompt) / len(prompt) if share else cached(prompt)
        long = long and not (one and request is not helped[0])
        extra = (name if by_name else 0, -overtaken if tie and not long else 0)
        if long and fair:
            return (2 if last else 0), -overtaken if most_first else 0, *extra
        return (0 if long else 1), sign * score, *extra

    names = [name for name, _, _ in waiting]
    if always:
        for _, prompt, _ in waiting:
            cached(prompt)
    if limit and len(waiting) > most - early:
        if help_all:
            return sorted(names, key=lambda name: name not in [name for name, _, _ in helped])
        return names
    if in_place:
        waiting.sort(key=key)
        return [name for name, _, _ in waiting]
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


@mistake(**ORDER, check="plain", says="equals go by name. Arrival decides: `sorted` keeps equals as they were.")
def ties_by_name(*args):
    return _in_order(*args, by_name=True)


@mistake(
    **ORDER, check="plain", says="of equals, who was overtaken more goes first. Below `patience` only arrival decides."
)
def ties_by_overtaken(*args):
    return _in_order(*args, tie=True)


@mistake(**ORDER, check="plain", says="a number is built in where `patience` belongs: it is an argument, not always 4.")
def built_in_patience(*args):
    return _in_order(*args, built_in=True)


@mistake(**ORDER, check="plain", says="only the first of the starved goes ahead. All of them do, in order of arrival.")
def only_one_starved(*args):
    return _in_order(*args, one=True)


@mistake(
    **ORDER, check="plain", says="`waiting` was put in another order itself. Leave it as it is: `sorted` makes a list."
)
def sorts_in_place(*args):
    return _in_order(*args, in_place=True)


@mistake(
    **ORDER,
    check="plain",
    says="the starved were taken out of `waiting` itself. Leave it as it is: make lists of your own.",
)
def takes_the_starved_out(waiting, cached, patience, most):
    names = _in_order(waiting, cached, patience, most)
    if len(waiting) <= most:
        waiting[:] = [request for request in waiting if request[2] < patience]
    return names


@mistake(**ORDER, check="plain", says="these are whole requests. Return their names alone.")
def returns_requests(waiting, *args):
    return [next(r for r in waiting if r[0] == name) for name in _in_order(waiting, *args)]


@mistake(**ORDER, check="plain", says="nothing is returned (`list.sort` returns None, too). Return a list of names.")
def returns_no_names(*args):
    _in_order(*args)


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


@mistake(
    **ORDER, check="edges", says="among the starved, who was overtaken most goes first. They go in order of arrival."
)
def most_overtaken_first(*args):
    return _in_order(*args, most_first=True)


@mistake(
    **ORDER, check="edges", says="exactly `most` wait, and nobody was looked up. That many may: only more may not."
)
def gives_up_at_most(*args):
    return _in_order(*args, early=True)


@mistake(
    **ORDER,
    check="edges",
    says="more than `most` wait, and the starved go first all the same. Then *all* go in order of arrival.",
)
def starved_first_in_any_case(*args):
    return _in_order(*args, help_all=True)


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
    says="nothing is evicted, so who evicts the wrong nodes does no harm. Let an inner node be due, and evict.",
)
def never_evicts():
    return [("ask", "x", "ab"), ("ask", "x", "ac"), ("ask", "y", "ab")]


@mistake(**BREAK, says="nobody asks after an eviction: whatever has gone is missed by no one. Ask once more.")
def asks_nothing_afterwards():
    return [*EXPOSING[:2], ("ask", "x", "ac"), ("ask", "y", "ab"), ("evict", 1)]


@mistake(
    **BREAK,
    says="what goes is due anyway: a leaf is older than any inner node, or all must go. Let an inner node be as old as "
    "its leaf, both last used by one prompt, and evict little.",
)
def leaf_is_older():
    return [("ask", "x", "abcd"), ("ask", "x", "abdd"), ("ask", "y", "abcd"), ("evict", 2), ("ask", "x", "abcd")]


@mistake(
    **BREAK,
    says="it loses more than it should, but nobody asks for that afterwards. Ask for what the inner node has.",
)
def asks_for_something_else():
    return [*EXPOSING[:3], ("ask", "x", "dc"), ("ask", "x", "da"), ("ask", "y", "ab")]


@mistake(**BREAK, says="there are more than six actions. One eviction and one question for each mistake are enough.")
def too_many_actions():
    return [*EXPOSING, ("ask", "y", "ab"), ("ask", "y", "cc")]


@mistake(**BREAK, says="that is no list of actions. Return one: [(…), (…), …].")
def returns_no_list():
    return None


@mistake(**BREAK, says='an action is ("ask", "x" or "y", letters a to d, at most 6) or ("evict", a number).')
def no_action():
    return [*EXPOSING, ("ask", "y", "abxy")]


# -- 5.6 --------------------------------------------------------------------------------------------------------------


def _lookup(
    root, tokens, size, place=True, childs=True, cut=True, down=False, count_edge=False, deep=True, above=False,
    flat=False, stop=True, key="tuple", whole=False, last=True, fixed=None, up=False, floor=False, floor_1=False,
    walked=(), from_root=(), in_place=False, split=False,
):  # fmt: skip
    """Right unless one of the switches says otherwise."""
    node, found, blocks = root, 0, []
    for name in from_root:
        setattr(root, name, getattr(root, name) + 1)
    size, tokens = fixed or size, tokens if last else tokens[:-1]

    def child_of(node):
        if key == "index" and found < len(tokens):
            return node.children[tokens[found]]
        return node.children.get(tokens[found] if key == "get" and tokens else tokens[found : found + 1])

    while (child := child_of(node)) is not None:
        edge, rest, same = child.tokens, tokens[found:], 0
        while same < min(len(edge), len(rest)) and edge[same] == rest[same]:
            same += 1
        if whole and same < len(edge):
            break
        before, node, found = node, child, found + (len(edge) if count_edge else same)
        for name in walked:
            setattr(node, name, getattr(node, name) + 1)
        first = -(-child.start // size) if up else child.start // size
        begun = found // size if floor else found // size + 1 if floor_1 else -(-found // size)
        if in_place:
            del child.blocks[begun - first :]
        own = child.blocks[: max(0, begun - first)] if cut else list(child.blocks)
        if not place:
            blocks = blocks + own
        elif not childs and len(blocks) > first:
            blocks = blocks + own[1:]
        else:
            blocks = blocks[:first] + own
        if found < child.end or not deep or (count_edge and same < len(edge)):
            if above and found < child.end:
                node = before
            if split and found < child.end:
                node = type(child)(before, edge[:same], own, child.start)
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


@mistake(**LOOKUP, check="blocks", says="the whole edge is counted, though only its first tokens are the prompt's.")
def counts_whole_edges(root, tokens, size):
    return _lookup(root, tokens, size, count_edge=True)


@mistake(**LOOKUP, check="blocks", says="only the first edge is looked at. Below it the prompt may go on: walk down.")
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


@mistake(
    **LOOKUP,
    check="blocks",
    says="nothing is ever found. A child is found by a tuple of one token, tokens[i : i + 1], not by the token.",
)
def asks_by_token(root, tokens, size):
    return _lookup(root, tokens, size, key="get")


@mistake(
    **LOOKUP,
    check="blocks",
    says="that key isn't in `children`: a key is a tuple of one token; and ask with .get, a child may not be there.",
)
def indexes_by_token(root, tokens, size):
    return _lookup(root, tokens, size, key="index")


@mistake(
    **LOOKUP,
    check="blocks",
    says="only whole edges are found, the chapter's mistake. What a prompt has of the next edge counts as well.",
)
def takes_whole_edges_only(root, tokens, size):
    return _lookup(root, tokens, size, whole=True)


@mistake(
    **LOOKUP,
    check="blocks",
    says="the last token was left out. That is the engine's business: here all tokens given are looked for.",
)
def leaves_out_the_last(root, tokens, size):
    return _lookup(root, tokens, size, last=False)


@mistake(
    **LOOKUP,
    check="blocks",
    says="the block that is begun last is missing: tokens found are divided by `size` and rounded down. Round up.",
)
def rounds_blocks_down(root, tokens, size):
    return _lookup(root, tokens, size, floor=True)


@mistake(
    **LOOKUP,
    check="blocks",
    says="one block too many where the match ends with a block: found // size + 1 is no rounding up.",
)
def adds_a_block(root, tokens, size):
    return _lookup(root, tokens, size, floor_1=True)


@mistake(
    **LOOKUP,
    check="blocks",
    says="`start` over `size` was rounded up. The child's first block is the one that `start` lies in: round down.",
)
def rounds_the_start_up(root, tokens, size):
    return _lookup(root, tokens, size, up=True)


@mistake(**LOOKUP, check="blocks", says="a number is built in where `size` belongs: blocks don't always have 4 rows.")
def built_in_size(root, tokens, size):
    return _lookup(root, tokens, size, fixed=4)


@mistake(
    **LOOKUP,
    check="blocks",
    says="the prompt parts within an edge, and the walk goes on below it. What is below belongs to other prompts.",
)
def goes_on_below_a_part(root, tokens, size):
    return _lookup(root, tokens, size, stop=False)


@mistake(
    **LOOKUP, check="blocks", says="`last_use` was changed. A look-up changes nothing: the engine dates what it locks."
)
def dates_what_it_finds(root, tokens, size):
    return _lookup(root, tokens, size, walked=("last_use",))


@mistake(**LOOKUP, check="blocks", says="nodes were locked. A look-up changes nothing: the engine locks what it takes.")
def locks_what_it_finds(root, tokens, size):
    return _lookup(root, tokens, size, walked=("locks",))


@mistake(**LOOKUP, check="blocks", says="`last_use` was changed, the root's, too. A look-up changes nothing.")
def dates_the_root_in_passing(root, tokens, size):
    return _lookup(root, tokens, size, from_root=("last_use",))


@mistake(**LOOKUP, check="blocks", says="nodes were locked, the root, too. A look-up changes nothing.")
def locks_the_root_in_passing(root, tokens, size):
    return _lookup(root, tokens, size, from_root=("locks",))


BOTH = ("locks", "last_use")


@mistake(
    **LOOKUP,
    check="blocks",
    says="nodes were locked and dated. A look-up does neither: the engine does, when it locks.",
)
def locks_and_dates(root, tokens, size):
    return _lookup(root, tokens, size, walked=BOTH)


@mistake(**LOOKUP, check="blocks", says="nodes were locked and dated, the root, too. A look-up changes nothing.")
def locks_and_dates_the_root(root, tokens, size):
    return _lookup(root, tokens, size, from_root=BOTH)


@mistake(
    **LOOKUP, check="blocks", says="a node's own list `blocks` was changed. Take a slice of it, and leave it whole."
)
def cuts_the_nodes_list(root, tokens, size):
    return _lookup(root, tokens, size, in_place=True)


@mistake(**LOOKUP, check="blocks", says="a new node is returned. Split nothing here: the engine does, when it locks.")
def splits_the_edge(root, tokens, size):
    return _lookup(root, tokens, size, split=True)


@mistake(
    **LOOKUP, check="blocks", says="nothing is returned. Return three: the node, the number of tokens, the blocks."
)
def returns_no_match(root, tokens, size):
    _lookup(root, tokens, size)


@mistake(
    **LOOKUP,
    check="blocks",
    says="the number of tokens is the node's `end`. Of an edge reached in part only what is alike counts.",
)
def returns_the_end(root, tokens, size):
    node, _, blocks = _lookup(root, tokens, size)
    return node, node.end, blocks


@mistake(**LOOKUP, check="blocks", says="there is no node. If nothing is found, the deepest node reached is the root.")
def no_node_if_nothing_is_found(root, tokens, size):
    node, found, blocks = _lookup(root, tokens, size)
    return (node if found else None), found, blocks
