"""Parts of the engine that a learner writes in a lab, and how the engine gets hold of a learner's own.

A passed exercise that is a part is stored in ``work/mine/NN.py`` (course/mine.py), which ends with
``PARTS = {"attention": my_attention}``: the names below, each with the factory that the engine calls.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from minillm.core.chapters import PACKAGE

MINE = PACKAGE.parent / "work" / "mine"


@dataclass(frozen=True)
class Part:
    """Dotted names, so that the table can be read without loading what it names.

    name       the argument of LLM and Engine that takes the part
    chapter    where it comes from
    exercise   whose answer it is
    interface  what it must be
    default    what serves in its place; called with the same arguments
    """

    name: str
    chapter: int
    exercise: str
    interface: str
    default: str


PARTS = (
    Part(
        "attention",
        chapter=1,
        exercise="1.6",
        interface="minillm.compute.attention.base.AttentionBackend",
        default="minillm.engine.runner.attention_backend",
    ),
    Part(
        "block_pool",
        chapter=2,
        exercise="2.2",
        interface="minillm.memory.block_pool.BlockPool",
        default="minillm.memory.block_pool.BlockPool",
    ),
    Part(
        "scheduler",
        chapter=3,
        exercise="3.6",
        interface="minillm.scheduling.scheduler.Scheduler",
        default="minillm.scheduling.scheduler.Scheduler",
    ),
    Part(
        "scheduler",
        chapter=4,
        exercise="4.6",
        interface="minillm.scheduling.scheduler.Scheduler",
        default="minillm.scheduling.scheduler.Scheduler",
    ),
    Part(
        "prefix_cache",
        chapter=5,
        exercise="5.6",
        interface="minillm.memory.prefix_cache.PrefixCache",
        default="minillm.memory.radix_cache.RadixCache",
    ),
)


def my_parts(folder: Path | None = None) -> dict[str, Callable]:
    """The learner's own parts by name; of two for one name, the later chapter's. Runs the files in ``folder``.

    ValueError if there is none, and for a file that does not run or has no PARTS.
    """
    folder = folder or MINE
    known, parts = {part.name for part in PARTS}, {}
    for file in sorted(folder.glob("*.py")):
        try:
            own = runpy.run_path(str(file))["PARTS"]
        except Exception as error:
            said = "it has no PARTS" if isinstance(error, KeyError) and error.args == ("PARTS",) else repr(error)
            raise ValueError(f"{file} cannot be used: {said}; mend it, or grade the lab again") from None
        if unknown := own.keys() - known:
            raise ValueError(f"{file} has a part {min(unknown)!r}; parts are {', '.join(sorted(known))}")
        parts |= own
    if not parts:
        raise ValueError(f"no part of yours is in {folder}; an exercise that is one is stored there once it is passed")
    return parts
