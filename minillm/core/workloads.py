"""Workloads: seeded sets of requests, the same on every machine. Token ids only, so that no tokenizer is needed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class WorkloadRequest:
    """One request: when it comes, what it asks, how many tokens it gets, by force.

    ``arrival`` is read on the clock of whoever serves: bench/workload.py counts forward passes, the simulator seconds.
    """

    arrival: float
    prompt_token_ids: list[int]
    output_len: int
    n: int = 1  # samples of the prompt, each of output_len tokens
    priority: int = 0  # a smaller number first, with scheduling_policy="priority"


class Lengths(Protocol):
    """A distribution of lengths in tokens."""

    def draw(self, rng: random.Random) -> int: ...


@dataclass(frozen=True)
class Fixed:
    length: int

    def draw(self, rng: random.Random) -> int:
        return self.length


@dataclass(frozen=True)
class Uniform:
    """Every length from low to high alike."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True)
class LogNormal:
    """Logarithms are normal: mean ln(median), deviation sigma. What falls outside [low, high] is moved to its end."""

    median: float
    sigma: float
    low: int = 1
    high: int = 1024

    def draw(self, rng: random.Random) -> int:
        return min(self.high, max(self.low, round(self.median * math.exp(self.sigma * rng.gauss(0, 1)))))


# Fits, no traces: (prompt, output). Median and sigma were chosen so that the means, after the cut at 1,024, are those
# of PagedAttention's Figure 11: ShareGPT 161 and 338 tokens, Alpaca 19.3 and 58.5. The spread is ours: sigma 1 is about
# that of public chat traffic (Azure's 2023 conversation trace: 0.99 of prompts, 0.86 of outputs).
SHAREGPT = LogNormal(101, 1.0), LogNormal(236.5, 1.0)
ALPACA = LogNormal(16.1, 0.6), LogNormal(35.6, 1.0)


def random_workload(
    requests: int,
    lengths: tuple[Lengths, Lengths] = SHAREGPT,
    rate: float = math.inf,
    cv: float = 1.0,
    n: int = 1,
    prefixes: int = 0,
    prefix_len: int = 0,
    vocab_size: int = 2048,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """Requests of random (prompt, output) lengths, in order of arrival, which is in seconds.

    ``rate``       requests per second; infinite: all at once
    ``cv``         coefficient of variation of the gaps between arrivals, which are gamma distributed: 1 is a Poisson
                   process, more comes in bursts, 0 is a clock
    ``n``          samples of each prompt
    ``prefixes``   every prompt begins with one of so many prefixes of ``prefix_len`` tokens, before its own tokens

    Lengths, arrivals and tokens are drawn from separate streams: another rate stretches the same arrivals of the same
    requests.
    """
    if not rate > 0 or not cv >= 0:
        raise ValueError(f"rate is {rate} and cv {cv}; rate must be above 0, cv at least 0")
    of_lengths, of_arrivals, of_tokens = (random.Random(f"{seed} {what}") for what in ("lengths", "arrivals", "tokens"))
    shared = [_ids(of_tokens, prefix_len, vocab_size) for _ in range(prefixes)]
    workload, clock = [], 0.0
    for _ in range(requests):
        clock += (of_arrivals.gammavariate(cv**-2, cv**2) if cv else 1.0) / rate
        prompt_len, output_len = (distribution.draw(of_lengths) for distribution in lengths)
        prefix = of_tokens.choice(shared) if shared else []
        workload.append(WorkloadRequest(clock, prefix + _ids(of_tokens, prompt_len, vocab_size), output_len, n))
    return workload


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
