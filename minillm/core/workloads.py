"""Workloads: seeded sets of requests, the same on every machine. Token ids only, so that no tokenizer is needed."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkloadRequest:
    """One request: when it comes, counted in forward passes; what it asks; how many tokens it gets, by force."""

    arrival: int
    prompt_token_ids: list[int]
    output_len: int


def equal_batch(
    requests: int, prompt_len: tuple[int, int], output_len: int, vocab_size: int, seed: int = 0
) -> list[WorkloadRequest]:
    """Requests that come together, with prompt lengths uniform in [low, high] and outputs of equal length."""
    rng = random.Random(seed)
    lengths = [rng.randint(*prompt_len) for _ in range(requests)]
    return [WorkloadRequest(0, _ids(rng, n, vocab_size), output_len) for n in lengths]


def scoreboard(vocab_size: int, requests: int = 32, seed: int = 0) -> list[WorkloadRequest]:
    """The workload of the scoreboard: what the fifteen papers each found to be wasteful, in one small set.

    Four prefixes of 96 tokens shared by eight requests each (prefix caching); skewed outputs, mean about 0.4 of the
    largest (static batches wait for the longest); two long prompts among short ones (stalls); arrivals as a Poisson
    process of one request every three passes (batching while others run).
    """
    rng = random.Random(seed)
    prefixes = [_ids(rng, 96, vocab_size) for _ in range(4)]
    workload, clock = [], 0.0
    for i in range(requests):
        clock += rng.expovariate(1 / 3)
        own = 400 if i % 16 == 9 else rng.randint(8, 48)
        prompt = prefixes[rng.randrange(4)] + _ids(rng, own, vocab_size)
        output = min(128, max(8, round(rng.lognormvariate(3.6, 0.7))))
        workload.append(WorkloadRequest(int(clock), prompt, output))
    return workload


def _ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(1, vocab_size) for _ in range(count)]
