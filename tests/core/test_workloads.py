from statistics import mean

from minillm.core.workloads import equal_batch, scoreboard


def test_workloads_are_seeded():
    for make in (lambda seed: scoreboard(256, seed=seed), lambda seed: equal_batch(5, (2, 9), 7, 256, seed=seed)):
        assert make(1) == make(1)
        assert make(1) != make(2)


def test_an_equal_batch():
    batch = equal_batch(requests=200, prompt_len=(3, 6), output_len=7, vocab_size=11)
    assert len(batch) == 200
    assert {request.arrival for request in batch} == {0}
    assert {request.output_len for request in batch} == {7}
    assert {len(request.prompt_token_ids) for request in batch} == {3, 4, 5, 6}
    assert {token for request in batch for token in request.prompt_token_ids} == set(range(1, 11))


def test_the_scoreboards_workload_has_what_the_papers_need():
    workload = scoreboard(256, requests=320)
    prefixes = {tuple(request.prompt_token_ids[:96]) for request in workload}
    assert len(prefixes) == 4, "shared prefixes"
    arrivals = [request.arrival for request in workload]
    assert arrivals == sorted(arrivals)
    assert 2.5 < arrivals[-1] / len(arrivals) < 3.5, "one request every three passes"
    outputs = [request.output_len for request in workload]
    assert min(outputs) >= 8 and max(outputs) == 128
    assert mean(outputs) < 0.5 * max(outputs), "skewed outputs"
    long = [request for request in scoreboard(256) if len(request.prompt_token_ids) > 400]
    assert len(long) == 2, "two long prompts"
    assert all(0 < token < 256 for request in workload for token in request.prompt_token_ids)
