"""What README.md shows is what happens."""

import json
import re
from pathlib import Path

from minillm.course.papers import chapter_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_eight_lines_give_the_output_printed_below_them(capsys):
    code, output = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL).groups()
    assert len([line for line in code.splitlines() if line.strip()]) == 8
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == output


def test_scoreboard_table_shows_the_stored_counters():
    rows = json.loads((ROOT / "figures/data/scoreboard.json").read_text())["rows"]
    lines = README.split("| chapter | forward passes |")[1].split("\n\n")[0]
    table = re.findall(r"^\| (\d+) \| (.*) \|$", lines, re.MULTILINE)
    assert [int(chapter) for chapter, _ in table] == [row["chapter"] for row in rows]
    for (_, cells), row in zip(table, rows, strict=True):
        passes, tokens, reserved, used, traffic = (cell.strip() for cell in cells.split("|"))
        shown = [int(x.replace(",", "")) for x in (passes, tokens, reserved, used)]
        names = ("forward_passes", "tokens_computed", "kv_slots_reserved", "kv_slots_used")
        assert shown == [row[name] for name in names]
        assert traffic == f"{row['modelled_hbm_bytes'] / 1e9:.2f} GB"


def test_chapter_table_is_the_map_s():
    assert chapter_table(ROOT) in README
    assert chapter_table(ROOT) in (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")


def test_every_local_link_leads_somewhere():
    for page in ("README.md", "README.zh-CN.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            assert "://" in target or (ROOT / target).exists(), f"{page} links to {target}"
