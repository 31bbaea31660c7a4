"""The front door, with the embedded model."""

import gc

import pytest
import torch

from minillm import LLM, EngineConfig, SamplingParams
from minillm.compute.attention.base import StepAttention
from minillm.compute.attention.dense import DenseAttention
from minillm.compute.attention.naive import NaiveAttention
from minillm.engine.engine import EngineDeadError
from minillm.memory.kv_cache import KVCache
from minillm.memory.kv_manager import KVGeometry, group_layers
from minillm.scheduling.scheduler import Scheduler
from tests.compute.attention.reference import metadata
from tests.support import all_free

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["It is a truth", "And the LORD said unto", "She"]


@pytest.fixture(scope="module")
def llm(embedded):
    embedded("tiny")
    with LLM("tiny", dtype="float32", max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        if llm._inbox:
            gc.collect()  # a stream dropped in a test may hang in a cycle
        assert all_free(llm.engine)
        assert not llm.engine.outputs.prompts
        assert not llm._inbox


def texts(outputs) -> list[str]:
    return [output.outputs[0].text for output in outputs]


# -- generate -------------------------------------------------------------------------------------------------------


def test_a_string_a_list_and_token_ids(llm):
    want = texts(llm.generate(PROMPTS, GREEDY))
    assert all(want)
    assert len(set(want)) == 3
    assert texts(llm.generate(PROMPTS[0], GREEDY)) == want[:1]
    ids = llm.tokenizer.encode(PROMPTS[1])
    (output,) = llm.generate({"prompt_token_ids": ids}, GREEDY)
    assert output.outputs[0].text == want[1]
    assert output.prompt_token_ids == ids
    assert output.prompt is None
    mixed = llm.generate([PROMPTS[0], {"prompt_token_ids": ids, "prompt": PROMPTS[1]}], GREEDY)
    assert texts(mixed) == want[:2]
    assert [output.prompt for output in mixed] == PROMPTS[:2]


def test_outputs_come_in_the_order_of_the_prompts(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    outputs = llm.generate(PROMPTS, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5]
    assert [output.prompt for output in outputs] == PROMPTS
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_text_is_that_of_the_tokens(llm):
    for output in llm.generate(PROMPTS, SamplingParams(seed=1, max_tokens=40, ignore_eos=True)):
        whole = llm.tokenizer.decode(output.prompt_token_ids + output.outputs[0].token_ids)
        assert whole == output.prompt + output.outputs[0].text


def test_default_params_are_vllms(llm):
    (output,) = llm.generate(PROMPTS[0])
    assert len(output.outputs[0].token_ids) <= 16


def test_no_prompts_no_outputs(llm):
    assert llm.generate([], GREEDY) == []


def test_a_progress_bar_changes_nothing(llm, capsys):
    assert texts(llm.generate(PROMPTS, GREEDY, use_tqdm=True)) == texts(llm.generate(PROMPTS, GREEDY))
    assert "3/3" in capsys.readouterr().err


BAD = ["", {"prompt_token_ids": []}, {"prompt_token_ids": [10**6]}, {"prompt_token_ids": None}, 7, None, ["a", "b"]]


@pytest.mark.parametrize("bad", BAD, ids=repr)
@pytest.mark.parametrize("place", [0, 2])
def test_one_bad_prompt_leaves_none_of_the_list_queued(llm, bad, place):
    prompts = [*PROMPTS[:2]]
    prompts.insert(place, bad)
    for call in (llm.generate, llm.stream):
        with pytest.raises(ValueError, match=f"^prompt {place}: "):
            call(prompts, GREEDY)
        assert not llm.engine.has_unfinished_requests()
        assert not llm._inbox


def test_a_lone_bad_prompt_needs_no_number(llm):
    with pytest.raises(ValueError, match=r"^the prompt is empty"):
        llm.generate("", GREEDY)


def test_one_params_for_each_prompt(llm):
    with pytest.raises(ValueError, match="3 prompts and 2 sampling_params"):
        llm.generate(PROMPTS, [GREEDY] * 2)
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("prompt", ["Größe — naïve café, 東京 🙂🇫🇷", "e\u0301\u200d\ufeff", "\0\n\t", "\ufffd", "𝔘𝔫𝔦"])
def test_unicode_prompts(llm, prompt):
    (output,) = llm.generate(prompt, SamplingParams(seed=0, max_tokens=30, ignore_eos=True))
    assert llm.tokenizer.decode(output.prompt_token_ids) == prompt
    deltas = [o.outputs[0].delta for o in llm.stream(prompt, SamplingParams(seed=0, max_tokens=30, ignore_eos=True))]
    assert "".join(deltas) == output.outputs[0].text


def test_half_a_character_is_no_text(llm):
    """A lone surrogate, as json.loads and some file names make them."""
    with pytest.raises(ValueError, match="lone surrogate"):
        llm.generate("a\ud83d", GREEDY)


# -- stream, abort --------------------------------------------------------------------------------------------------


def test_deltas_add_up_to_the_text(llm):
    params = SamplingParams(seed=3, max_tokens=40, n=2, stop=["e of", "and"])
    want = llm.generate(PROMPTS, params)
    pieces = {}
    for output in llm.stream(PROMPTS, params):
        for sample in output.outputs:
            key = output.prompt, sample.index
            pieces[key] = pieces.get(key, "") + sample.delta
            assert pieces[key] == sample.text
    assert pieces == {(o.prompt, s.index): s.text for o in want for s in o.outputs}


def test_every_token_is_streamed(llm):
    counts = [len(output.outputs[0].token_ids) for output in llm.stream(PROMPTS[0], GREEDY)]
    assert counts == list(range(1, counts[-1] + 1))


def test_leaving_a_stream_aborts(llm):
    for output in llm.stream(PROMPTS, GREEDY):
        assert not output.finished
        break
    gc.collect()
    assert not llm.engine.has_unfinished_requests()
    assert all_free(llm.engine)


def test_an_error_in_the_loop_body_aborts(llm):
    stream = llm.stream(PROMPTS, GREEDY)
    with pytest.raises(ZeroDivisionError):
        for _ in stream:
            raise ZeroDivisionError
    stream.close()
    assert not llm.engine.has_unfinished_requests()


def test_a_stream_never_read_aborts_when_dropped(llm):
    stream = llm.stream(PROMPTS, GREEDY)
    assert llm.engine.has_unfinished_requests(), "prompts are queued at the call"
    del stream
    gc.collect()
    assert not llm.engine.has_unfinished_requests()


def test_two_streams_interleaved(llm):
    long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    want = texts(llm.generate([PROMPTS[0], PROMPTS[1]], [long, GREEDY]))
    first, second = llm.stream(PROMPTS[0], long), llm.stream(PROMPTS[1], GREEDY)
    got, streams = {}, {0: first, 1: second}
    while streams:
        for name, stream in list(streams.items()):
            output = next(stream, None)
            if output is None:
                del streams[name]
            else:
                got[name] = got.get(name, "") + output.outputs[0].delta
    assert [got[0], got[1]] == want


def test_generate_inside_a_stream(llm):
    want, other = texts(llm.generate(PROMPTS[0], GREEDY)), texts(llm.generate(PROMPTS[2], GREEDY))
    pieces = []
    for i, output in enumerate(llm.stream(PROMPTS[0], GREEDY)):
        pieces.append(output.outputs[0].delta)
        if i == 2:
            assert texts(llm.generate(PROMPTS[2], GREEDY)) == other
    assert ["".join(pieces)] == want


def test_abort_from_the_loop(llm):
    reasons = {}
    for output in llm.stream(PROMPTS, GREEDY):
        if output.prompt == PROMPTS[1] and len(output.outputs[0].token_ids) == 3 and not output.finished:
            llm.abort(output.request_id)
        if output.finished:
            reasons[output.prompt] = (output.outputs[0].finish_reason, len(output.outputs[0].token_ids))
    assert reasons[PROMPTS[1]] == ("abort", 3)
    assert reasons[PROMPTS[0]][0] != "abort"


def test_abort_of_many_and_of_nobody(llm):
    stream = llm.stream(PROMPTS, GREEDY)
    ids = [next(stream).request_id for _ in PROMPTS]
    llm.abort([*ids, "nobody"])
    llm.abort("nobody")
    rest = list(stream)
    assert [output.request_id for output in rest] == ids
    assert {output.outputs[0].finish_reason for output in rest} == {"abort"}


def test_a_prompt_ended_behind_its_stream_does_not_hang(llm):
    stream = llm.stream(PROMPTS[0], GREEDY)
    request_id = next(stream).request_id
    llm.engine.abort(request_id)
    with pytest.raises(RuntimeError, match=f"prompts {request_id} were ended elsewhere"):
        next(stream)


def test_an_interrupt_leaves_the_llm_usable(llm, monkeypatch):
    want = texts(llm.generate(PROMPTS, GREEDY))
    runner, passes = llm.engine.executor.runner, iter(range(100))
    model = runner.model

    def interrupted(*args):
        if next(passes) == 3:
            raise KeyboardInterrupt
        return model(*args)

    interrupted.compute_logits = model.compute_logits
    with monkeypatch.context() as patch:
        patch.setattr(runner, "model", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    assert texts(llm.generate(PROMPTS, GREEDY)) == want


def test_an_error_reaches_one_loop_and_the_other_learns_of_the_abort(llm, monkeypatch):
    first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    next(first)
    next(second)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor.runner, "model", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(first)
    (last,) = list(second)
    assert last.outputs[0].finish_reason == "abort"
    assert list(first) == []


# -- chat -----------------------------------------------------------------------------------------------------------


def test_chat_needs_a_template(llm):
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "Hello"}])
    assert not llm.engine.has_unfinished_requests()


def test_chat_with_a_template(llm, monkeypatch):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    talk = [{"role": "user", "content": "Hello"}]
    (output,) = llm.chat(talk, GREEDY)
    assert llm.tokenizer.decode(output.prompt_token_ids) == "user: Hello\n"
    assert len(llm.chat([talk, talk], GREEDY)) == 2
    with pytest.raises(ValueError, match="no chat message"):
        llm.chat([{"role": "user"}], GREEDY)


# -- construction, end ----------------------------------------------------------------------------------------------


def test_close_and_context_manager(embedded):
    embedded("tiny")
    with LLM("tiny", dtype="float32", max_num_seqs=2) as llm:
        stream = llm.stream("It is", GREEDY)
        next(stream)
    llm.close()
    calls = (lambda: llm.generate("It"), lambda: next(stream), lambda: llm.stream("It"), lambda: llm.abort("0"))
    for call in calls:
        with pytest.raises(EngineDeadError, match="it was closed"):
            call()


@pytest.mark.parametrize("name", ["tinny", "", "no/such/folder", "./nowhere"])
def test_an_unknown_model_is_refused_by_name(name):
    with pytest.raises((ValueError, FileNotFoundError), match=repr(name).strip("'") or "''"):
        LLM(name)


def test_an_unknown_argument_is_refused_by_name(embedded):
    embedded("tiny")
    with pytest.raises(ValueError, match=r"'max_seqs' is no engine argument.*max_num_seqs"):
        LLM("tiny", max_seqs=3)


def test_arguments_override_the_config_and_dtype_is_the_checkpoints(embedded):
    embedded("tiny")
    with LLM("tiny", config=EngineConfig.at_chapter(0, max_num_seqs=5, seed=1), max_num_seqs=3) as llm:
        config = llm.engine.config
        assert (config.max_num_seqs, config.seed) == (3, 1)
        assert config.dtype == "bfloat16"
        assert llm.engine.executor.runner.kv_cache.layer(0).k.dtype == torch.bfloat16
        assert llm.generate("It is", GREEDY)[0].finished


def test_a_scheduler_of_ones_own(embedded):
    embedded("tiny")
    made = []

    class Mine(Scheduler):
        def schedule(self):
            made.append(self)
            return super().schedule()

    with LLM("tiny", scheduler=Mine, dtype="float32", max_num_seqs=2) as llm:
        llm.generate("It is", GREEDY)
        assert made[0] is llm.engine.scheduler


def test_parts_are_checked(embedded):
    embedded("tiny")
    wrong = [("yours", "must be 'mine' or a dict"), ({"atention": 1}, "'atention' is no part of the engine")]
    for parts, said in wrong:
        with pytest.raises(ValueError, match=said):
            LLM("tiny", parts=parts)


def test_attention_of_ones_own(embedded):
    embedded("tiny")
    made = []

    class Mine(NaiveAttention):
        def __init__(self, config, device):
            made.append((config.attention_backend, device.type))

    with LLM("tiny", attention=Mine, parts={"attention": NaiveAttention}, dtype="float32") as llm:
        llm.generate("It is", GREEDY)
    assert made == [(EngineConfig.latest().attention_backend, llm.engine.device.type)]


def test_metrics_are_the_engines(llm):
    llm.metrics.reset()
    llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert (llm.metrics.forward_passes, llm.metrics.tokens_generated) == (3, 3)


# -- torch.compile --------------------------------------------------------------------------------------------------


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


@pytest.mark.parametrize("tokens", [1, 5])
def test_without_the_caches_attention_a_forward_is_one_graph(model32, dynamo, tokens):
    """So that chapter 10 can capture everything between two attentions."""
    inputs = torch.arange(tokens), torch.arange(tokens), DenseAttention(1, tokens)
    with torch.no_grad():
        compiled = torch.compile(model32.forward, backend="eager", fullgraph=True)  # raises at the first break
        torch.testing.assert_close(compiled(*inputs), model32.forward(*inputs))
        assert dynamo.explain(model32.forward)(*inputs).graph_count == 1


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_compiled_step_breaks_its_graph_at_attention_alone(model32, dynamo, tokens):
    """Each layer's attention breaks the graph once, and is the only reason of any break."""
    geometry = KVGeometry(group_layers(model32.kv_cache_spec()), 8, 1, null_rows=1)
    inputs, events = (torch.arange(tokens), torch.arange(tokens)), []

    class Watched(NaiveAttention):
        def forward(self, *args, **kwargs):
            events.append("attention")
            return super().forward(*args, **kwargs)

    def step():
        return StepAttention(Watched(), KVCache(geometry), metadata([tokens], [tokens], [1]))

    def backend(graph, _):
        def run(*args):
            if events[-1:] != ["graphs"]:
                events.append("graphs")
            return graph(*args)

        return run

    with torch.inference_mode():
        got = torch.compile(model32.forward, backend=backend)(*inputs, step())
        assert events == ["graphs", "attention"] * len(model32.layers) + ["graphs"]
        torch.testing.assert_close(got, model32.forward(*inputs, step()))
        dynamo.reset()
        reasons = dynamo.explain(model32.forward)(*inputs, step()).break_reasons
    assert reasons
    for reason in reasons:
        assert "torch.compiler.disable" in reason.reason
        assert "StepAttention.attend" in reason.reason
