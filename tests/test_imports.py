"""What may be imported without what, each in a fresh process."""

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import minillm

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "minillm"
ROOMS = sorted(path.parent.relative_to(ROOT) for path in PACKAGE.rglob("__init__.py"))
NO_TORCH = [
    *(f"minillm.{room}.{m.name}" for room in ("core", "scheduling") for m in pkgutil.iter_modules([PACKAGE / room])),
    # All but the bytes themselves: block books and prefix caches run in a simulator.
    *(f"minillm.memory.{m.name}" for m in pkgutil.iter_modules([PACKAGE / "memory"]) if m.name != "kv_cache"),
]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_core_scheduling_and_the_block_books_load_no_torch():
    assert "minillm.scheduling.scheduler" in NO_TORCH
    code = f"""
import importlib, sys
for name in {NO_TORCH!r}:
    importlib.import_module(name)
    heavy = {{"torch", "transformers", "triton", "numpy"}} & set(sys.modules)
    assert not heavy, f"{{name}} loads {{heavy}}"
"""
    run_python(code)


def test_minillm_itself_loads_no_torch_until_it_is_used():
    code = """
import sys, minillm
minillm.SamplingParams, minillm.EngineConfig
assert "torch" not in sys.modules
assert "LLM" in dir(minillm)
minillm.LLM
assert "torch" in sys.modules
"""
    run_python(code)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = minillm.Nonsense


def test_core_tests_pass_without_triton():
    """``--block-triton`` hides it; the tests that run a model and an engine must not notice."""
    folders = ["tests/compute/attention", "tests/scheduling/test_scheduler.py", "tests/engine/test_engine_requests.py"]
    options = ["--block-triton", "-m", "not smollm2", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *folders], capture_output=True, text=True, cwd=ROOT, timeout=200
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_every_room_says_what_is_in_it(room):
    docstring = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8")))
    assert docstring, f"{room}/__init__.py has no docstring"
    if room.name == "minillm":
        return
    files = sorted(p.name for p in (ROOT / room).glob("*.py") if p.name != "__init__.py")
    unlisted = [name for name in files if name not in docstring]
    assert not unlisted, f"{room}/__init__.py does not list {', '.join(unlisted)}"
