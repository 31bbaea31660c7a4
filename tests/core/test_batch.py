"""A batch and its answer survive JSON, whatever fields they come to have."""

import json
from dataclasses import asdict, fields, is_dataclass, replace

import pytest

from minillm.core.batch import KnownRequest, ModelOutput, NewRequest, ScheduledBatch, TokenLogprob
from minillm.core.sampling_params import SamplingParams, StructuredOutputsParams

PARAMS = SamplingParams(
    n=3,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    max_tokens=20,
    min_tokens=2,
    seed=2**64 - 1,
    stop=["\n\n", "中😀"],
    stop_token_ids=[7, 8],
    ignore_eos=True,
    include_stop_str_in_output=True,
    logprobs=5,
    prompt_logprobs=2,
    presence_penalty=0.1,
    frequency_penalty=-0.2,
    repetition_penalty=1.3,
    logit_bias={11: -1.5, 3: 2.0},
    allowed_token_ids=[3, 11, 7],
    prompt_logprobs_start=1,
    structured_outputs=StructuredOutputsParams(json={"type": "object", "properties": {"中": {"enum": [1, None]}}}),
)
NEW = NewRequest(
    request_id="a/0",
    prompt_token_ids=[1, 2, 3],
    output_token_ids=[4],
    sampling_params=PARAMS,
    seed=2**63,
    sample_index=2,
    adapter_id="poet",
    num_computed_tokens=3,
    block_ids=[[5, 6], [7]],
)
KNOWN = KnownRequest(request_id="b", new_token_ids=[9], new_block_ids=[[8], []], num_computed_tokens=17, rewritten=True)
BATCH = ScheduledBatch(
    step=12,
    new_requests=[NEW],
    known_requests=[KNOWN],
    num_scheduled_tokens={"b": 3, "a/0": 1},  # not in alphabetical order: order is meaning
    draft_token_ids={"b": [10, 11]},
    draft_parents={"b": [-1, 0]},
    block_copies=[(0, 5, 6), (1, 2, 3)],
    swaps_out=[(0, 1, 100)],
    swaps_in=[(0, 101, 2)],
    num_cached_tokens=16,
    finished_ids=["c"],
    preempted_ids=["d"],
)
CANDIDATES = [TokenLogprob(token_id=4, logprob=-0.125, rank=2), TokenLogprob(token_id=5, logprob=-1e-17, rank=1)]
OUTPUT = ModelOutput(
    step=12,
    sampled={"b": [4, 5], "a/0": [6]},
    num_forced={"b": 1},
    failed={"e": "the grammar cannot go on"},
    logprobs={"b": [CANDIDATES, CANDIDATES[:1]]},
    prompt_logprobs={"a/0": [CANDIDATES, CANDIDATES]},
    draft_token_ids={"b": [1, 2]},
    draft_parents={"b": [-1, -1]},
)
FULL = [PARAMS, NEW, KNOWN, BATCH, CANDIDATES[0], OUTPUT]


def unfilled(value) -> list[str]:
    """Fields that the round trip would not miss: equal to their default, or empty."""
    blank = type(value)(step=0) if isinstance(value, ScheduledBatch | ModelOutput) else None
    blank = SamplingParams() if isinstance(value, SamplingParams) else blank
    names = []
    for f in fields(value):
        given = getattr(value, f.name)
        default = getattr(blank, f.name) if blank is not None else (False if f.name == "rewritten" else None)
        if given == default or given in ({}, [], None):
            names.append(f.name)
    return names


@pytest.mark.parametrize("value", FULL, ids=lambda value: type(value).__name__)
def test_every_field_is_filled_here(value):
    assert unfilled(value) == [], "a new field: fill it above, so that the round trip is tested with it"


def test_the_check_itself_notices_an_unfilled_field():
    assert unfilled(replace(BATCH, swaps_in=[])) == ["swaps_in"]
    assert unfilled(replace(KNOWN, rewritten=False)) == ["rewritten"]


def types(value):
    """The value with every type spelt out, since True == 1, (1,) may stand for [1], and so on."""
    if is_dataclass(value):
        return type(value).__name__, {f.name: types(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return "dict", [(types(key), types(inner)) for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [types(inner) for inner in value]
    return type(value).__name__, value


@pytest.mark.parametrize("value", [BATCH, OUTPUT, ScheduledBatch(step=0), ModelOutput(step=0)])
def test_json_round_trip(value):
    again = type(value).from_json(value.to_json())
    assert again == value
    assert types(again) == types(value)
    assert again.to_json() == value.to_json()


def test_json_is_plain():
    """Another process may read it without this package."""
    assert json.loads(BATCH.to_json())["new_requests"][0]["sampling_params"]["top_k"] == 40
    assert json.loads(OUTPUT.to_json())["logprobs"]["b"][0][0] == {"token_id": 4, "logprob": -0.125, "rank": 2}


def test_a_masked_tokens_logprob_survives():
    entry = TokenLogprob(3, float("-inf"), 9)
    output = ModelOutput(step=1, sampled={"a": [3]}, logprobs={"a": [[entry]]})
    assert ModelOutput.from_json(output.to_json()) == output


def test_a_copy_shares_nothing():
    again = ScheduledBatch.from_json(BATCH.to_json())
    again.num_scheduled_tokens["d"] = 1
    again.new_requests[0].block_ids[0].append(99)
    again.new_requests[0].sampling_params.stop.append("x")
    assert "d" not in BATCH.num_scheduled_tokens
    assert NEW.block_ids[0] == [5, 6] and len(PARAMS.stop) == 2


def test_number_of_tokens():
    assert BATCH.num_tokens == 4
    assert ScheduledBatch(step=0).num_tokens == 0
    assert asdict(BATCH)["step"] == 12
