"""Hit rates: what the real caches reach on workloads with shared prefixes, and what is possible at best."""

import random

import pytest

from minillm.core.config import EngineConfig
from minillm.core.presets import DEVICES
from minillm.core.workloads import WorkloadRequest, chat, few_shot, self_consistency, tree_of_thought
from minillm.simulator.prefixes import (
    depth_first,
    optimal_hit_rate,
    prompts_of,
    replay,
    replay_lru,
)
from minillm.simulator.simulation import simulate
from tests.support import random_config

WORKLOADS = {
    "few_shot": few_shot(tasks=3, questions=5, examples=3, example_len=21, question_len=12),
    "chat": chat(conversations=4, turns=4, system_len=24, turn_len=12, answer_len=16),
    "tree_of_thought": tree_of_thought(problems=2, depth=3, branches=3, problem_len=40, thought_len=9),
    "self_consistency": self_consistency(questions=4, samples=4, examples_len=50, question_len=12),
}
ALL = pytest.mark.parametrize("name", WORKLOADS)


def served_depth_first(name: str) -> list[list[int]]:
    prompts = prompts_of(WORKLOADS[name])
    return [prompts[number] for number in depth_first(prompts)]


def at_random(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2) for _ in range(rng.randint(1, 8))] for _ in range(12)]


# -- the optimum --------------------------------------------------------------------------------------------------


def test_the_optimum_of_a_tree_drawn_by_hand():
    prompts = ["abcd", "abcx", "ab", "q"]  # edges: ab, c, d, x, q
    assert optimal_hit_rate(prompts) == 1 - 6 / 11
    assert optimal_hit_rate(prompts, compute_last=False) == 1 - 6 / 11
    twice = ["abc", "abc", "abc"]
    assert optimal_hit_rate(twice, compute_last=False) == 1 - 3 / 9
    assert optimal_hit_rate(twice) == 1 - 5 / 9, "each repetition computes its last token"
    assert optimal_hit_rate(["abc"]) == 0
    with pytest.raises(ValueError, match="no tokens"):
        optimal_hit_rate([])


def test_depth_first_keeps_what_shares_a_prefix_together():
    prompts = ["b", "abc", "xy", "ab", "abd", "a"]
    assert [prompts[i] for i in depth_first(prompts)] == ["a", "ab", "abc", "abd", "b", "xy"]


@pytest.mark.parametrize("compute_last", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_no_order_of_random_prompts_beats_the_optimum_and_depth_first_reaches_it(seed, compute_last):
    prompts = at_random(seed)
    best = optimal_hit_rate(prompts, compute_last)
    tight = max(map(len, prompts))
    ordered = [prompts[i] for i in depth_first(prompts)]
    for capacity in (tight, None):
        assert replay(ordered, "radix", capacity, compute_last=compute_last).hit_rate == pytest.approx(best)
    for capacity in (tight, 2 * tight, None):
        assert replay(prompts, "radix", capacity, compute_last=compute_last).hit_rate <= best + 1e-12
    everything = replay(prompts, "radix", compute_last=False).hit_rate
    assert everything == pytest.approx(optimal_hit_rate(prompts, False)), "with room for all the order is nothing"


# -- Theorem 3.1 on the workloads -----------------------------------------------------------------------------------


@ALL
def test_depth_first_with_room_for_the_longest_prompt_is_optimal(name):
    prompts = served_depth_first(name)
    best = optimal_hit_rate(prompts)
    longest = max(map(len, prompts))
    assert 0.5 < best < 1
    assert replay(prompts, "radix", longest).hit_rate == pytest.approx(best, abs=1e-12)
    with pytest.raises(ValueError, match=f"a prompt takes {longest} blocks of 1; the cache has {longest - 1}"):
        replay(prompts, "radix", longest - 1)


@ALL
@pytest.mark.parametrize("block_size", [4, 16])
def test_a_radix_tree_on_larger_blocks_is_as_good_with_a_few_more(name, block_size):
    """It shares single tokens still. But each branch inside a block has a copy of that block, all along a path."""
    prompts = served_depth_first(name)
    capacity = -(-max(map(len, prompts)) // block_size) + 5
    got = replay(prompts, "radix", capacity, block_size)
    assert got.hit_rate == pytest.approx(optimal_hit_rate(prompts), abs=1e-12)


@ALL
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_block_hash_loses_the_rest_of_a_block_on_every_hit(name, block_size):
    """Of h tokens in common with an earlier prompt, it shares h − h mod block size: under a block less a prompt."""
    prompts = served_depth_first(name)
    radix = replay(prompts, "radix", max(map(len, prompts)))
    blocks = -(-max(map(len, prompts)) // block_size)
    got = replay(prompts, "block_hash", blocks, block_size)
    assert got.hits == [hit - hit % block_size for hit in radix.hits]
    lost = sum(radix.hits) - sum(got.hits)
    assert lost <= (block_size - 1) * sum(hit > 0 for hit in radix.hits)
    assert (lost == 0) == (block_size == 1)


@ALL
def test_arrival_order_with_a_small_cache_is_worse_and_no_cache_is_none(name):
    prompts = prompts_of(WORKLOADS[name])
    longest = max(map(len, prompts))
    best = optimal_hit_rate(prompts)
    small = replay(prompts, "radix", longest)
    assert small.hit_rate < best - 0.01
    assert replay(prompts, "radix", 2 * longest).hit_rate >= small.hit_rate - 1e-12
    assert replay(prompts, "none", longest).hits == [0] * len(prompts)
    assert small.tokens_computed == sum(small.lengths) - sum(small.hits)


def test_a_prompt_of_which_the_copy_of_a_block_finds_no_room_is_computed_whole():
    """Three blocks hold "abcdeZ…" and no copy of the block in which it parts from the first, beside it."""
    first, second = list(range(12)), [*range(6), *range(90, 96)]
    assert replay([first, second], "radix", 4, block_size=4).hits == [0, 6]
    assert replay([first, second], "radix", 3, block_size=4).hits == [0, 0]


@ALL
@pytest.mark.parametrize("output_len", [1, 3])
def test_the_engine_reaches_the_optimum_with_longest_prefix_first(name, output_len):
    """A queue that is there from the start, one request after another, room for the longest of them."""
    prompts = prompts_of(WORKLOADS[name])
    queue = [WorkloadRequest(0.0, prompt, output_len) for prompt in prompts]
    longest = max(map(len, prompts)) + output_len
    cached = {}
    for policy in ("lpm", "fcfs"):
        config = EngineConfig(
            kv_layout="paged",
            batching="iteration",
            prefix_cache="radix",
            scheduling_policy=policy,
            block_size=1,
            max_num_seqs=1,
            max_model_len=longest,
            num_gpu_blocks_override=longest + 1,  # and the null block
        )
        done = simulate(queue, random_config(max_position_embeddings=1024), config, DEVICES["RTX 4090"])
        cached[policy] = done.metrics.tokens_cached
        total = sum(map(len, prompts)) + len(prompts) * (output_len - 1)
        assert done.metrics.tokens_computed == total - cached[policy]
    assert cached["lpm"] == round(optimal_hit_rate(prompts) * sum(map(len, prompts)))
    assert cached["fcfs"] < cached["lpm"]


# -- whole blocks of a trace, by their hashes -----------------------------------------------------------------------


def test_blocks_that_know_nothing_of_prefixes_lose_the_head_first():
    """Leaves first keeps what can still be hit: the two differ by the order inside a request alone."""
    prompts = [[1, 2, 3], [4, 5], [1, 2, 3]]
    assert replay_lru(prompts, 4).hits == [0, 0, 0], "block 1 went, and 2 and 3 with it"
    assert replay(prompts, "radix", 4, compute_last=False).hits == [0, 0, 2], "block 3 went"
    for rate in (replay_lru(prompts), replay(prompts, "block_hash", compute_last=False)):
        assert rate.hits == [0, 0, 3]


@pytest.mark.parametrize("cache", ["radix", "block_hash"])
@pytest.mark.parametrize("seed", range(10))
def test_leaves_first_is_lru_with_each_prompt_turned_round(cache, seed):
    """What our caches do, in a dictionary: every block of a prompt is touched, the last one first."""
    rng = random.Random(seed)
    prompts = [prompt for prompt in at_random(seed) for _ in range(2)]
    rng.shuffle(prompts)
    capacity = rng.randint(8, 14)
    kept: dict[tuple, None] = {}
    want = []
    for tokens in prompts:
        prefixes = [tuple(tokens[: i + 1]) for i in range(len(tokens))]
        want.append(sum(each in kept for each in prefixes))
        for each in reversed(prefixes):
            kept.pop(each, None)
            kept[each] = None
        for each in list(kept)[: max(0, len(kept) - capacity)]:
            del kept[each]
    assert replay(prompts, cache, capacity, compute_last=False).hits == want
