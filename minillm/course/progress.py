"""What a learner has done so far: work/progress.json, shared by labs and quizzes.

One JSON object with a section for each kind of work, such as {"quiz": {"01": {"rescale": 1.0}}}. Terminal and
notebooks may write at the same time, so every change is read, made and written back under a lock.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]


def course_root() -> Path:
    """The clone that holds chapters/, labs/ and work/. ValueError if the package was installed without it."""
    if not (ROOT / "chapters").is_dir():
        raise ValueError(
            f"there is no folder chapters in {ROOT}; the course runs from a git clone, installed with: pip install -e ."
        )
    return ROOT


def work_folder() -> Path:
    """The learner's own folder, which git ignores. Made when first asked for."""
    folder = course_root() / "work"
    folder.mkdir(exist_ok=True)
    return folder


def load_progress(folder: Path | None = None) -> dict:
    """All that is recorded; {} if nothing is yet. ValueError names a file that cannot be read."""
    path = (folder or work_folder()) / "progress.json"
    try:
        progress = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON ({error}); mend it, or delete it to start anew") from None
    if not isinstance(progress, dict):
        raise ValueError(f"{path} holds a {type(progress).__name__}, not an object; delete it to start anew")
    return progress


def update_progress(change: Callable[[dict], None], folder: Path | None = None) -> dict:
    """Apply ``change`` to what is recorded and store it; returns the new state.

    The file is replaced as a whole, so whoever reads it, or is interrupted, sees it before or after the change.
    """
    folder = folder or work_folder()
    with FileLock(folder / ".progress.lock", timeout=10):
        progress = load_progress(folder)
        change(progress)
        text = json.dumps(progress, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        handle, name = tempfile.mkstemp(dir=folder, prefix=".progress-", suffix=".json")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, folder / "progress.json")
        except BaseException:
            os.unlink(name)
            raise
    return progress
