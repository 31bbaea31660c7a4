"""Where minillm keeps what it fetches or builds."""

from __future__ import annotations

import os
from pathlib import Path


def store() -> Path:
    """Fetched models and built operators: ``~/.cache/minillm``, or the environment's MINILLM_HOME."""
    return Path(os.environ.get("MINILLM_HOME") or "~/.cache/minillm").expanduser().absolute()
