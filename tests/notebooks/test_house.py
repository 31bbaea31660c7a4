"""The package as it grows: drawn, shown, copied."""

import subprocess
import sys

import pytest

from minillm.compute.attention.online import merge_states
from minillm.core.chapters import NEW_FILES, PACKAGE
from minillm.core.config import LAST_BUILT
from minillm.course import house as module
from minillm.course.house import build, house, show


def test_house_counts_the_files_of_its_chapter():
    drawn = house(0)
    files = {f"{room}/{file}" if room else file: lines for room, fs in drawn.rooms.items() for file, lines, _ in fs}
    assert files["engine/engine.py"] == len((PACKAGE / "engine/engine.py").read_text().splitlines())
    assert files["models/layers/linear.py"] > 20 and "llm.py" in files
    assert not {file for fs in NEW_FILES.values() for file in fs} & files.keys()
    assert drawn.lines == sum(files.values()) and f"{drawn.lines:,} lines" in repr(drawn)
    assert f"{drawn.lines:,}" in drawn._repr_html_() and "<b>" not in drawn._repr_html_()


def test_house_marks_what_a_chapter_brings(monkeypatch):
    monkeypatch.setattr(module, "LAST_BUILT", 1)
    text = repr(house(1))
    for file in NEW_FILES[1]:
        assert f"* {file.partition('/')[2]} " in text
    assert text.count("* ") == len(NEW_FILES[1]) + 1
    assert house(1)._repr_html_().count("<b>+ ") == len(NEW_FILES[1])
    assert house(1)._repr_html_().isascii() or set(house(1)._repr_html_()) - set(map(chr, range(128))) == {"·"}


def test_a_chapter_that_is_not_built_is_refused(tmp_path):
    for refused in (lambda: house(99), lambda: build(99, tmp_path)):
        with pytest.raises(ValueError, match="chapter 99 is not built"):
            refused()
    assert not list(tmp_path.iterdir())


def test_show_prints_source_with_its_place(capsys):
    show(merge_states)
    first, second, *_ = capsys.readouterr().out.splitlines()
    path, _, line = first.removeprefix("# ").partition(", line ")
    assert path == "minillm/compute/attention/online.py"
    assert (PACKAGE.parent / path).read_text().splitlines()[int(line) - 1] == second


@pytest.mark.parametrize("chapter", range(LAST_BUILT + 1))
def test_a_copy_of_the_package_generates_the_same_tokens(tmp_path, chapter):
    target = build(chapter, tmp_path)
    later = [file for n, files in NEW_FILES.items() if n > chapter for file in files]
    assert not [file for file in later if (target / file).exists()]
    with pytest.raises(FileExistsError, match="is there already"):
        build(chapter, tmp_path)
    code = f"""
import minillm
from minillm import LLM, EngineConfig, SamplingParams
from minillm.core.config import LAST_BUILT
with LLM("tiny", config=EngineConfig.at_chapter({chapter}), dtype="float32") as llm:
    print(minillm.__file__, LAST_BUILT, llm.generate("It was", SamplingParams(temperature=0))[0].outputs[0].token_ids)
"""
    ours, copied = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=place, timeout=200, check=True)
        for place in (PACKAGE.parent, tmp_path)
    )
    file, last, tokens = copied.stdout.split(" ", 2)
    assert file == str(target / "__init__.py") and int(last) == chapter
    assert tokens == ours.stdout.split(" ", 2)[2]
