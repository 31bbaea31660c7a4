"""What a measured figure was measured on."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path

import psutil
import torch


def describe() -> dict:
    """Processor, cores, memory, GPU, versions and date: no host name."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "triton", "transformers")},
        "date": datetime.date.today().isoformat(),
    }


def version(package: str) -> str | None:
    """Installed version, None if it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
