"""Helpers of several tests: a random model, ways to drive an engine, executors that fail on purpose."""

from __future__ import annotations

import random
from concurrent.futures import Future

import torch

from minillm.core.config import LAST_BUILT, EngineConfig
from minillm.core.model_config import ModelConfig
from minillm.core.outputs import RequestOutput
from minillm.core.sampling_params import SamplingParams
from minillm.engine.engine import Engine
from minillm.engine.executor import InProcessExecutor
from minillm.engine.runner import ModelRunner
from minillm.models.llama import LlamaForCausalLM
from minillm.models.loader import DTYPES

VOCAB = 256
MAX_LEN = 128  # positions of the random model
EOS = (254, 255)


def random_config(**changes) -> ModelConfig:
    shape = dict(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_LEN,
        sliding_windows=(None, None),
        eos_token_ids=EOS,
    )
    return ModelConfig(**(shape | changes))


def random_model(dtype: str = "float32", seed: int = 0, **changes) -> LlamaForCausalLM:
    """A Llama with seeded random weights: logits spread over more than 1, and attention weighs in.

    The weights are drawn in float64, so models of different dtype differ by rounding alone.
    """
    config = random_config(dtype=dtype, **changes)
    model = LlamaForCausalLM(config, DTYPES[dtype])
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        if name.endswith("norm.weight"):
            drawn = 1 + 0.1 * drawn
        elif name.startswith("lm_head"):
            drawn = drawn * 2.5 * weight.shape[1] ** -0.5
        elif not name.startswith("embed"):
            drawn = drawn * 1.5 * weight.shape[1] ** -0.5
        weight.copy_(drawn)
    model.process_after_loading()
    return model


def distinct_chapters() -> list[int]:
    """The chapters whose engine differs from the one before: what must give the same tokens."""
    chapters = range(LAST_BUILT + 1)
    return [n for n in chapters if n == 0 or EngineConfig.at_chapter(n) != EngineConfig.at_chapter(n - 1)]


def random_prompt(rng: random.Random, length: int) -> dict:
    return {"prompt_token_ids": [rng.randrange(VOCAB) for _ in range(length)]}


def greedy(max_tokens: int = 8, **more) -> SamplingParams:
    more.setdefault("ignore_eos", True)
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def drain(engine: Engine, done: dict[str, RequestOutput] | None = None) -> dict[str, RequestOutput]:
    """Step to the end, checking the books after every step. Last output of each prompt."""
    done = {} if done is None else done
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert output.request_id not in done, "delivered twice"
                done[output.request_id] = output
        assert engine.check_integrity()
    return done


def serve(engine: Engine, requests: dict[str, tuple[dict, SamplingParams]]) -> dict[str, RequestOutput]:
    """Queue all, run all."""
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params)
    return drain(engine)


def all_free(engine: Engine) -> bool:
    return engine.check_integrity() and engine.kv.num_free_blocks == engine.kv.num_usable_blocks


def assert_same(got: RequestOutput, want: RequestOutput, tolerance: float = 1e-9) -> None:
    """Equal token ids and reasons, log-probabilities within ``tolerance``."""
    assert len(got.outputs) == len(want.outputs)
    for a, b in zip(got.outputs, want.outputs, strict=True):
        assert a.token_ids == b.token_ids
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        assert_close_logprobs(a.logprobs, b.logprobs, tolerance)
    assert_close_logprobs(got.prompt_logprobs, want.prompt_logprobs, tolerance)


def assert_close_logprobs(got: list | None, want: list | None, tolerance: float) -> None:
    assert (got is None) == (want is None)
    for a, b in zip(got or [], want or [], strict=True):
        assert (a is None) == (b is None)
        if a is None:
            continue
        assert a.keys() == b.keys()
        for token in a:
            assert abs(a[token].logprob - b[token].logprob) <= tolerance
            assert a[token].rank == b[token].rank


class FailingExecutor(InProcessExecutor):
    """Raises ``error`` instead of running the passes numbered in ``at`` (from 0).

    ``after``: the pass is run and its result lost, so the KV cache and the runner's rows have gone on.
    """

    def __init__(self, *parts, error: BaseException, at: tuple[int, ...], after: bool = False):
        super().__init__(ModelRunner(*parts))
        self.error, self.at, self.after, self.passes = error, at, after, 0

    def submit(self, batch) -> Future:
        number, self.passes = self.passes, self.passes + 1
        if number not in self.at:
            return super().submit(batch)
        if self.after:
            super().submit(batch).result()
        future: Future = Future()
        future.set_exception(self.error)
        return future


def failing(**how) -> dict:
    """Parts of an engine whose executor fails on purpose."""
    return {"executor": lambda *parts: FailingExecutor(*parts, **how)}
