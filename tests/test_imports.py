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
    "minillm.memory.block_pool",
    "minillm.memory.kv_manager",
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


def test_it_runs_without_triton():
    code = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, NoTriton())
import pkgutil, importlib, minillm
from minillm import EngineConfig
from minillm.engine.engine import Engine
from tests.support import greedy, random_model, random_prompt, serve
import random

import minillm.llm, minillm.kernels, minillm.compute.attention.base
engine = Engine(random_model(), EngineConfig.latest(kv_cache_memory_bytes=1 << 20))
done = serve(engine, {"a": (random_prompt(random.Random(0), 5), greedy(4))})
assert "triton" not in sys.modules
print(len(done["a"].outputs[0].token_ids))
"""
    assert run_python(code).strip() == "4"


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_every_room_says_what_is_in_it(room):
    docstring = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8")))
    assert docstring, f"{room}/__init__.py has no docstring"
    if room.name == "minillm":
        return
    files = sorted(p.name for p in (ROOT / room).glob("*.py") if p.name != "__init__.py")
    unlisted = [name for name in files if name not in docstring]
    assert not unlisted, f"{room}/__init__.py does not list {', '.join(unlisted)}"
