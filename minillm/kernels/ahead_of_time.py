"""Every kernel compiled for GPUs that need not be there: registers, shared memory, and whether that is too much.

    python -m minillm.kernels.ahead_of_time --arch 80 90 [--json]

A kernel's file lists its COMPILE_CASES. Each of them calls the kernel's own wrapper with CPU tensors, under a driver
that compiles what is launched, specialised as on a GPU, and runs nothing. Two faults are looked for: spilled registers
(local memory lies in HBM, so a spill costs what the kernel was written to save), and more shared memory than the case
states or the GPU has, which the compiler lets pass and the first launch refuses.

Triton decides at its first import whether kernels are interpreted, and keeps compiled ones by process, so each
architecture gets a process of its own with the interpreter off.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field

from minillm.kernels import HAS_TRITON

# Bytes of shared memory that one program may ask for, by compute capability.
SHARED_MEMORY = {
    75: 65_536,
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    103: 232_448,
    120: 101_376,
}


@dataclass(frozen=True)
class CompileCase:
    """One way to launch a kernel. ``launch`` calls its wrapper with CPU tensors and must not read what that returns."""

    name: str
    launch: Callable[[], object]
    max_shared: int | None = None  # bytes; None: as much as the GPU has
    max_spill: int = 0  # bytes stored and loaded


@dataclass
class Compiled:
    """What the compiler says of one kernel of one case on one architecture, and what is wrong with it."""

    kernel: str
    case: str
    arch: int
    registers: int = 0
    spill: int = 0  # bytes, stores and loads
    shared: int = 0  # bytes
    dot: str = ""  # instruction class of its products: wgmma, tcgen05.mma or mma (tensor cores), or fma
    problems: list[str] = field(default_factory=list)


def compile_here(arch: int, modules: list[str]) -> list[Compiled]:
    """Compile all cases of these modules for one architecture, in this process, whose interpreter must be off."""
    import triton
    from triton.runtime.jit import JITFunction

    if not isinstance(triton.language.cdiv, JITFunction):
        raise RuntimeError("kernels are interpreted in this process; compiling needs one with TRITON_INTERPRET=0")
    launched = _compile_instead_of_running(arch)
    results = []
    for module in modules:
        for case in importlib.import_module(module).COMPILE_CASES:
            launched.clear()
            try:
                case.launch()
            except Exception as error:  # whatever the compiler raises is a finding about this case
                traceback.print_exc()
                last_line = str(error).strip().rpartition("\n")[2]
                problem = f"does not compile: {type(error).__name__}: {last_line}"
            else:
                problem = None if launched else "launches no kernel"
            if problem:
                results.append(Compiled(module.rpartition(".")[2], case.name, arch, problems=[problem]))
            results += [_judge(name, kernel, case, arch) for name, kernel in launched]
    return results


def _compile_instead_of_running(arch: int) -> list[tuple[str, object]]:
    """Every launch in this process from now on compiles for ``arch`` and is noted in the list that is returned."""
    import torch
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class CompileOnlyDriver:
        def get_current_target(self):
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=None):
            return 0

        def get_active_torch_device(self):
            return torch.device("cpu")

        def get_benchmarker(self):  # an autotuned kernel compiles every configuration, and all take equally long
            def benchmark(launch, quantiles=None, **options):
                launch()
                return [1.0] * len(quantiles or [0.5])

            return benchmark

        def get_empty_cache_for_benchmark(self):
            return None

        def clear_cache(self, cache):
            pass

    launched = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        with redirect_stdout(io.StringIO()) as report:
            kernel = run(self, *args, grid=grid, warmup=True, **options)
        if not hasattr(kernel, "assembler_report"):  # launched alike again, it is not compiled again
            kernel.assembler_report = report.getvalue()
        launched.append((self.__name__, kernel))
        return kernel

    driver.set_active(CompileOnlyDriver())
    JITFunction.run = compile_only
    # Registers and spills stand in what the assembler prints, so it must be run, whatever lies in the cache.
    knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
    return launched


def _judge(name: str, kernel, case: CompileCase, arch: int) -> Compiled:
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", kernel.assembler_report)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", kernel.assembler_report)]
    if not registers or not spills:
        raise RuntimeError(f"the assembler says nothing of registers and spills:\n{kernel.assembler_report}")
    dot = next((label for label in ("wgmma", "tcgen05.mma", "mma") if f"{label}." in kernel.asm["ptx"]), "fma")
    found = Compiled(name, case.name, arch, max(registers), sum(spills), kernel.metadata.shared, dot)
    if found.spill > case.max_spill:
        found.problems.append(f"spills {found.spill} bytes of registers, at most {case.max_spill} allowed")
    if case.max_shared is not None and found.shared > case.max_shared:
        found.problems.append(f"takes {found.shared} bytes of shared memory, at most {case.max_shared} stated")
    if found.shared > SHARED_MEMORY[arch]:
        found.problems.append(f"takes {found.shared} bytes of shared memory, sm_{arch} has {SHARED_MEMORY[arch]}")
    return found


def kernel_modules() -> list[str]:
    """The modules of this room that have cases to compile."""
    import minillm.kernels

    names = [f"minillm.kernels.{found.name}" for found in pkgutil.iter_modules(minillm.kernels.__path__)]
    return [name for name in names if hasattr(importlib.import_module(name), "COMPILE_CASES")]


def compile_all(archs: list[int], modules: list[str] | None = None) -> list[Compiled]:
    """Compile for several architectures, each in a process of its own."""
    results = []
    with tempfile.TemporaryDirectory() as cache:
        environment = {"TRITON_CACHE_DIR": cache, **os.environ, "TRITON_INTERPRET": "0"}
        for arch in archs:
            command = [sys.executable, "-m", __name__, "--here", "--json", "--arch", str(arch)]
            command += ["--modules", *modules] if modules else []
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
            if not done.stdout:
                raise RuntimeError(f"compiling for sm_{arch} ended with status {done.returncode}")
            results += [Compiled(**found) for found in json.loads(done.stdout)]
    return results


def table(results: list[Compiled]) -> str:
    lines = [("kernel", "case", "arch", "registers", "spill B", "shared B", "dot", "")]
    for r in results:
        numbers = (f"sm_{r.arch}", str(r.registers), f"{r.spill:,}", f"{r.shared:,}", r.dot)
        lines.append((r.kernel, r.case, *numbers, "; ".join(r.problems) or "ok"))
    widths = [max(len(line[i]) for line in lines) for i in range(7)]
    return "\n".join("  ".join([*map(str.ljust, line, widths), line[7]]).rstrip() for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__name__}", description="Compile every kernel, without a GPU.")
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], choices=SHARED_MEMORY, help="80 is sm_80")
    parser.add_argument("--modules", nargs="+", help="with COMPILE_CASES; default: all of minillm.kernels")
    parser.add_argument("--json", action="store_true", help="a list of objects instead of a table")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one architecture, in this process
    args = parser.parse_args()
    if not HAS_TRITON:
        parser.error("Triton is not installed")
    if args.here:
        results = compile_here(args.arch[0], args.modules or kernel_modules())
    else:
        results = compile_all(args.arch, args.modules)
    print(json.dumps([asdict(found) for found in results], indent=1) if args.json else table(results))
    return 1 if any(found.problems for found in results) else 0


if __name__ == "__main__":
    # By its real name: the kernels' files import CompileCase from there, and run as a script this file has another.
    from minillm.kernels import ahead_of_time

    sys.exit(ahead_of_time.main())
