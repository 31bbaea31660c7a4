"""Constrained decoding on the embedded model: outputs obey their grammar, and jump-forward changes counters alone."""

import json
import random
import re
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
import torch

from minillm.core.batch import ModelOutput, ScheduledBatch
from minillm.core.chapters import files_of
from minillm.core.config import LAST_BUILT, EngineConfig
from minillm.core.sampling_params import SamplingParams, StructuredOutputsParams
from minillm.engine.engine import Engine
from minillm.engine.executor import InProcessExecutor
from minillm.engine.runner import ModelRunner
from minillm.engine.structured import GrammarError, Grammars, GrammarState
from minillm.models.fetch import resolve
from minillm.models.loader import load_model
from minillm.models.tokenizer import Tokenizer
from tests.support import all_free, assert_same, drain, serve
from tests.toy_tokenizers import byte_level, sentencepiece_like

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Elizabeth", "Jane", "Mr. Darcy"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "virtues": {"type": "array", "items": {"enum": ["wit", "sense", "pride"]}, "minItems": 1, "maxItems": 3},
        "note": {"type": "string", "maxLength": 12},
        "married": {"type": "boolean"},
    },
    "required": ["name", "age", "virtues", "note"],
    "additionalProperties": False,
}
# Grammars of every kind, each with what says whether a text obeys it.
GRAMMARS: dict[str, tuple[dict, Callable[[str], object]]] = {
    "json": ({"json": SCHEMA}, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
    "regex": ({"regex": r"(Mr|Mrs)\. [A-Z][a-z]{2,6} of (Netherfield|Pemberley)"}, lambda text: len(text) > 15),
    "choice": ({"choice": ["yes", "yes, indeed", "no"]}, lambda text: text in ("yes", "yes, indeed", "no")),
    "lark": ({"grammar": 'start: greeting " and farewell"\ngreeting: "good day" | "well met"'}, lambda t: t[:4] > "a"),
    "gbnf": ({"grammar": 'root ::= "chapter " [1-9] [0-9]?'}, lambda text: re.fullmatch("chapter [1-9][0-9]?", text)),
}
PROMPTS = ["And so she said: ", "It is a truth", "The LORD"]


@pytest.fixture(scope="module")
def tokenizer(embedded):
    return Tokenizer(embedded("tiny"))


@pytest.fixture(scope="module")
def tiny32(embedded):
    return load_model(embedded("tiny"), "float32", "cpu")


@pytest.fixture(scope="module")
def tiny64(embedded):
    return load_model(embedded("tiny"), "float64", "cpu")


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, 2048, (0,))


@pytest.fixture
def engine(tiny64, tokenizer):
    """f(chapter=last, **engine_args) -> Engine on the embedded model in float64; its books are checked in the end."""
    built = []

    def make(chapter=LAST_BUILT, executor=None, **args):
        args = {"kv_cache_memory_bytes": 16 << 20, "max_model_len": 192, "swap_space": 2**-6} | args
        config = EngineConfig.at_chapter(chapter, dtype="float64", **args)
        built.append(Engine(tiny64, config, tokenizer, executor=executor))
        return built[-1]

    yield make
    for each in built:
        assert each.check_integrity()
        each.close()


def shaped(kind: str = "json", **params) -> SamplingParams:
    params = {"temperature": 1, "seed": 0, "max_tokens": 96} | params
    return SamplingParams(structured_outputs=StructuredOutputsParams(**GRAMMARS[kind][0]), **params)


def mixed(**params) -> dict[str, tuple[str, SamplingParams]]:
    """A few requests of every kind, greedy and seeded, and two without a grammar."""
    requests = {}
    for number, kind in enumerate(GRAMMARS):
        requests[kind] = PROMPTS[number % 3], shaped(kind, seed=number, **params)
        requests[f"{kind} greedy"] = PROMPTS[number % 3], shaped(kind, temperature=0, **params)
    requests["free"] = PROMPTS[0], SamplingParams(seed=3, max_tokens=20, **params)
    requests["free greedy"] = PROMPTS[1], SamplingParams(temperature=0, max_tokens=20, **params)
    return requests


def ids(outputs: dict) -> dict[str, list]:
    return {name: [(o.token_ids, o.text, o.finish_reason) for o in output.outputs] for name, output in outputs.items()}


# -- outputs obey ---------------------------------------------------------------------------------------------------


def test_json_of_two_hundred_samples_ends_parses_and_validates(tiny32, tokenizer):
    with_engine = EngineConfig.latest(dtype="float32", kv_cache_memory_bytes=32 << 20, max_model_len=192)
    engine = Engine(tiny32, with_engine, tokenizer)
    outputs = serve(engine, {str(i): (PROMPTS[i % 3], shaped(seed=i)) for i in range(200)})
    engine.close()
    texts = [output.outputs[0].text for output in outputs.values()]
    assert {output.outputs[0].finish_reason for output in outputs.values()} == {"stop"}
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 100
    assert engine.metrics.tokens_forced > 0.6 * engine.metrics.tokens_generated
    longest = max(len(output.outputs[0].token_ids) for output in outputs.values())
    assert engine.metrics.forward_passes < longest  # which would each have been a pass


def test_every_kind_obeys_and_the_others_are_not_touched(engine):
    outputs = serve(engine(), mixed())
    for kind, (_, obeys) in GRAMMARS.items():
        for name in (kind, f"{kind} greedy"):
            (output,) = outputs[name].outputs
            assert output.finish_reason == "stop" and output.stop_reason is None
            assert obeys(output.text), (name, output.text)
    alone = serve(engine(), {name: request for name, request in mixed().items() if name.startswith("free")})
    assert ids(alone) == {name: got for name, got in ids(outputs).items() if name in alone}


def test_a_choice_that_begins_another_may_end_or_go_on(engine):
    requests = {str(i): (PROMPTS[0], shaped("choice", seed=i, temperature=3)) for i in range(40)}
    assert {o.outputs[0].text for o in serve(engine(), requests).values()} == {"yes", "yes, indeed", "no"}


def test_stop_tokens_are_allowed_where_the_end_is_and_not_before(tokenizer, grammars):
    state = grammars.start(shaped("choice", stop_token_ids=[1, 9]))
    state.follow(tokenizer.encode("ye"))
    assert not state.allowed()[[0, 1, 9]].any()
    state.follow(tokenizer.encode("yes"))
    assert state.allowed()[[0, 1, 9]].all() and state.allowed().sum() > 3
    assert state.forced(9) == []
    state.follow(tokenizer.encode("no"))
    assert state.allowed().nonzero()[:, 0].tolist() == [0, 1, 9]
    assert state.forced(9) == [], "which of the ends is open"


def test_any_whitespace(tokenizer, grammars):
    spaced = tokenizer.encode('{ "name" : "Jane"')
    for flag, spaces in ((True, False), (False, True)):
        params = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=flag)
        state = grammars.start(SamplingParams(structured_outputs=params))
        if spaces:
            state.follow(spaced)
        else:
            with pytest.raises(GrammarError, match="cannot go on"):
                state.follow(spaced)
    state = grammars.start(SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)))
    state.follow(tokenizer.encode('{"a":[1,null]}'))
    assert state.allowed().nonzero().tolist() == [[0]]


# -- jump-forward ---------------------------------------------------------------------------------------------------


def test_outputs_with_and_without_jump_forward_are_equal(engine):
    jumping, walking = engine(), engine(enable_jump_forward=False)
    assert ids(serve(jumping, mixed())) == ids(serve(walking, mixed()))
    assert jumping.metrics.forward_passes < walking.metrics.forward_passes
    assert jumping.metrics.tokens_forced > 0 == walking.metrics.tokens_forced
    assert jumping.metrics.tokens_generated == walking.metrics.tokens_generated


@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_request_alone_saves_a_pass_for_every_forced_token(engine, kind):
    jumping, walking = engine(), engine(enable_jump_forward=False)
    request = {"a": (PROMPTS[0], shaped(kind))}
    (output,) = serve(jumping, request)["a"].outputs
    serve(walking, request)
    saved = walking.metrics.forward_passes - jumping.metrics.forward_passes
    assert saved == jumping.metrics.tokens_forced > 0
    assert walking.metrics.forward_passes == len(output.token_ids) == jumping.metrics.tokens_generated


@pytest.mark.parametrize("chapter", range(LAST_BUILT + 1))
def test_the_engine_of_every_chapter_serves_it(engine, chapter):
    small = {"max_num_batched_tokens": 24} if chapter >= 4 else {}  # prompts and forced tokens in chunks
    served = engine(chapter, max_num_seqs=4, **small)
    assert ids(serve(served, mixed())) == ids(serve(engine(), mixed()))
    assert served.metrics.tokens_forced == engine_forced(engine)


def engine_forced(engine) -> int:
    fresh = engine()
    serve(fresh, mixed())
    return fresh.metrics.tokens_forced


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_forced_tokens_count_for_penalties(engine, penalty):
    requests = {str(i): (PROMPTS[0], shaped(seed=i, **{penalty: 1.5})) for i in range(4)}
    assert ids(serve(engine(), requests)) == ids(serve(engine(enable_jump_forward=False), requests))


def test_logprobs_switch_it_off_for_their_request(engine):
    jumping, walking = engine(), engine(enable_jump_forward=False)
    request = {"a": (PROMPTS[0], shaped(logprobs=2))}
    got, want = serve(jumping, request)["a"], serve(walking, request)["a"]
    assert_same(got, want)
    assert jumping.metrics.tokens_forced == 0
    (output,) = got.outputs
    assert len(output.logprobs) == len(output.token_ids)
    assert output.token_ids == serve(jumping, {"b": (PROMPTS[0], shaped())})["b"].outputs[0].token_ids
    # Of the model's own distribution: what a grammar forces need not be likely.
    assert min(position[token].logprob for token, position in zip(output.token_ids, output.logprobs, strict=True)) < -1


@pytest.mark.parametrize("jump", [True, False])
def test_max_tokens_ends_it_earlier_wherever_that_is(engine, jump):
    served = engine(enable_jump_forward=jump)
    (whole,) = serve(served, {"whole": (PROMPTS[0], shaped("lark", seed=1))})["whole"].outputs
    n = len(whole.token_ids)
    outputs = serve(served, {str(m): (PROMPTS[0], shaped("lark", seed=1, max_tokens=m)) for m in range(1, n + 2)})
    for m in range(1, n + 2):
        (output,) = outputs[str(m)].outputs
        assert output.token_ids == whole.token_ids[:m]
        assert output.finish_reason == ("stop" if m >= n else "length")


def test_so_does_the_end_of_the_context(engine):
    prompt = {"prompt_token_ids": [5] * 20}
    for length in (21, 22, 25, 30):
        got = serve(engine(max_model_len=length), {"a": (prompt, shaped())})["a"].outputs[0]
        want = serve(engine(max_model_len=length, enable_jump_forward=False), {"a": (prompt, shaped())})["a"].outputs[0]
        assert got.token_ids == want.token_ids and got.finish_reason == "length"
        assert len(got.token_ids) == length - 20


def test_stop_strings_and_stop_tokens_end_it_earlier(engine, tokenizer):
    for params in ({"stop": ['e":'], "seed": 4}, {"stop_token_ids": [tokenizer.encode('"')[0]], "seed": 4}):
        outputs = [
            serve(engine(enable_jump_forward=jump), {"a": (PROMPTS[0], shaped(**params))})["a"].outputs[0]
            for jump in (True, False)
        ]
        assert outputs[0].text == outputs[1].text and outputs[0].finish_reason == "stop"
        assert outputs[0].stop_reason == outputs[1].stop_reason is not None
    # Even one that would come before anything is sampled, and an output that is empty.
    for params in ({"stop_token_ids": [tokenizer.encode("{")[0]]}, {"structured_outputs": {"regex": ""}}):
        (output,) = serve(engine(), {"a": (PROMPTS[0], replace(shaped(), **params))})["a"].outputs
        assert (output.text, output.finish_reason, len(output.token_ids)) == ("", "stop", 1)
    # A stop token that is no text may end it where the grammar may end.
    outputs = serve(engine(), {str(i): (PROMPTS[0], shaped("gbnf", seed=i, stop_token_ids=[1])) for i in range(3)})
    assert all(re.fullmatch("chapter [1-9][0-9]?", output.outputs[0].text) for output in outputs.values())


# -- where the state lives ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [{}, {"preemption_mode": "swap"}, {"prefix_cache": "none"}], ids=str)
def test_it_survives_preemption(engine, args):
    requests = {str(i): (PROMPTS[i % 3], shaped(seed=i)) for i in range(8)}
    tight = engine(num_gpu_blocks_override=14, block_size=8, **args)
    assert ids(serve(tight, requests)) == ids(serve(engine(), requests))
    assert tight.metrics.preemptions > 0
    assert all_free(tight)


def test_samples_of_a_prompt_each_have_their_own(engine):
    request = {"a": (PROMPTS[0], shaped(n=5, seed=11))}
    got, want = serve(engine(), request), serve(engine(enable_jump_forward=False), request)
    assert ids(got) == ids(want)
    texts = [output.text for output in got["a"].outputs]
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("passes", [0, 1, 3])
def test_an_abort_at_any_moment_harms_nobody(engine, passes):
    served = engine()
    for name, (prompt, params) in mixed().items():
        served.add_request(name, prompt, params)
    for _ in range(passes):
        served.step()
    for name in ("json", "gbnf greedy"):
        if served.abort(name) is None:
            assert name == "gbnf greedy" and passes == 3, "it had finished"
    outputs = drain(served)
    want = serve(engine(), mixed())
    assert {"json greedy", "free"} <= outputs.keys()
    assert all(ids(outputs)[name] == ids(want)[name] for name in outputs)
    assert all_free(served)


class ThroughJson(InProcessExecutor):
    """As if the runner were another process: all it hears and says is JSON."""

    def submit(self, batch):
        output = super().submit(ScheduledBatch.from_json(batch.to_json())).result()
        future: Future[ModelOutput] = Future()
        future.set_result(ModelOutput.from_json(output.to_json()))
        return future


def test_another_process_could_stand_in_for_the_runner(engine):
    apart = engine(executor=lambda *parts: ThroughJson(ModelRunner(*parts)))
    assert ids(serve(apart, mixed())) == ids(serve(engine(), mixed()))


def test_a_mask_is_computed_only_for_rows_that_sample(engine, monkeypatch):
    computed = []
    allowed = GrammarState.allowed
    monkeypatch.setattr(GrammarState, "allowed", lambda self: computed.append(1) or allowed(self))
    served = engine(max_num_batched_tokens=16)
    prompt = {"prompt_token_ids": [7] * 100}  # seven chunks
    (output,) = serve(served, {"a": (prompt, shaped())})["a"].outputs
    assert len(computed) == len(output.token_ids) - served.metrics.tokens_forced
    assert served.metrics.forward_passes >= len(computed) + 6


def random_walk(state: GrammarState, rng: random.Random, most: int = 60) -> list[tuple[list[int], torch.Tensor]]:
    """Tokens so far and the mask there, place by place, drawing from each mask; nothing is forced."""
    tokens, walk = [], []
    while len(tokens) < most:
        state.follow(tokens)
        mask = state.allowed()
        walk.append((list(tokens), mask))
        token = rng.choice(mask.nonzero()[:, 0].tolist())
        if token in state._ends:
            break
        tokens.append(token)
    return walk


@pytest.mark.parametrize("kind", GRAMMARS)
def test_the_state_is_a_function_of_the_tokens(grammars, kind):
    walk = random_walk(grammars.start(shaped(kind)), random.Random(kind))
    roaming = grammars.start(shaped(kind))
    for tokens, mask in random.Random(1).sample(walk, len(walk)):  # back and forth
        roaming.follow(tokens)
        fresh = grammars.start(shaped(kind))
        fresh.follow(tokens)
        assert roaming.allowed().equal(mask) and fresh.allowed().equal(mask)


@pytest.mark.parametrize("kind", GRAMMARS)
def test_forced_tokens_are_the_only_allowed_ones_and_all_of_those(grammars, kind):
    for seed in range(10):
        walk = random_walk(grammars.start(shaped(kind)), random.Random(seed))
        for tokens, mask in walk:
            state = grammars.start(shaped(kind))
            state.follow(tokens)
            forced = state.forced(100)
            assert (len(forced) > 0) == (mask.sum() == 1)
            if forced:
                assert mask[forced[0]]
                assert state.forced(0) == [] and forced[:1] == grammar_at(grammars, kind, tokens).forced(1)


def grammar_at(grammars, kind, tokens) -> GrammarState:
    state = grammars.start(shaped(kind))
    state.follow(tokens)
    return state


def test_a_state_that_has_run_ahead_comes_back(grammars, tokenizer):
    state = grammars.start(shaped())
    before = state.allowed()
    assert tokenizer.decode(state.forced(100)).startswith('{"name":')
    state.follow([])
    assert state.allowed().equal(before)


def test_a_grammar_that_fails_takes_nobody_with_it(engine, monkeypatch):
    served = engine()
    allowed = GrammarState.allowed

    def fails_once(self):
        if self._matcher.is_accepting() and len(self._tokens) > 2:
            raise GrammarError("the grammar cannot go on: it is too large")
        return allowed(self)

    monkeypatch.setattr(GrammarState, "allowed", fails_once)
    outputs = serve(served, {"gbnf": (PROMPTS[0], shaped("gbnf", seed=1)), "json": (PROMPTS[0], shaped())})
    assert outputs["gbnf"].outputs[0].finish_reason == "abort"
    assert "too large" in outputs["gbnf"].outputs[0].stop_reason
    jsonschema.validate(json.loads(outputs["json"].outputs[0].text), SCHEMA)
    assert all_free(served)


@pytest.mark.parametrize("seed", range(8))
def test_fuzz(engine, seed):
    """Whatever the memory, the budget, the policy, the neighbours: what a request writes is what it writes alone."""
    rng = random.Random(seed)
    size = rng.choice([1, 4, 8, 16])
    args = {
        "block_size": size,
        "num_gpu_blocks_override": -(-rng.choice([200, 320]) // size) + 1,
        "max_num_seqs": rng.choice([1, 2, 4, 16]),
        "max_num_batched_tokens": rng.choice([2, 5, 16, 64]),
        "prefix_cache": rng.choice(["none", "radix", "block_hash"]),
        "preemption_mode": rng.choice(["recompute", "swap"]),
        "scheduling_policy": rng.choice(["fcfs", "mlfq"]),
    }
    changes = [{}, {}, {"n": 2}, {"temperature": 0}, {"max_tokens": rng.randint(1, 30)}, {"stop": ['"', "e"]}]
    changes += [{"logprobs": 1}, {"frequency_penalty": 1.0}, {"stop_token_ids": [2, 26]}]
    todo = {
        str(i): (rng.choice(PROMPTS), shaped(rng.choice([*GRAMMARS]), seed=i, **rng.choice(changes))) for i in range(6)
    }
    served, done, aborted = engine(**args), {}, set()
    queued = list(todo)
    while queued or served.has_unfinished_requests():
        if queued and rng.random() < 0.5:
            name = queued.pop()
            served.add_request(name, *todo[name])
        if rng.random() < 0.03:
            aborted.add(rng.choice([*todo]))
            served.abort([*aborted][-1])
        for output in served.step():
            if output.finished:
                done[output.request_id] = output
        assert served.check_integrity()
    assert done.keys() | aborted == todo.keys()
    alone = engine(enable_jump_forward=False)
    for name in done.keys() - aborted:
        assert ids({name: done[name]}) == ids(serve(alone, {name: todo[name]}))
    assert all_free(served)


# -- tokenizers -----------------------------------------------------------------------------------------------------


def check_tokenizer(tokenizer, vocab: int, eos: tuple[int, ...], samples: int = 20) -> int:
    """Random texts of a grammar with characters of every width obey it; the number of places with one token only."""
    grammars = Grammars(tokenizer, vocab, eos)
    choices = ["the 中 and", "an 😀 STOP", "Ωß"]
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=f"({'|'.join(choices)}|é{{1,3}})\n"))
    single = 0
    for seed in range(samples):
        walk = random_walk(grammars.start(params), random.Random(seed))
        text = tokenizer.decode(walk[-1][0])
        assert re.fullmatch(f"({'|'.join(choices)}|é{{1,3}})\n", text), text
        single += sum(int(mask.sum()) == 1 for _, mask in walk)
        assert all(len(mask) == vocab for _, mask in walk)
    return single


def test_byte_level_and_sentencepiece_tokenizers(tmp_path, tokenizer):
    assert check_tokenizer(tokenizer, 2048, (0,)) > 100
    toy = byte_level(tmp_path / "a")
    assert check_tokenizer(toy, len(toy), (toy.token_id("<|end|>"),)) > 100
    assert check_tokenizer(toy, len(toy) + 10, (toy.token_id("<|end|>"),), samples=3)  # padded embeddings
    toy = sentencepiece_like(tmp_path / "b")
    check_tokenizer(toy, len(toy), (2,))


@pytest.mark.smollm2
def test_the_real_models_tokenizer():
    tokenizer = Tokenizer(resolve("smollm2"))
    grammars = Grammars(tokenizer, 49152, (2, 0))
    walk = random_walk(grammars.start(shaped()), random.Random(0))
    jsonschema.validate(json.loads(tokenizer.decode(walk[-1][0])), SCHEMA)
    assert np.mean([int(mask.sum()) == 1 for _, mask in walk]) > 0.5


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ({"json": {"type": "objct"}}, "objct"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 1}}, "minimum"),
        ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": r"[^\x00-\U0010FFFF]"}, "no text obeys it"),
        ({"grammar": 'start: "a" foo'}, "foo"),
        ({"grammar": "what is this"}, "what is this"),
    ],
)
def test_a_bad_grammar_is_refused_when_it_is_added(engine, grammar, says):
    served = engine()
    (kind,) = grammar
    with pytest.raises(ValueError, match=f"^{kind} .* cannot be used: ") as error:
        served.add_request("a", "text", SamplingParams(structured_outputs=StructuredOutputsParams(**grammar)))
    assert says in str(error.value) and "\n" not in str(error.value)
    assert not served.has_unfinished_requests()


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_tokens": 2}, {"allowed_token_ids": [1]}])
def test_what_contradicts_a_grammar_is_refused(engine, more):
    with pytest.raises(ValueError, match=next(iter(more))):
        engine().add_request("a", "text", shaped(**more))


def test_without_a_tokenizer_or_an_end_it_is_refused(engine_factory, tokenizer):
    with pytest.raises(ValueError, match="tokenizer"):
        engine_factory().add_request("a", {"prompt_token_ids": [1]}, shaped())
    with pytest.raises(ValueError, match="end token"):
        Grammars(tokenizer, 2048, ())


def test_a_copy_of_chapter_4_says_what_it_lacks(engine, monkeypatch):
    assert "engine/structured.py" not in files_of(4)
    monkeypatch.setitem(sys.modules, "minillm.engine.structured", None)  # as if it were not there
    with pytest.raises(ValueError, match="chapter 05"):
        engine().add_request("a", "text", shaped())
