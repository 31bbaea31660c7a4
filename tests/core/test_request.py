from minillm.core.request import Request, RequestStatus
from minillm.core.sampling_params import SamplingParams


def test_a_requests_tokens_are_prompt_then_output():
    request = Request("a", [1, 2, 3], SamplingParams(), seed=0)
    request.output_token_ids += [4, 5]
    request.draft_token_ids += [6]
    assert request.all_token_ids == [1, 2, 3, 4, 5]
    assert request.num_tokens == 5, "drafts are not tokens yet"
    request.all_token_ids.append(7)
    assert request.num_tokens == 5


def test_a_new_request_waits_and_shares_nothing():
    one, two = (Request(name, [1], SamplingParams(), seed=0) for name in "ab")
    one.output_token_ids.append(1)
    assert two.output_token_ids == [] and not two.finished
    one.status = RequestStatus.FINISHED
    assert one.finished
