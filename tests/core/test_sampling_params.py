import json
import math
from dataclasses import asdict, fields

import pytest

from minillm.core.sampling_params import SamplingParams, StructuredOutputsParams

NAN, INF = math.nan, math.inf
NOT_WHOLE = [True, 1.0, 1.5, NAN, INF, "1", [1]]
NOT_REAL = [True, NAN, INF, -INF, 10**400, "0.5", None, [0.5]]
NOT_TOKEN_IDS = [[-1], [True], [1.5], [NAN], ["a"], [None], [[1]], 0, 7, "12", "", {"a": 1}]

NOT_BIASES = [{1: bias} for bias in (NAN, INF, 1e39, 10**400, "a", True, None)]
NOT_BIASES += [{token: 1.0} for token in ("x", 1.5, True, -1, "-1")]

REFUSED = {
    "n": [*NOT_WHOLE, None, 0, -1],
    "temperature": [*NOT_REAL, -0.1],
    "top_p": [*NOT_REAL, 0, 0.0, -0.5, 1.0001],
    "top_k": [*NOT_WHOLE, None, -2],
    "min_p": [*NOT_REAL, -0.1, 1.1],
    "max_tokens": [*NOT_WHOLE, 0, -1],
    "min_tokens": [*NOT_WHOLE, None, -1],
    "seed": [*NOT_WHOLE, -1, 2**64],
    "stop": [[""], ["a", ""], [b"a"], [1], [None], 0, 5, {"a": 1}],
    "stop_token_ids": NOT_TOKEN_IDS,
    "ignore_eos": ["no", 1, None],
    "include_stop_str_in_output": ["no", 0, None],
    "logprobs": [*NOT_WHOLE, -1],
    "prompt_logprobs": [*NOT_WHOLE, -1],
    "presence_penalty": [*NOT_REAL, -2.1, 2.1],
    "frequency_penalty": [*NOT_REAL, -2.1, 2.1],
    "repetition_penalty": [*NOT_REAL, 0, 0.0, -1.0, 1e-300, 1e300],
    "logit_bias": [*NOT_BIASES, [1], 3],
    "allowed_token_ids": [*NOT_TOKEN_IDS, []],
    "prompt_logprobs_start": [*NOT_WHOLE, None, -1],
    "structured_outputs": ["json", 1, ["a"], {"jsn": {}}],
}


def test_every_field_has_values_that_are_refused():
    assert REFUSED.keys() == {f.name for f in fields(SamplingParams)}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_bad_values_are_refused_by_name_and_value(name, value):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert name in message
    entries = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    shown = [repr(value), *map(repr, entries)] if value != [] else ["empty"]  # the wrong entry of a list is enough
    assert any(text in message for text in shown)


ACCEPTED = [
    dict(temperature=0),
    dict(temperature=5),
    dict(temperature=1e-300),
    dict(top_p=1),
    dict(top_p=1e-9),
    dict(top_k=-1),
    dict(top_k=10**6),
    dict(min_p=0),
    dict(min_p=1),
    dict(max_tokens=None, min_tokens=10**6),
    dict(max_tokens=3, min_tokens=3),
    dict(seed=0),
    dict(seed=2**64 - 1),
    dict(n=2, temperature=0.1),
    dict(logprobs=0, prompt_logprobs=0),
    dict(presence_penalty=-2, frequency_penalty=2),
    dict(repetition_penalty=0.01),
    dict(logit_bias={}),
    dict(logit_bias={0: -100}),
    dict(allowed_token_ids=(3, 4)),
    dict(stop=None, stop_token_ids=None),
    dict(stop=("a", "b")),
]


@pytest.mark.parametrize("values", ACCEPTED, ids=str)
def test_values_at_the_limits_are_taken(values):
    SamplingParams(**values)


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert not params.greedy and SamplingParams(temperature=0).greedy


def test_min_tokens_above_max_tokens():
    with pytest.raises(ValueError, match=r"min_tokens is 4; .*max_tokens \(3\)"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_several_greedy_samples():
    with pytest.raises(ValueError, match="n is 2 at temperature 0"):
        SamplingParams(n=2, temperature=0)


def test_stop_tokens_alone_cannot_fill_min_tokens():
    with pytest.raises(ValueError, match=r"allowed_token_ids is \[3, 4\].*min_tokens \(1\)"):
        SamplingParams(allowed_token_ids=[3, 4], stop_token_ids=[4, 3, 5], min_tokens=1)
    SamplingParams(allowed_token_ids=[3, 4], stop_token_ids=[4], min_tokens=1)
    SamplingParams(allowed_token_ids=[3, 4], stop_token_ids=[4, 3])


def test_a_stop_string_becomes_a_list():
    assert SamplingParams(stop="END").stop == ["END"]
    assert SamplingParams(stop=("a", "b")).stop == ["a", "b"]
    assert SamplingParams(stop=None).stop == []
    with pytest.raises(ValueError, match=r"stop is \[''\]"):
        SamplingParams(stop="")


def test_lists_are_copied():
    stop, ids = ["a"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=ids, allowed_token_ids=ids)
    stop.append(""), ids.append(-1)
    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (["a"], [1], [1])


def test_defaults_are_not_shared():
    SamplingParams().stop.append("a")
    assert SamplingParams().stop == []


def test_logit_bias_keys_from_json():
    params = SamplingParams(logit_bias={"12": 1, 3: -2.5})
    assert params.logit_bias == {12: 1.0, 3: -2.5}
    assert all(type(token) is int and type(bias) is float for token, bias in params.logit_bias.items())
    again = SamplingParams(**json.loads(json.dumps(params.to_dict())))
    assert again == params


def test_token_ids_named_misses_no_field():
    params = SamplingParams(stop_token_ids=[1], logit_bias={2: 1.0}, allowed_token_ids=[3])
    assert params.token_ids_named() == {"stop_token_ids": [1], "logit_bias": [2], "allowed_token_ids": [3]}
    assert asdict(params) == params.to_dict()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "nothing"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"json": "{"}, "'{'"),
        ({"json": {"enum": {1, 2}}}, "{1, 2}"),
        ({"json": "[]"}, "an object"),
        ({"regex": 1}, "regex is 1"),
        ({"grammar": ["a"]}, "grammar is ['a']"),
        ({"choice": "ab"}, "choice is 'ab'"),
        ({"choice": []}, "choice is []"),
        ({"choice": ["a", ""]}, "choice is ['a', '']"),
        ({"json_object": "yes"}, "json_object is 'yes'"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace is 1"),
    ],
)
def test_structured_outputs_name_one_shape_and_a_good_one(given, named):
    with pytest.raises(ValueError) as error:
        StructuredOutputsParams(**given)
    assert named in str(error.value)


def test_structured_outputs_may_come_from_json():
    params = SamplingParams(structured_outputs={"json": {"type": "integer"}})
    assert params.structured_outputs == StructuredOutputsParams(json={"type": "integer"})
    assert SamplingParams(**json.loads(json.dumps(params.to_dict()))) == params
    assert StructuredOutputsParams(json_object=False, regex="a").json_object is None
