"""Live memory: counted right, and what chapter 01 says of it."""

import pytest
import torch

from minillm import LLM, EngineConfig, SamplingParams
from minillm.compute.attention.naive import attend_one
from minillm.course.scratch import LiveBytes, growth_rows, peak_bytes, slope
from minillm.kernels.flash_attention import flash_attention_torch

SIZES = (128, 1024)


@pytest.mark.parametrize("inference", [False, True])
def test_tensors_count_while_they_live(inference):
    before = torch.zeros(1000)
    with torch.inference_mode(inference), LiveBytes() as memory:
        a = torch.zeros(100)  # 400 bytes
        view = a[10:20].view(2, 5)
        assert (memory.live, memory.peak) == (400, 400), "a view is free"
        del a
        assert memory.live == 400, "the view keeps it"
        before.add_(1).view(10, 100)
        assert memory.live == 400, "what was there before is not counted, nor its views"
        both = torch.cat([view, view])
        assert (memory.live, memory.peak) == (480, 480)
        del view
        assert (memory.live, memory.peak) == (80, 480)
        torch.zeros(300)
        assert (memory.live, memory.peak) == (80, 1280), "a result that nobody keeps"
        del both
    assert memory.live == 0


def test_composite_operations_hide_nothing_in_inference_mode():
    """A cross entropy is one number, and makes log-probabilities on its way; both modes must see them."""
    x = torch.randn(10, 10)

    def run():
        return torch.nn.functional.cross_entropy(x, torch.arange(10))

    with torch.inference_mode():
        inside = peak_bytes(run)
    assert inside == peak_bytes(run) > x.nbytes


def naive(q, k, v):
    return attend_one(q, k, v, 1.0)


def flash(q, k, v):
    number, n = torch.tensor, len(q)
    return flash_attention_torch(q, k, v, number([0, n]), number([0]), number([n]), n, 1.0, block_m=8, block_n=32)


@pytest.mark.parametrize(("attention", "want"), [(naive, 2), (flash, 1)])
def test_live_memory_of_attention_grows_like_n_squared_or_like_n(attention, want):
    peaks = [peak_bytes(lambda n=n: attention(*torch.zeros(3, n, 1, 16))) for n in SIZES]
    assert slope(SIZES, peaks) == pytest.approx(want, abs=0.1)


def test_live_memory_of_the_engine_falls():
    params, peaks = SamplingParams(max_tokens=1, temperature=0), {}
    for chapter in (0, 1):
        with LLM("tiny", config=EngineConfig.at_chapter(chapter), dtype="float32") as llm:
            prompts = [{"prompt_token_ids": list(range(1, n + 1))} for n in (256, 512)]
            peaks[chapter] = [peak_bytes(lambda p=p, llm=llm: llm.generate(p, params)) for p in prompts]
    assert peaks[0][1] > 3.2 * peaks[0][0], "N × N"
    assert peaks[1][1] < 2.1 * peaks[1][0], "activations, which grow with N, and tiles, which do not"
    assert peaks[1][1] < peaks[0][1] / 2


def test_rows_of_growth():
    rows = growth_rows({"square": lambda n: torch.zeros(n, n)}, lambda n: (n,), (512, 1024))
    assert rows == [
        {"N": "512", "square, MiB": "1.0", "square, slope": ""},
        {"N": "1,024", "square, MiB": "4.0", "square, slope": "2.0"},
    ]
