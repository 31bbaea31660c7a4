"""Random request sets with aborts at random moments: the books balance after every step, every output is legal."""

from __future__ import annotations

import random

import pytest

from minillm.core.outputs import CompletionOutput, RequestOutput
from minillm.core.sampling_params import SamplingParams
from tests.support import EOS, VOCAB, all_free, distinct_chapters, random_prompt

SETS, CHUNK = 300, 20


def random_params(rng: random.Random, capacity: int) -> SamplingParams:
    max_tokens = rng.choice([None, 1, 2, rng.randint(1, 10), rng.randint(1, 10), 10 * capacity])
    params = dict(
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, min(max_tokens or 6, 6)) if rng.random() < 0.4 else 0,
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=rng.sample(range(VOCAB), rng.choice([0, 0, 3, 60])),
        logprobs=rng.choice([None, None, 0, 2, 5]),
        prompt_logprobs=rng.choice([None, None, None, 0, 3]),
        presence_penalty=rng.choice([0.0, 0.0, 1.5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        # Enough of them that they cannot all be stop tokens.
        allowed_token_ids=rng.choice([None, None, None, rng.sample(range(VOCAB), 80)]),
        logit_bias=rng.choice([None, None, {rng.randrange(VOCAB): 5.0, EOS[0]: 3.0}]),
    )
    if rng.random() < 0.35:
        return SamplingParams(temperature=0, **params)
    return SamplingParams(
        temperature=rng.choice([0.3, 1.0, 3.0]),
        top_p=rng.choice([1.0, 0.8]),
        top_k=rng.choice([0, 1, 30]),
        min_p=rng.choice([0.0, 0.1]),
        seed=rng.choice([None, rng.randrange(5)]),
        n=rng.choice([1, 1, 2, 3]),
        **params,
    )


class Watcher:
    """Follows every prompt's outputs and complains of the first that is not legal."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.asked: dict[str, tuple[dict, SamplingParams]] = {}
        self.last: dict[str, RequestOutput] = {}
        self.aborted: set[str] = set()

    def see(self, output: RequestOutput) -> None:
        prompt, params = self.asked[output.request_id]
        before = self.last.get(output.request_id)
        assert before is None or not before.finished, "an output after the last one"
        assert output.prompt_token_ids == prompt["prompt_token_ids"]
        assert len(output.outputs) == params.n
        assert output.finished == all(sample.finished for sample in output.outputs)
        for i, sample in enumerate(output.outputs):
            old = before.outputs[i] if before else None
            self._growth(sample, old)
            self._counts(sample, len(output.prompt_token_ids), params, output.request_id in self.aborted)
        if params.prompt_logprobs is not None and any(sample.token_ids for sample in output.outputs):
            assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        self.last[output.request_id] = output

    def _growth(self, sample: CompletionOutput, old: CompletionOutput | None) -> None:
        if old is None:
            return
        assert sample.token_ids[: len(old.token_ids)] == old.token_ids
        if old.finished:
            assert (sample.token_ids, sample.finish_reason) == (old.token_ids, old.finish_reason)

    def _counts(self, sample: CompletionOutput, prompt: int, params: SamplingParams, aborted: bool) -> None:
        count = len(sample.token_ids)
        most = min(params.max_tokens or self.capacity, self.capacity - prompt)
        assert count <= most
        assert all(0 <= token < VOCAB for token in sample.token_ids)
        if params.allowed_token_ids is not None:
            assert set(sample.token_ids) <= set(params.allowed_token_ids)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(EOS))
        assert not set(sample.token_ids[:-1]) & ends, "it went on past its end"
        assert not set(sample.token_ids[: params.min_tokens]) & {*EOS, *params.stop_token_ids}
        if sample.finish_reason == "stop":
            assert sample.token_ids[-1] in ends
            assert count >= params.min_tokens
            own = sample.token_ids[-1] in EOS and not params.ignore_eos
            assert sample.stop_reason == (None if own else sample.token_ids[-1])
        elif sample.finish_reason == "length":
            assert count == most
        elif sample.finish_reason == "abort":
            assert aborted
        else:
            assert sample.finish_reason is None
            assert count < most
        if params.logprobs is None:
            assert sample.logprobs is None
        else:
            assert len(sample.logprobs) == count
            for token, position in zip(sample.token_ids, sample.logprobs, strict=True):
                assert token in position
                assert params.logprobs <= len(position) <= params.logprobs + 1
                assert all(entry.logprob <= 0 for entry in position.values())


def run_set(seed: int, engine_factory) -> None:
    rng = random.Random(seed)
    engine = engine_factory(
        dtype="float32",
        chapter=rng.choice(distinct_chapters()),
        max_num_seqs=rng.choice([1, 2, 3, 8]),
        max_model_len=rng.choice([2, 5, 16, 48]),
        kv_cache_memory_bytes=rng.choice([60_000, 400_000]),
        seed=seed,
    )
    capacity = engine.kv.capacity
    watcher, waiting = Watcher(capacity), []
    for i in range(rng.randint(1, 7)):
        length = rng.choice([1, capacity - 1, rng.randint(1, capacity - 1)])
        waiting.append((f"r{i}", random_prompt(rng, length), random_params(rng, capacity)))
    while waiting or engine.has_unfinished_requests():
        while waiting and rng.random() < 0.6:
            request_id, prompt, params = waiting.pop()
            watcher.asked[request_id] = (prompt, params)
            engine.add_request(request_id, prompt, params)
        if rng.random() < 0.05 and engine.outputs.prompts:
            victim = rng.choice(sorted(engine.outputs.prompts))
            watcher.aborted.add(victim)
            watcher.see(engine.abort(victim))
            assert engine.check_integrity()
        for output in engine.step():
            watcher.see(output)
        assert engine.check_integrity()
        running = engine.scheduler.running
        assert len(running) <= engine.config.max_num_seqs
        assert set(engine.scheduler.requests) >= {request.request_id for request in running}
    assert set(watcher.last) == set(watcher.asked)
    assert all(output.finished for output in watcher.last.values())
    assert all_free(engine)
    assert not engine.outputs.prompts
    generated = sum(len(s.token_ids) for output in watcher.last.values() for s in output.outputs)
    assert engine.metrics.tokens_generated == generated


@pytest.mark.parametrize("first", range(0, SETS, CHUNK))
def test_random_request_sets(engine_factory, first):
    for seed in range(first, first + CHUNK):
        run_set(seed, engine_factory)
