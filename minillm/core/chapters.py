"""Which file came with which chapter: the course grows the package, and this table is its memory.

The engine of a chapter loads no file of a later one. Files that are not named here were there at chapter 0.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]

NEW_FILES: dict[int, tuple[str, ...]] = {
    1: (
        "compute/attention/online.py",
        "compute/attention/flash.py",
        "compute/attention/flash_backend.py",
        "kernels/flash_attention.py",
        "kernels/interpreter.py",
        "kernels/ahead_of_time.py",
    ),
    2: (
        "compute/attention/paged.py",
        "kernels/paged_attention.py",
        "kernels/kv_write.py",
        "bench/paging.py",
        "simulator/simulation.py",
        "simulator/reservation.py",
    ),
    3: (
        "scheduling/iteration.py",
        "scheduling/orca.py",
        "simulator/timeline.py",
    ),
    4: (
        "scheduling/sarathi.py",
        "bench/stalls.py",
    ),
    5: (
        "memory/prefix_tree.py",
        "memory/prefix_cache.py",
        "memory/radix_cache.py",
        "memory/block_hash.py",
        "scheduling/cache_aware.py",
        "core/traces.py",
        "engine/structured.py",
        "programs.py",
        "simulator/prefixes.py",
        "bench/sharing.py",
    ),
}


def introduced_in(file: str) -> int:
    """The chapter that brought a file, named from the package's folder: "kernels/flash_attention.py" -> 1."""
    return next((chapter for chapter, files in NEW_FILES.items() if file in files), 0)


def is_there(chapter: int) -> bool:
    """Whether every file that this chapter and those before it brought is in this package."""
    return all((PACKAGE / file).exists() for n, files in NEW_FILES.items() if n <= chapter for file in files)


def files_of(chapter: int) -> list[str]:
    """All files of Python or C++ of the package as it stands after a chapter, in order."""
    paths = [path for kind in ("*.py", "*.cpp") for path in PACKAGE.rglob(kind)]
    files = sorted(str(path.relative_to(PACKAGE).as_posix()) for path in paths)
    return [file for file in files if introduced_in(file) <= chapter]
