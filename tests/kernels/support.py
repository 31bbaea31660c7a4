"""Which tests of kernels run where."""

import pytest

from minillm.kernels import HAS_TRITON


def _compiled() -> bool:
    """Whether this process has a GPU to compile for. Without one and without the interpreter, tests fail: no skip."""
    import torch

    from minillm.kernels import interpreter

    return torch.cuda.is_available() and not interpreter.interpreting()


needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
compiled = pytest.mark.skipif(
    HAS_TRITON and _compiled(), reason="kernels are compiled in this process; TRITON_INTERPRET=1 interprets them"
)
