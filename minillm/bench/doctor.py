"""What this machine has for the course, and what each missing thing costs."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass

import psutil
import torch

from minillm.bench.machine import version
from minillm.kernels import cpp
from minillm.models.fetch import resolve
from minillm.models.layers.linear import packing_available

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Finding:
    """One line: ``note`` says what the thing is for and, where it is missing, what that costs."""

    what: str
    found: str
    ok: bool
    note: str
    needed: bool = False

    def to_dict(self) -> dict:
        return asdict(self)


def examine() -> list[Finding]:
    """Look at everything; never raises for what is missing."""
    python = sys.version_info[:2] >= (3, 11)
    cuda = torch.cuda.is_available()
    triton = version("triton")
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if triton is None:
        kernels = "kernels run as their torch twins; cells tagged triton print one sentence"
    elif cuda:
        kernels = "kernels are compiled for the GPU"
    else:
        kernels = "kernels run in Triton's interpreter: right results, thousands of times slower"
    operators, usable = cpp.state()
    free = psutil.virtual_memory()
    packages = all(version(name) for name in ("pytest", "nbval", "hypothesis"))
    findings = [
        Finding("Python", platform.python_version(), python, "3.11 or newer", needed=True),
        Finding("torch", torch.__version__, True, f"{torch.get_num_threads()} threads", needed=True),
        Finding(
            "GPU", torch.cuda.get_device_name() if cuda else "none", cuda, "everything runs without; times are a CPU's"
        ),
        Finding("Triton", triton or "none", triton is not None, kernels),
        Finding(
            "oneDNN packing",
            "works" if packing_available() else "not here",
            packing_available(),
            "bfloat16 on a CPU is about 1.3 times faster with it",
        ),
        Finding(
            "C++ operators",
            operators,
            usable,
            "bfloat16 on a CPU is about 1.4 times faster with them; nothing else needs a compiler",
        ),
        Finding(
            "cores, memory",
            f"{os.cpu_count()}, {free.available / 2**30:.1f} of {free.total / 2**30:.1f} GiB free",
            free.available > 2 * 2**30,
            "2 cores and 4 GiB are enough for every chapter",
        ),
        Finding(
            "JupyterLab", version("jupyterlab") or "none", version("jupyterlab") is not None, "make course opens it"
        ),
        Finding(
            "llguidance",
            version("llguidance") or "none",
            version("llguidance") is not None,
            "outputs that obey a JSON schema, a regular expression or a grammar",
        ),
        Finding("browser for tests", browser or "none", browser is not None, "make browser skips without Chromium"),
        Finding("test packages", "there" if packages else "not all", packages, "pip install -e '.[dev]' brings them"),
    ]
    for name, note in (
        ("tiny", "the embedded model that every notebook uses"),
        ("tiny-draft", "its draft model"),
        ("smollm2", "a real chat model: minillm fetch smollm2"),
    ):
        try:
            found, ok = str(resolve(name)), True
        except (ValueError, OSError):
            found, ok = "none", False
        findings.append(Finding(f"model {name}", found, ok, note, needed=name == "tiny"))
    return findings
