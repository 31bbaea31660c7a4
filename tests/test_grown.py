"""Grown, not given: the engine of a chapter needs nothing that a later chapter brought."""

import json
import re
import subprocess
import sys

import pytest

from minillm.core.chapters import NEW_FILES, PACKAGE, files_of, introduced_in
from minillm.core.config import LAST_BUILT

ROOT = PACKAGE.parent


def module(file: str) -> str:
    return "minillm." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def modules_after_generating(chapter: int) -> set[str]:
    code = f"""
import json, sys
from minillm import LLM, EngineConfig, SamplingParams
with LLM("tiny", config=EngineConfig.at_chapter({chapter})) as llm:
    llm.generate("And it came to pass", SamplingParams(max_tokens=3))
print(json.dumps([name for name in sys.modules if name.startswith("minillm")]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("chapter", range(LAST_BUILT + 1))
def test_engine_of_a_chapter_loads_no_file_of_a_later_one(chapter):
    loaded = modules_after_generating(chapter)
    later = {module(file) for n, files in NEW_FILES.items() if n > chapter for file in files}
    assert not loaded & later
    if chapter and NEW_FILES.get(chapter):
        assert loaded & {module(file) for file in NEW_FILES[chapter]}, "the chapter's own files are in use"


def test_table_names_files_that_exist_and_each_once():
    named = [file for files in NEW_FILES.values() for file in files]
    assert len(named) == len(set(named))
    assert all((PACKAGE / file).is_file() for file in named)


def test_rooms_give_the_chapter_that_the_table_gives():
    """A room's docstring says "chapter NN" on the line of a file that a chapter after 0 brought."""
    for file in (file for files in NEW_FILES.values() for file in files):
        room, _, name = file.rpartition("/")
        text = (PACKAGE / room / "__init__.py").read_text(encoding="utf-8")
        (line,) = re.findall(rf"^{re.escape(name)} .*$", text, re.MULTILINE)
        assert f"chapter {introduced_in(file):02d}" in line, f"{room}/__init__.py: {line}"


def test_files_of_a_chapter():
    assert "kernels/flash_attention.py" not in files_of(0)
    assert "kernels/flash_attention.py" in files_of(1)
    assert "engine/engine.py" in files_of(0)
