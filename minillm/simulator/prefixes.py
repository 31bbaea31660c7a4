"""Hit rates of prefix caches: prompts served one after another through the engine's own cache, and what is possible.

SGLang's Theorem 3.1: served in depth-first order of the radix tree of all prompts, by a cache that holds the longest
of them, every edge of the tree is computed once, and nothing can do with less.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from minillm.core.config import EngineConfig
from minillm.core.kv_spec import FullAttentionSpec
from minillm.core.workloads import WorkloadRequest
from minillm.memory.kv_manager import KVGeometry, KVManager, group_layers, prefix_cache
from minillm.memory.prefix_tree import in_common

Prompt = Sequence[Hashable]  # token ids, or the hash ids of a trace's blocks


@dataclass(frozen=True)
class Replay:
    """What a cache did for prompts, in the order they were served. Lengths in tokens."""

    lengths: list[int]
    hits: list[int]

    @property
    def hit_rate(self) -> float:
        return sum(self.hits) / sum(self.lengths)

    @property
    def tokens_computed(self) -> int:
        return sum(self.lengths) - sum(self.hits)


def prompts_of(workload: Sequence[WorkloadRequest]) -> list[list[int]]:
    """Its prompts in order of arrival, one for each sample."""
    in_order = sorted(workload, key=lambda request: request.arrival)
    return [request.prompt_token_ids for request in in_order for _ in range(request.n)]


def replay(
    prompts: Sequence[Prompt],
    cache: str = "radix",
    capacity_blocks: int | None = None,
    block_size: int = 1,
    compute_last: bool = True,
) -> Replay:
    """Serve prompts one after another, each to its end, through a real cache of this kind over a pool of blocks.

    ``capacity_blocks``  the pool; None: nothing is ever evicted
    ``compute_last``     the last token of a prompt is computed even if it is cached, since its logits are wanted; False
                         where a "token" stands for more than one, as the hash ids of a trace do

    Outputs are left out. ValueError for a prompt that does not fit into the pool.
    """
    needed = [-(-len(tokens) // block_size) for tokens in prompts]
    # Without eviction a prompt may take a block more than its tokens: the copy of one that it shares in part.
    capacity = sum(needed) + len(needed) if capacity_blocks is None else capacity_blocks
    geometry = KVGeometry(group_layers([FullAttentionSpec(1, 1, "float16")]), block_size, capacity, null_rows=1)
    kind = prefix_cache(EngineConfig(kv_layout="paged", prefix_cache=cache))
    kv = KVManager(geometry, max_model_len=capacity * block_size, prefix_cache=kind)
    hits = []
    for tokens, blocks in zip(prompts, needed, strict=True):
        if blocks > capacity:
            raise ValueError(f"a prompt takes {blocks} blocks of {block_size}; the cache has {capacity}")
        hits.append(_serve(kv, tokens, compute_last))
    return Replay([len(tokens) for tokens in prompts], hits)


def _serve(kv: KVManager, tokens: Prompt, compute_last: bool) -> int:
    """Tokens of a prompt that need not be computed."""
    match = kv.match(tokens) if compute_last or kv.cache is None else kv.cache.match(tokens)
    hit = match.num_tokens if match else 0
    if hit:
        kv.adopt("it", match)
    if kv.allocate("it", hit, len(tokens)) is None:  # the copy of a shared block is one too many: compute all of it
        kv.free("it")
        hit = 0
        kv.allocate("it", hit, len(tokens))
    kv.keep("it", tokens)
    kv.free("it")
    return hit


def optimal_hit_rate(prompts: Sequence[Prompt], compute_last: bool = True) -> float:
    """The best possible: 1 − Σ|edges| / Σ|prompts| over the radix tree of all prompts (Theorem 3.1).

    Every edge must be computed once, at least. With ``compute_last``, as the engine does it, each repetition of a
    prompt costs one token beside: the numerator becomes Σ|edges| + prompts − distinct prompts. A prompt that is only
    the beginning of others costs nothing more, if it is served before them.
    """
    if not any(map(len, prompts)):
        raise ValueError("there are no tokens in the prompts, so no hit rate")
    in_order = sorted(map(tuple, prompts))
    edges = sum(len(later) - in_common(earlier, later) for earlier, later in pairwise([(), *in_order]))
    again = len(in_order) - len(set(in_order)) if compute_last else 0
    return 1 - (edges + again) / sum(map(len, in_order))


def depth_first(prompts: Sequence[Prompt]) -> list[int]:
    """Indices of the prompts in a depth-first order of their radix tree, each before those that it begins.

    Sorting does it: what shares a prefix stands together.
    """
    return sorted(range(len(prompts)), key=lambda number: tuple(prompts[number]))


def replay_lru(prompts: Sequence[Prompt], capacity_blocks: int | None = None) -> Replay:
    """The same, a block a token, with least recently used blocks that know nothing of prefixes: Mooncake's replay.

    A prompt touches its blocks in order, so its first is the oldest and goes first, and what lies behind it stays for
    a while and can help nobody. Evicting leaves first, as our caches do, is this order turned round.
    """
    cached: OrderedDict[Hashable, None] = OrderedDict()
    hits = []
    for tokens in prompts:
        hits.append(next((i for i, token in enumerate(tokens) if token not in cached), len(tokens)))
        for token in tokens:
            cached[token] = None
            cached.move_to_end(token)
        while capacity_blocks is not None and len(cached) > capacity_blocks:
            cached.popitem(last=False)
    return Replay([len(tokens) for tokens in prompts], hits)
