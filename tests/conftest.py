"""What all tests share: which ones can run here, and tiny random models with an engine round them."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Tests import their helpers as tests.…, whether pytest was started as a module or as a script.
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


# -- a machine without Triton ---------------------------------------------------------------------------------------


class NoTriton:
    """Import finder of a machine that has no Triton."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"{name} is blocked", name=name)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--block-triton", action="store_true", help="run as if Triton were not installed")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--block-triton"):
        sys.meta_path.insert(0, NoTriton())


# -- which tests can run --------------------------------------------------------------------------------------------


def why_no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"


def why_no_browser() -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "Playwright is not installed"
    from minillm.bench.doctor import BROWSERS

    if not any(shutil.which(name) for name in BROWSERS):
        return f"no Chromium on the path ({', '.join(BROWSERS)}); on Debian: apt install chromium"
    return None


def why_no_smollm2() -> str | None:
    try:
        from minillm.models.fetch import resolve

        resolve("smollm2")
    except (ImportError, ValueError, OSError) as error:
        return f"SmolLM2 is not here; `minillm fetch smollm2` gets it ({error})"
    return None


NEEDS = {"gpu": why_no_gpu, "browser": why_no_browser, "smollm2": why_no_smollm2}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "nightly" not in config.getoption("markexpr"):
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]
    reasons = {marker: functools.cache(why) for marker, why in NEEDS.items()}
    for item in items:
        for marker, why in reasons.items():
            if item.get_closest_marker(marker) and (reason := why()):
                item.add_marker(pytest.mark.skip(reason=reason))


# -- models ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tiny_random_model():
    """f(dtype) -> a two-layer random Llama, the same weights in every dtype. Not to be changed by a test."""
    from tests.support import random_model

    return functools.cache(random_model)


@pytest.fixture(scope="session")
def model64(tiny_random_model):
    return tiny_random_model("float64")


@pytest.fixture(scope="session")
def model32(tiny_random_model):
    return tiny_random_model("float32")


@pytest.fixture
def engine_factory(tiny_random_model):
    """f(model=None, dtype="float64", chapter=last, parts={"scheduler": …}, **engine_args) -> Engine.

    Every engine is checked and closed when the test ends.
    """
    from minillm.core.config import LAST_BUILT, EngineConfig
    from minillm.engine.engine import Engine

    built = []

    def build(model=None, dtype="float64", chapter=LAST_BUILT, parts=None, **engine_args):
        # Room for a few requests: pages of an arena cost nothing until they are written, but zeroing them does.
        engine_args.setdefault("kv_cache_memory_bytes", 4 << 20)
        engine_args.setdefault("swap_space", 2**-10)  # GiB
        config = EngineConfig.at_chapter(chapter, dtype=dtype, **engine_args)
        engine = Engine(model or tiny_random_model(dtype), config, **(parts or {}))
        built.append(engine)
        return engine

    yield build
    for engine in built:
        if engine.alive:
            engine.check_integrity()
        engine.close()


@pytest.fixture(scope="session")
def embedded():
    """f(name) -> folder of an embedded model."""

    def folder(name: str = "tiny") -> Path:
        path = ROOT / "minillm" / "assets" / name
        if not (path / "model.safetensors").exists():
            pytest.skip(f"{path} is not there yet")
        return path

    return folder


@pytest.fixture(scope="session")
def cache_folder() -> Path:
    """Where tests keep what is slow to compute; git ignores it."""
    path = Path(os.environ.get("MINILLM_TEST_CACHE", ROOT / ".cache"))
    path.mkdir(parents=True, exist_ok=True)
    return path
