"""Counters of a workload small enough to count by hand."""

import random

from minillm.core.sampling_params import SamplingParams
from tests.support import greedy, random_prompt, serve


def test_counters_of_chapter_zero(engine_factory):
    """Prompts of 3 and 5 tokens for 3 and 1 tokens, one block of 128 rows each."""
    engine = engine_factory(chapter=0)
    rng = random.Random(0)
    serve(engine, {"a": (random_prompt(rng, 3), greedy(3)), "b": (random_prompt(rng, 5), greedy(1))})
    metrics = engine.metrics
    # Passes: 3 + 5 tokens, then a's second and third.
    assert metrics.forward_passes == 3
    assert metrics.tokens_computed == 8 + 1 + 1
    assert metrics.tokens_generated == 4
    assert metrics.kv_slots_reserved == 2 * 128
    assert metrics.kv_slots_used == 8
    # float64. Weights but for the embedding table, which is only looked up in.
    per_layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64
    weights = 8 * (2 * per_layer + 64 + 256 * 64)
    # 2 (K and V) · 2 layers · 2 heads · 16 · 8 bytes a row; rows read and written in each pass.
    kv = 1024 * ((3 + 3) + (5 + 5) + (4 + 1) + (5 + 1))
    # The score matrix moves four times: 4 · 8 bytes · 4 heads · 2 layers for every pair of query and key.
    scores = 256 * (3 * 3 + 5 * 5 + 1 * 4 + 1 * 5)
    assert metrics.modelled_hbm_bytes == 3 * weights + kv + scores


def test_the_fullest_pass_is_reported(engine_factory):
    engine = engine_factory(chapter=0, max_num_seqs=1)
    rng = random.Random(0)
    serve(engine, {"a": (random_prompt(rng, 10), greedy(5)), "b": (random_prompt(rng, 2), greedy(5))})
    assert (engine.metrics.kv_slots_reserved, engine.metrics.kv_slots_used) == (128, 14)
    assert engine.metrics.forward_passes == 10


def test_samples_are_prefills_of_their_own_before_blocks_are_shared(engine_factory):
    engine = engine_factory(chapter=0)
    prompt = random_prompt(random.Random(0), 7)
    serve(engine, {"a": (prompt, SamplingParams(n=3, seed=0, max_tokens=2, ignore_eos=True))})
    assert engine.metrics.tokens_computed == 3 * (7 + 1)
    assert engine.metrics.kv_slots_reserved == 3 * 128


def test_reset(engine_factory):
    engine = engine_factory(prefix_cache="none")
    requests = {"a": (random_prompt(random.Random(0), 3), greedy(3))}
    serve(engine, requests)
    first = engine.metrics.to_dict()
    engine.metrics.reset()
    assert set(engine.metrics.to_dict().values()) == {0}
    serve(engine, requests)
    assert engine.metrics.to_dict() == first
