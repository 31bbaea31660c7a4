"""Triton for notebook cells: the real one, or, where it is not installed, a stand-in that says so in one sentence.

    from minillm.course.triton_cells import device, tl, triton, watch

Kernels in a cell are then written as in any file, without a guard round them.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import torch

from minillm.kernels import HAS_TRITON

device = "cuda" if torch.cuda.is_available() else "cpu"

if HAS_TRITON:
    import triton
    import triton.language as tl

    from minillm.kernels import interpreter
    from minillm.kernels.interpreter import OutOfBounds, Traffic

    interpreter.install()
    INTERPRETED = interpreter.interpreting()
else:
    INTERPRETED = False

    class OutOfBounds(RuntimeError):
        """Never raised: nothing runs."""

    class Traffic:
        """Nothing runs, nothing is counted."""

        def __init__(self) -> None:
            self.loads, self.stores, self.total = Counter(), Counter(), 0

    class _Kernel:
        def __init__(self, function):
            self.name = function.__name__

        def __getitem__(self, grid):
            return lambda *args, **kwargs: print(f"Triton is not installed here, so {self.name} did not run.")

    class _Language:
        constexpr = int  # all that is looked at when a kernel is defined

    class _Triton:
        jit = _Kernel

        @staticmethod
        def cdiv(a: int, b: int) -> int:
            return -(-a // b)

    triton, tl = _Triton(), _Language()


@contextmanager
def watch():
    """Bounds checked and bytes counted, as interpreter.watch; where kernels are compiled or absent, neither."""
    if INTERPRETED:
        with interpreter.watch() as traffic:
            yield traffic
    else:
        if HAS_TRITON:
            print("Kernels are compiled here: bounds are not checked, bytes not counted.")
        yield Traffic()


__all__ = ["HAS_TRITON", "INTERPRETED", "OutOfBounds", "Traffic", "device", "tl", "triton", "watch"]
