"""The one GPU script, tried at toy sizes: all of it runs, and what it claims is checked."""

import json

import pytest

from minillm.bench import gpu
from minillm.core.config import LAST_BUILT
from minillm.core.presets import DEVICES
from minillm.kernels import HAS_TRITON


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    status = gpu.main(["--dry-run", "--out", str(folder)])
    report = json.loads((folder / "gpu.json").read_text())
    assert status == (0 if HAS_TRITON else 1), report
    return report


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_kernel_is_as_right_as_the_library(report):
    for case in report["kernels"]:
        assert 0 < case["error"] <= 2 * case["library_error"] + 2 * 2**-10
        assert case["ratio"] == pytest.approx(case["library_ms"] / case["ours_ms"])


def test_every_chapter_gives_the_same_tokens(report):
    assert [row["chapter"] for row in report["tokens"]] == list(range(LAST_BUILT + 1))
    for row in report["tokens"]:
        assert row["same_tokens"] and row["steps"] == 32
        assert 0 < row["largest_error"] < 1e-4, "an error of exactly 0 would mean that nothing was compared"


def test_throughput_counts_useful_tokens(report):
    result = report["throughput"]
    assert result["ours"]["tokens_generated"] == result["output_tokens"]
    assert result["ratio"] == pytest.approx(
        result["ours"]["tokens_per_second"] / result["transformers_tokens_per_second"]
    )


def test_without_a_gpu_it_says_what_to_do(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path)]) == 1
    assert "--dry-run" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_part_that_fails_is_reported_and_the_others_still_run(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu, "throughput", broken)
    monkeypatch.setattr(gpu, "kernels", lambda *_: [])
    monkeypatch.setattr(gpu, "tokens", lambda *_: [])
    assert gpu.main(["--dry-run", "--out", str(tmp_path)]) == 1
    assert json.loads((tmp_path / "gpu.json").read_text())["throughput"] == {"error": "RuntimeError: out of memory"}


def test_workload_is_nano_vllm_s():
    requests = gpu.nano_vllm_workload(1000, 256, 100, 1024)
    assert len(requests) == 256
    for lengths in ([len(r.prompt_token_ids) for r in requests], [r.output_len for r in requests]):
        assert 100 <= min(lengths) < 130 and 990 < max(lengths) <= 1024


def test_data_sheets_are_found_by_the_driver_s_name(monkeypatch):
    cuda = gpu.torch.device("cuda")
    for name, key in (
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
    ):
        monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda _, name=name: name)
        assert gpu.device_sheet(cuda) is DEVICES[key]
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda _: "Some other GPU")
    assert gpu.device_sheet(cuda) is None
