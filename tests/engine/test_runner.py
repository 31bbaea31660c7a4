import pytest
import torch

from minillm.compute.attention.dense import DenseAttention
from minillm.core.batch import KnownRequest, NewRequest, ScheduledBatch
from minillm.core.config import EngineConfig
from minillm.core.sampling_params import SamplingParams
from minillm.engine.runner import Buffer, ModelRunner
from minillm.memory.kv_manager import KVGeometry, group_layers
from tests.support import EOS, MAX_LEN

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def new(
    request_id: str, ids: list[int], blocks: list[int], computed: int = 0, output: tuple[int, ...] = ()
) -> NewRequest:
    return NewRequest(request_id, ids, list(output), GREEDY, 0, 0, None, computed, [blocks])


def known(
    request_id: str, tokens: list[int], blocks: list[int], computed: int, rewritten: bool = False
) -> KnownRequest:
    return KnownRequest(request_id, tokens, [blocks], computed, rewritten)


@pytest.fixture
def runner(model64) -> ModelRunner:
    """Contiguous: three blocks of 128 rows after a null row."""
    config = EngineConfig.at_chapter(0, max_num_seqs=4, dtype="float64").resolve(model64.config)
    return ModelRunner(model64, config, KVGeometry(group_layers(model64.kv_cache_spec()), MAX_LEN, 3, 1), EOS)


@pytest.fixture
def after(model64):
    """f(ids) -> the most likely token after them, by one forward pass without a cache."""

    def most_likely(ids: list[int]) -> int:
        hidden = model64(torch.tensor(ids), torch.arange(len(ids)), DenseAttention(1, len(ids)))
        return model64.compute_logits(hidden[-1:]).argmax().item()

    return most_likely


def test_a_buffer_keeps_its_place():
    buffer = Buffer(6, dtype=torch.int64, device=torch.device("cpu"))
    place = buffer.device.data_ptr()
    buffer.array[:3] = [4, 5, 6]
    assert buffer.send(3).tolist() == [4, 5, 6]
    buffer.array[:2] = [7, 8]
    assert buffer.send(2).tolist() == [7, 8]
    assert buffer.send(2).data_ptr() == place


def test_a_batch_of_new_and_known(runner, after):
    first = ScheduledBatch(0, [new("a", [5, 6, 7], [2])], num_scheduled_tokens={"a": 3})
    (a1,) = runner.execute(first).sampled["a"]
    assert a1 == after([5, 6, 7])
    # b comes, a goes on; and the order of the batch is b, a.
    second = ScheduledBatch(1, [new("b", [9], [1])], [known("a", [a1], [], 3)], {"b": 1, "a": 1})
    got = runner.execute(second).sampled
    assert got == {"b": [after([9])], "a": [after([5, 6, 7, a1])]}


def test_a_batch_may_have_crossed_a_process(runner, after):
    batch = ScheduledBatch(0, [new("a", [5, 6, 7], [2])], num_scheduled_tokens={"a": 3})
    output = runner.execute(ScheduledBatch.from_json(batch.to_json()))
    assert output.from_json(output.to_json()).sampled == {"a": [after([5, 6, 7])]}


def test_only_a_request_whose_tokens_are_all_computed_is_sampled(runner, after):
    """A prompt in two pieces: not scheduled so before chapter 04, but the runner counts no phases."""
    first = ScheduledBatch(0, [new("a", [5, 6, 7, 8], [1]), new("b", [3], [2])], num_scheduled_tokens={"a": 3, "b": 1})
    assert set(runner.execute(first).sampled) == {"b"}
    second = ScheduledBatch(1, known_requests=[known("a", [], [], 3)], num_scheduled_tokens={"a": 1})
    assert runner.execute(second).sampled == {"a": [after([5, 6, 7, 8])]}


def test_several_known_tokens_at_once(runner, after):
    """Forced or accepted tokens come as a list."""
    runner.execute(ScheduledBatch(0, [new("a", [5, 6], [1])], num_scheduled_tokens={"a": 2}))
    batch = ScheduledBatch(1, known_requests=[known("a", [10, 11, 12], [], 2)], num_scheduled_tokens={"a": 3})
    assert runner.execute(batch).sampled == {"a": [after([5, 6, 10, 11, 12])]}


def test_a_request_may_come_with_output(runner, after):
    """Preempted before: prompt and output are computed anew."""
    batch = ScheduledBatch(0, [new("a", [5, 6], [3], output=(7, 8))], num_scheduled_tokens={"a": 4})
    assert runner.execute(batch).sampled == {"a": [after([5, 6, 7, 8])]}
    assert runner.rows["a"].sampling.output_token_ids == [7, 8]


def test_a_rewritten_table_replaces_the_old_one(runner, after):
    """Copy-on-write: the block is copied before the pass, and the request goes on in the copy."""
    runner.execute(ScheduledBatch(0, [new("a", [5, 6], [1])], num_scheduled_tokens={"a": 2}))
    batch = ScheduledBatch(
        1,
        known_requests=[known("a", [9], [3], 2, rewritten=True)],
        num_scheduled_tokens={"a": 1},
        block_copies=[(0, 1, 3)],
    )
    assert runner.execute(batch).sampled == {"a": [after([5, 6, 9])]}
    assert runner.rows["a"].block_ids == [[3]]


def test_finished_rows_are_forgotten_and_their_ids_can_come_back(runner, after):
    runner.execute(ScheduledBatch(0, [new("a", [5, 6], [1])], num_scheduled_tokens={"a": 2}))
    batch = ScheduledBatch(1, [new("a", [7], [1])], num_scheduled_tokens={"a": 1}, finished_ids=["a", "never seen"])
    assert runner.execute(batch).sampled == {"a": [after([7])]}
    runner.execute(ScheduledBatch(2, [new("b", [7], [1])], num_scheduled_tokens={"b": 1}, finished_ids=["a"]))
    assert set(runner.rows) == {"b"}


def test_blocks_of_any_size(model64, after):
    """Tables grow block by block; rows are found through them wherever the first ones lie in order."""
    config = EngineConfig.at_chapter(0, dtype="float64").resolve(model64.config)
    runner = ModelRunner(model64, config, KVGeometry(group_layers(model64.kv_cache_spec()), 4, 6, 4), EOS)
    runner.execute(ScheduledBatch(0, [new("a", [5, 6, 7], [2])], num_scheduled_tokens={"a": 3}))
    batch = ScheduledBatch(1, known_requests=[known("a", [8, 9], [3], 3)], num_scheduled_tokens={"a": 2})
    assert runner.execute(batch).sampled == {"a": [after([5, 6, 7, 8, 9])]}
