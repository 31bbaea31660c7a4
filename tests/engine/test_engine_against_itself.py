"""In float64 a request's tokens and log-probabilities depend on the request alone."""

import random

import pytest
import torch

from minillm.compute.attention.dense import DenseAttention
from minillm.core.request import Request
from minillm.core.sampling_params import SamplingParams
from tests.support import EOS, assert_same, distinct_chapters, drain, greedy, random_prompt, serve

CHAPTERS = distinct_chapters()


def mixed_requests(seed: int, count: int = 8):
    """Prompts of mixed lengths, greedy and seeded, with and without log-probabilities."""
    rng = random.Random(seed)
    requests = {}
    for i in range(count):
        params = dict(
            max_tokens=rng.randint(1, 12),
            ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice([None, 0, 3]),
            prompt_logprobs=rng.choice([None, 2]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            frequency_penalty=rng.choice([0.0, 0.7]),
        )
        if rng.random() < 0.5:
            params |= dict(temperature=0.0)
        else:
            params |= dict(temperature=rng.choice([0.7, 1.5]), seed=rng.randrange(100), n=rng.choice([1, 1, 3]))
            params |= dict(top_p=rng.choice([1.0, 0.9]), top_k=rng.choice([0, 20]))
        requests[f"r{i}"] = (
            random_prompt(rng, rng.choice([1, 2, 30, 100, rng.randint(1, 110)])),
            SamplingParams(**params),
        )
    return requests


@pytest.mark.parametrize("seed", range(3))
def test_alone_and_batched(engine_factory, seed):
    requests = mixed_requests(seed)
    alone = {}
    for name, request in requests.items():
        alone |= serve(engine_factory(chapter=CHAPTERS[0]), {name: request})
    for chapter in CHAPTERS:
        for seats in (1, 2, 5, 256):
            together = serve(engine_factory(chapter=chapter, max_num_seqs=seats), requests)
            assert together.keys() == alone.keys()
            for name in requests:
                assert_same(together[name], alone[name])


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_order_of_arrival_is_indifferent(engine_factory, chapter):
    requests = mixed_requests(7)
    want = serve(engine_factory(chapter=chapter), requests)
    for seed in range(2):
        order = list(requests)
        random.Random(seed).shuffle(order)
        engine, rng, done = engine_factory(chapter=chapter, max_num_seqs=3), random.Random(seed), {}
        while order or engine.has_unfinished_requests():
            if order and rng.random() < 0.6:
                name = order.pop()
                engine.add_request(name, *requests[name])
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = output
        for name in requests:
            assert_same(done[name], want[name])


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_n_samples_are_n_requests_with_a_sample_index(engine_factory, chapter):
    prompt, params = random_prompt(random.Random(3), 12), dict(max_tokens=10, logprobs=2, seed=11, ignore_eos=True)
    together = serve(engine_factory(chapter=chapter), {"a": (prompt, SamplingParams(n=4, **params))})["a"]
    assert [sample.index for sample in together.outputs] == [0, 1, 2, 3]
    assert len({tuple(sample.token_ids) for sample in together.outputs}) == 4, "samples differ"
    for index, sample in enumerate(together.outputs):
        engine = engine_factory(chapter=chapter)
        request = Request("a", prompt["prompt_token_ids"], SamplingParams(**params), seed=11, sample_index=index)
        engine.outputs.add("a", None, [request])
        engine.scheduler.add(request)
        (alone,) = drain(engine)["a"].outputs
        assert alone.token_ids == sample.token_ids
        for got, want in zip(alone.logprobs, sample.logprobs, strict=True):
            assert got.keys() == want.keys()
            assert all(abs(got[t].logprob - want[t].logprob) <= 1e-9 for t in got)


def test_seeded_requests_do_not_see_their_neighbours(engine_factory):
    rng = random.Random(5)
    chosen = (random_prompt(rng, 6), SamplingParams(seed=3, max_tokens=15, temperature=1.2, ignore_eos=True))
    want = serve(engine_factory(), {"chosen": chosen})["chosen"]
    for seed in range(3):
        others = {f"o{i}": (random_prompt(rng, 4), SamplingParams(seed=seed, max_tokens=9)) for i in range(seed + 1)}
        unseeded = {"u": (random_prompt(rng, 8), SamplingParams(max_tokens=20))}
        got = serve(engine_factory(seed=seed), {**others, **unseeded, "chosen": chosen})["chosen"]
        assert_same(got, want)


def test_without_a_seed_the_engines_seed_decides(engine_factory):
    prompt = random_prompt(random.Random(1), 5)

    def tokens(seed):
        done = serve(engine_factory(seed=seed), {name: (prompt, SamplingParams(ignore_eos=True)) for name in "ab"})
        return [done[name].outputs[0].token_ids for name in "ab"]

    first = tokens(0)
    assert tokens(0) == first
    assert tokens(1) != first
    assert first[0] != first[1], "two requests without a seed are two draws"


def test_a_seed_decides_and_another_differs(engine_factory):
    prompt, rng = random_prompt(random.Random(1), 5), range(20)
    done = serve(
        engine_factory(), {str(i): (prompt, SamplingParams(seed=i // 2, ignore_eos=True, max_tokens=12)) for i in rng}
    )
    tokens = [tuple(done[str(i)].outputs[0].token_ids) for i in rng]
    assert all(tokens[i] == tokens[i + 1] for i in rng[::2])
    assert len(set(tokens)) == 10


# -- against the model itself ---------------------------------------------------------------------------------------


def direct_logprobs(model, ids: list[int]) -> torch.Tensor:
    """log_softmax after every token of a sequence, in one forward pass without a cache."""
    hidden = model(torch.tensor(ids), torch.arange(len(ids)), DenseAttention(1, len(ids)))
    return model.compute_logits(hidden).log_softmax(-1)


def assert_position(got: dict, logprobs: torch.Tensor, token: int, k: int) -> None:
    """One position's entries: the token itself, the k most likely, with ranks."""
    best = logprobs.sort(descending=True, stable=True).indices.tolist()
    assert set(got) == {token, *best[:k]}
    for candidate, entry in got.items():
        assert abs(entry.logprob - logprobs[candidate].item()) <= 1e-9
        assert entry.rank == best.index(candidate) + 1


@pytest.mark.parametrize("chapter", CHAPTERS)
@pytest.mark.parametrize("k", [0, 1, 4, 256])
def test_logprobs_are_those_of_a_direct_forward_pass(engine_factory, model64, chapter, k):
    rng = random.Random(k)
    params = [
        greedy(6, logprobs=k, prompt_logprobs=k),
        SamplingParams(seed=2, temperature=2.0, max_tokens=8, logprobs=k, prompt_logprobs=k, presence_penalty=1.0),
    ]
    requests = {f"r{n}": (random_prompt(rng, n), params[n % 2]) for n in (1, 2, 17, 60)}
    done = serve(engine_factory(chapter=chapter), requests)
    for name, (prompt, _) in requests.items():
        ids, output = prompt["prompt_token_ids"], done[name]
        sample = output.outputs[0]
        logprobs = direct_logprobs(model64, ids + sample.token_ids)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(ids)
        for position in range(1, len(ids)):
            assert_position(output.prompt_logprobs[position], logprobs[position - 1], ids[position], k)
        for i, token in enumerate(sample.token_ids):
            assert_position(sample.logprobs[i], logprobs[len(ids) + i - 1], token, k)
        total = sum(sample.logprobs[i][token].logprob for i, token in enumerate(sample.token_ids))
        assert abs(sample.cumulative_logprob - total) <= 1e-9


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_greedy_tokens_are_the_most_likely_ones(engine_factory, model64, chapter):
    prompt = random_prompt(random.Random(9), 20)
    output = serve(engine_factory(chapter=chapter), {"a": (prompt, greedy(30))})["a"].outputs[0]
    logprobs = direct_logprobs(model64, prompt["prompt_token_ids"] + output.token_ids)
    assert logprobs[19:-1].argmax(-1).tolist() == output.token_ids


def test_end_tokens_end(engine_factory):
    """Every end token of the model; none when ignored."""
    prompt = random_prompt(random.Random(2), 4)
    for eos in EOS:
        bias = {eos: 100.0}
        output = serve(engine_factory(), {"a": (prompt, SamplingParams(temperature=0, logit_bias=bias))})["a"].outputs[
            0
        ]
        assert (output.token_ids, output.finish_reason, output.stop_reason) == ([eos], "stop", None)
        output = serve(engine_factory(), {"a": (prompt, greedy(5, logit_bias=bias))})["a"].outputs[0]
        assert (output.token_ids, output.finish_reason) == ([eos] * 5, "length")
        late = SamplingParams(temperature=0, logit_bias=bias, min_tokens=3)
        output = serve(engine_factory(), {"a": (prompt, late)})["a"].outputs[0]
        assert len(output.token_ids) == 4
        assert not set(output.token_ids[:3]) & set(EOS)
