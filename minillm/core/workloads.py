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


def few_shot(
    tasks: int = 4,
    questions: int = 8,
    examples: int = 5,
    example_len: int = 45,
    question_len: int = 24,
    output_len: int = 4,
    vocab_size: int = 2048,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """Few-shot questions (MMLU in SGLang's evaluation): each task's questions stand behind its own examples.

    Prompt: examples · example_len shared tokens, then 1 to question_len of its own. Shape: ``tasks`` trees of two
    levels.
    """
    rng = random.Random(f"few-shot {seed}")
    groups = []
    for _ in range(tasks):
        shared = _ids(rng, examples * example_len, vocab_size)
        own = (_ids(rng, rng.randint(1, question_len), vocab_size) for _ in range(questions))
        groups.append([shared + question for question in own])
    return _interleaved(rng, groups, output_len)


def chat(
    conversations: int = 6,
    turns: int = 5,
    system_len: int = 64,
    turn_len: int = 32,
    answer_len: int = 48,
    vocab_size: int = 2048,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """Chats of several turns behind one system prompt: a turn's prompt is all that was said, then 1 to turn_len tokens.

    What a model answered cannot be known ahead, so answers of exactly ``answer_len`` tokens are made up and put into
    later prompts; who serves this gets no hit on its own output. Shape: a stem, then one path for each conversation,
    every prompt the beginning of the next.
    """
    rng = random.Random(f"chat {seed}")
    system = _ids(rng, system_len, vocab_size)
    groups = []
    for _ in range(conversations):
        said, prompts = list(system), []
        for _ in range(turns):
            said = said + _ids(rng, rng.randint(1, turn_len), vocab_size)
            prompts.append(said)
            said = said + _ids(rng, answer_len, vocab_size)
        groups.append(prompts)
    return _interleaved(rng, groups, answer_len)


def tree_of_thought(
    problems: int = 3,
    depth: int = 3,
    branches: int = 3,
    problem_len: int = 128,
    thought_len: int = 24,
    vocab_size: int = 2048,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """Tree of thought: every node asks for ``branches`` next thoughts, its prompt the problem and the thoughts above.

    Thoughts are made up, as the answers of ``chat`` are. Shape: ``problems`` full trees of 1 + branches + … +
    branches^(depth − 1) prompts, level by level, each prompt the beginning of those below it.
    """
    rng = random.Random(f"tree {seed}")
    groups = []
    for _ in range(problems):
        level = prompts = [_ids(rng, problem_len, vocab_size)]
        for _ in range(depth - 1):
            level = [prompt + _ids(rng, thought_len, vocab_size) for prompt in level for _ in range(branches)]
            prompts = prompts + level
        groups.append(prompts)
    return _interleaved(rng, groups, thought_len)


def self_consistency(
    questions: int = 6,
    samples: int = 5,
    examples_len: int = 160,
    question_len: int = 32,
    output_len: int = 24,
    vocab_size: int = 2048,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """Self-consistency: each question asked ``samples`` times, to vote. Requests of their own here, not n > 1.

    Prompt: examples_len tokens that all share, then 1 to question_len. Shape: a stem with a leaf for each question,
    every leaf visited ``samples`` times.
    """
    rng = random.Random(f"votes {seed}")
    examples = _ids(rng, examples_len, vocab_size)
    prompts = [examples + _ids(rng, rng.randint(1, question_len), vocab_size) for _ in range(questions)]
    return _interleaved(rng, [[prompt] * samples for prompt in prompts], output_len)


def _interleaved(rng: random.Random, groups: list[list[list[int]]], output_len: int) -> list[WorkloadRequest]:
    """All there from the start, in a random order that keeps each group's own: the order of arrival."""
    turns = [number for number, group in enumerate(groups) for _ in group]
    rng.shuffle(turns)
    left = [iter(group) for group in groups]
    return [WorkloadRequest(0.0, next(left[number]), output_len) for number in turns]


def _ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(1, vocab_size) for _ in range(count)]
