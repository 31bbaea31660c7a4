"""Every kernel compiles for GPUs that are not here, without spills and within shared memory; a bad one is caught."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from minillm.kernels import HAS_TRITON, ahead_of_time
from minillm.kernels.ahead_of_time import SHARED_MEMORY, Compiled, compile_here, kernel_modules, main
from tests.kernels.support import compiled, needs_triton

ROOT = Path(__file__).resolve().parents[2]
ARCHS = (80, 90)


def run(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "minillm.kernels.ahead_of_time", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=250)


@pytest.fixture(scope="module")
def found() -> list[Compiled]:
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    done = run("--arch", *map(str, ARCHS), "--json")
    assert done.stdout, done.stderr
    return [Compiled(**one) for one in json.loads(done.stdout)]


def test_no_kernel_spills_or_takes_more_shared_memory_than_it_may(found):
    assert not [one for one in found if one.problems]
    for one in found:
        assert one.spill == 0 and 0 <= one.shared <= SHARED_MEMORY[one.arch] and 0 < one.registers <= 255


@pytest.mark.parametrize("arch", ARCHS)
def test_attention_uses_what_the_gpu_has_for_its_products(found, arch):
    dots = {one.case: one.dot for one in found if one.kernel == "flash_attention_kernel" and one.arch == arch}
    for head_dim in (64, 128, 256):
        for dtype in ("bfloat16", "float16"):
            assert dots[f"{dtype} d={head_dim} causal"] == {80: "mma", 90: "wgmma"}[arch]
        assert dots[f"float32 d={head_dim} causal"] == "fma", "IEEE float32 has no tensor core"


@needs_triton
def test_every_kernel_has_cases():
    folder = ROOT / "minillm" / "kernels"
    with_kernels = {path.stem for path in folder.glob("*.py") if "@triton.jit" in path.read_text(encoding="utf-8")}
    assert with_kernels and with_kernels == {module.rpartition(".")[2] for module in kernel_modules()}


@needs_triton
def test_what_is_planted_is_caught():
    done = run("--arch", "80", "--modules", "tests.kernels.planted_cases")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 7
    spills, too_much, more_than_stated, no_power, no_launch, fine = lines[1:]
    assert spills.endswith("bytes of registers, at most 0 allowed")
    assert too_much.endswith("bytes of shared memory, sm_80 has 166912") and " mma  takes " in too_much
    assert (
        more_than_stated.endswith("bytes of shared memory, at most 10000 stated") and " mma  takes " in more_than_stated
    )
    assert no_power.endswith("does not compile: CompilationError: arange's range must be a power of 2")
    assert no_launch.endswith("launches no kernel")
    assert fine.endswith("mma  ok")


@needs_triton
@compiled
def test_a_process_that_interprets_does_not_compile():
    with pytest.raises(RuntimeError, match="needs one with TRITON_INTERPRET=0"):
        compile_here(80, ["tests.kernels.planted_cases"])


def test_unknown_architecture_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ahead_of_time", "--arch", "85"])
    with pytest.raises(SystemExit):
        main()
    assert "invalid choice: 85 (choose from 75, 80" in capsys.readouterr().err


def test_without_triton_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ahead_of_time"])
    monkeypatch.setattr(ahead_of_time, "HAS_TRITON", False)
    with pytest.raises(SystemExit):
        main()
    assert "Triton is not installed" in capsys.readouterr().err
