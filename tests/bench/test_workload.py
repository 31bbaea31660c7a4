"""Running a workload: what one run left behind must not help the next."""

import pytest

from minillm import LLM, EngineConfig, SamplingParams
from minillm.bench.workload import run_workload
from minillm.core.workloads import WorkloadRequest


def test_a_workload_that_runs_again_is_computed_again():
    workload = [WorkloadRequest(0, list(range(5, 45)), 3), WorkloadRequest(0, list(range(5, 35)), 2)]
    with LLM("tiny", config=EngineConfig.at_chapter(5, max_num_seqs=1), dtype="float32") as llm:
        first, second = (run_workload(llm.engine, workload) for _ in range(2))
        assert first["tokens_computed"] == second["tokens_computed"] and first["tokens_cached"] == 29
        ids = llm.enqueue([{"prompt_token_ids": list(range(5, 45))}], SamplingParams(max_tokens=4))
        llm.poll(ids)
        assert not llm.reset_prefix_cache()
        with pytest.raises(RuntimeError, match="somebody else"):
            run_workload(llm.engine, workload)
        llm.abort(ids)
        assert llm.reset_prefix_cache()
