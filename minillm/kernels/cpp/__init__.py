"""C++ operators for bfloat16 on a CPU, as ``torch.ops.minillm.…``: built once, on the machine that runs them.

ops.cpp     paged attention of few queries, the writing of K and V, rms_norm, rotary, silu · up

They need a C++ compiler. Where there is none, torch's own operators serve, and only speed is lost. The library is kept
in minillm's store, under a name that says of what it was made: source, flags, compiler, torch and the processor, for
whose instructions it is compiled.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

from minillm.core.store import store

SOURCE = Path(__file__).with_name("ops.cpp")
TORCH = Path(torch.__file__).parent
# The compiler's vectors are whole AVX-512 registers where there are such; a + b + c keeps its order (no -ffast-math),
# so that infinities are what they are and a row's sum does not depend on where it lies.
FLAGS = ["-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi"]
if platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")
LINKS = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
INCLUDES = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
BUILD_SECONDS = 300  # a compiler that takes longer is stopped


class NoOperators(Exception):
    """Why there are none here."""


def use_cpp(kernel_backend: str, dtype: torch.dtype | str, device: torch.device | str) -> bool:
    """Whether the C++ operators serve: "auto" for bfloat16 on a CPU if they can be built, "cpp" by all means.

    Builds them if need be. ValueError if "cpp" is asked for and can't be had; "auto" says so once and does without.
    """
    fits = str(dtype).removeprefix("torch.") == "bfloat16" and torch.device(device).type == "cpu"
    if kernel_backend == "cpp":
        if not fits:
            raise ValueError(
                f"kernel_backend is 'cpp', which is for bfloat16 on a CPU, not for {dtype} on {device}; "
                "use 'auto' or 'torch'"
            )
        if what := trouble():
            raise ValueError(f"kernel_backend is 'cpp', and {what}; use 'auto' or 'torch'")
        return True
    return kernel_backend == "auto" and fits and sys.platform == "linux" and not _warn_of(trouble())


def takes_head_dim(head_dim: int) -> bool:
    """Whether the operator for paged attention does; the others take any."""
    return head_dim % 16 == 0 and head_dim <= 256


@cache
def trouble() -> str | None:
    """Load the library, which may have to be built first. None, or the reason why there is none."""
    try:
        torch.ops.load_library(str(_built()))
        _tell_shapes()
    except NoOperators as error:
        return str(error)
    except OSError as error:  # the store can't be written, or the library not be loaded
        return f"the C++ operators could not be built and loaded ({error})"
    return None


def _tell_shapes() -> None:
    """What comes out of the operators that torch's compiler may meet; those of attention it never sees."""
    tell = torch.library.register_fake
    tell("minillm::rms_norm", lambda x, weight, eps: x.new_empty(x.shape))
    tell("minillm::add_rms_norm", lambda x, residual, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape)))
    tell("minillm::rotary", lambda x, cos, sin: x.new_empty(x.shape))
    tell("minillm::silu_mul", lambda gate_up: gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2))


def state() -> tuple[str, bool]:
    """For ``minillm doctor``: how things stand, and whether the operators can be used. Builds nothing."""
    try:
        library = _library(_compiler())
    except NoOperators as error:
        return str(error), False
    if library.exists():
        return "built", True
    log = _log(library)
    return (f"do not compile: {log}", False) if log.exists() else ("built when first used", True)


@cache
def _warn_of(what: str | None) -> bool:
    """Warn, the first time that this is what is wrong; whether anything is."""
    if what is not None:
        message = f"{what}. bfloat16 is served by torch's own operators instead: only speed is lost"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return what is not None


def _built() -> Path:
    """The library for this machine. NoOperators or OSError if there is none and none can be made."""
    compiler = _compiler()
    library = _library(compiler)
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(library.with_suffix(".lock")):  # of several processes one builds, and the others wait for it
            if not library.exists():
                _build(compiler, library)
    return library


def _build(compiler: list[str], library: Path) -> None:
    log, part = _log(library), library.with_suffix(f".{os.getpid()}.part")
    if log.exists():
        raise NoOperators(f"the C++ operators did not compile, as {log} says (delete it to try again)")
    if sys.stderr.isatty():
        print("Compiling the C++ operators for this processor, once; it takes less than a minute", file=sys.stderr)
    command = [*compiler, *FLAGS, *INCLUDES, str(SOURCE), "-o", str(part), *LINKS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
        if done.returncode:
            log.write_text(shlex.join(command) + "\n" + done.stderr, encoding="utf-8")
            raise NoOperators(f"the C++ operators did not compile, as {log} says (delete it to try again)")
        part.replace(library)  # it is whole when it is there
    except subprocess.TimeoutExpired:
        raise NoOperators(f"{compiler[0]} took more than {BUILD_SECONDS} s over the C++ operators") from None
    finally:
        part.unlink(missing_ok=True)


def _compiler() -> list[str]:
    """The environment's CXX, or the first on the path of those that torch's extensions are built with."""
    if sys.platform != "linux":
        raise NoOperators("the C++ operators are built on Linux only")
    wanted = shlex.split(os.environ.get("CXX", ""))
    names = wanted[:1] or ["c++", "g++", "clang++"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        where = f"CXX is {wanted[0]}, which is no program here" if wanted else f"none of {', '.join(names)} is here"
        raise NoOperators(f"the C++ operators need a compiler, and {where} (on Debian: apt install g++)")
    return [found, *wanted[1:]]


def _library(compiler: list[str]) -> Path:
    """Where the library is or will be. Another processor, compiler or torch makes another library."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next(line for line in lines if line.startswith(("flags", "Features")))  # x86, ARM
    except (OSError, StopIteration):
        processor = platform.processor()
    made_of = [SOURCE.read_text(encoding="utf-8"), FLAGS, compiler, str(TORCH), torch.__version__, processor]
    name = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    return store() / "cpp" / f"{name}.so"


def _log(library: Path) -> Path:
    return library.with_suffix(".log")
