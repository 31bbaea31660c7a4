"""Triton kernels, one file each, every one beside a torch twin of equal signature; and C++ operators for a CPU.

flash_attention.py   attention over contiguous K and V, ragged batch, logsumexp out             chapter 01
paged_attention.py   the same over K and V in blocks, found by a table                       chapter 02
kv_write.py          new K and V into their rows of the cache                                chapter 02
interpreter.py       Triton's interpreter mended, bounds checked, bytes counted                 chapter 01
ahead_of_time.py     every kernel compiled without a GPU: registers, spills, shared memory      chapter 01
cpp/                 attention of few queries and a layer's small operations in bfloat16

Triton is optional. Without a GPU its kernels run in the interpreter, which is for tests and for learning: serving then
uses the twins, or, in bfloat16 and where there is a compiler, the C++ operators. Those too are optional.
"""

import os
from importlib.util import find_spec

import torch

# Triton reads the switch when it is imported, which torch's compiler does too: so it is set here, and whatever
# imports that compiler imports this room first. A process that only compiles sets it to 0 itself.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:
        return False


HAS_TRITON = _installed("triton")


def use_triton(kernel_backend: str, device: torch.device) -> bool:
    """Whether kernels run in Triton: "auto" on a GPU only, "triton" also in the interpreter, others never."""
    if kernel_backend == "triton" and not HAS_TRITON:
        raise ValueError("kernel_backend is 'triton', and Triton is not installed; use 'auto' or 'torch'")
    return kernel_backend == "triton" or (kernel_backend == "auto" and HAS_TRITON and device.type == "cuda")
