"""Your engine: a passed exercise that is a part of the engine is stored in ``work/mine/NN.py``, to be run in it.

    minillm mine               the parts there are, ours and yours
    minillm generate --mine …  LLM(model, parts="mine")
    minillm bench --mine       the scoreboard with the row "yours"

An exercise is a part if its metadata say so: {"part": {"attention": "my_attention"}} is the part's name in
core/parts.py and the factory in the lab's code.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

from nbformat import NotebookNode

from minillm.core import parts
from minillm.core.config import LAST_BUILT, EngineConfig
from minillm.core.sampling_params import SamplingParams
from minillm.core.workloads import LogNormal, Uniform, random_workload
from minillm.course.forbidden import bound_names, parse
from minillm.course.grader import Grade, exercise_id, is_check, is_exercise, overlay
from minillm.course.progress import ROOT

HEAD = '''"""Part {parts} of the engine: yours, taken from lab {lab} when exercise {exercises} was passed.

Grading the lab again writes this file anew. minillm mine lists it.
"""
'''


def store_parts(learner: NotebookNode, solution: NotebookNode, grade: Grade, folder: Path) -> Path | None:
    """Write the parts that this grading found passed to ``folder``/NN.py: the setup cell and every cell they use.

    None if there is none, or if the file there has a part that did not pass this time: it is left alone then.
    """
    passed = {result.id for result in grade.exercises if result.state == "ok"}
    factories, exercises = {}, []
    for cell in solution.cells:
        if is_exercise(cell) and exercise_id(cell) in passed and "part" in cell.metadata["minillm"]:
            factories |= cell.metadata["minillm"]["part"]
            exercises.append(exercise_id(cell))
    file = folder / f"{grade.lab}.py"
    if not factories or (file.exists() and not _names(file) <= factories.keys()):
        return None
    code = [cell for cell in overlay(learner, solution) if not is_check(cell)]
    setup = {cell.source for cell in solution.cells if "setup" in cell.metadata.get("tags", [])}
    kept = [cell.source.strip() for cell in used_cells(code, set(factories.values()), setup)]
    table = ", ".join(f'"{name}": {factory}' for name, factory in factories.items())
    head = HEAD.format(parts=", ".join(factories), lab=grade.lab, exercises=", ".join(exercises))
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text("\n\n".join([head, *kept, f"PARTS = {{{table}}}\n"]), encoding="utf-8")
    return file


def used_cells(cells: list[NotebookNode], names: set[str], always: set[str]) -> list[NotebookNode]:
    """In order, the cells that bind one of these names or a name that such a cell uses, and those in ``always``."""
    sources = [cell.source.strip() for cell in cells]
    kept = {source for source in sources if source in {text.strip() for text in always}}
    wanted, found = set(names), True
    while found:
        found = False
        for source in sources:
            statements = parse(source)
            if source not in kept and any(bound_names(statement) & wanted for statement in statements):
                kept.add(source)
                found = True
            if source in kept:
                wanted |= {n.id for s in statements for n in ast.walk(s) if isinstance(n, ast.Name)}
    return [cell for cell, source in zip(cells, sources, strict=True) if source in kept]


def _names(file: Path) -> set[str]:
    """The parts that a stored file has, without running it; none if it is not one of ours any more."""
    for statement in parse(file.read_text(encoding="utf-8")):
        if bound_names(statement) == {"PARTS"} and isinstance(statement.value, ast.Dict):
            return {key.value for key in statement.value.keys}
    return set()


def the_core(chapter: int = 5) -> list[dict]:
    """The milestone after chapter 05: 32 skewed requests, four beginnings, on our engine and on the one of your parts.

    A row each, yours if there are parts; AssertionError if the two write different tokens.
    """
    workload = random_workload(32, (Uniform(8, 48), LogNormal(12, 0.7, 4, 48)), prefixes=4, prefix_len=96, seed=5)
    prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in workload]
    params = [SamplingParams(temperature=0, max_tokens=r.output_len, ignore_eos=True) for r in workload]
    from minillm.llm import LLM  # only now: who grades a lab needs no torch

    config = EngineConfig.at_chapter(chapter, dtype="float32", max_num_seqs=16, max_model_len=512)
    own = parts.my_parts() if any(parts.MINE.glob("*.py")) else {}
    rows, tokens = [], []
    for engine, chosen in [("ours", {}), *([("yours", own)] if own else [])]:
        with LLM("tiny", config=config, parts=chosen) as llm:
            outputs = llm.generate(prompts, params)
            tokens.append([output.outputs[0].token_ids for output in outputs])
            counts = llm.metrics
        rows.append(
            {
                "engine": engine,
                "passes": counts.forward_passes,
                "tokens computed": f"{counts.tokens_computed:,}",
                "found in the cache": f"{counts.tokens_cached:,}",
                "your parts": ", ".join(chosen) or "none",
            }
        )
    assert all(each == tokens[0] for each in tokens), "your engine writes other tokens than ours"
    return rows


def listing() -> list[dict[str, str]]:
    """One row a part of the chapters built: what it is, ours, yours."""
    rows = []
    for part in parts.PARTS:
        if part.chapter <= LAST_BUILT:
            file = parts.MINE / f"{part.chapter:02}.py"
            there = file.exists() and part.name in _names(file)
            rows.append(
                {
                    "part": part.name,
                    "chapter": f"{part.chapter:02}",
                    "must be": part.interface,
                    "ours": part.default,
                    "exercise": part.exercise,
                    "yours": os.path.relpath(file, ROOT) if there else "not passed yet",
                }
            )
    return rows
