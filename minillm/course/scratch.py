"""How much memory a computation needs at once: the bytes of every tensor alive, added up as they come and go."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts what torch allocates inside: ``live``, the bytes alive now, and ``peak``, the most there ever were.

    Storages are counted, so a view is free, and a tensor that was there before is too. What an operation takes for
    itself and gives back (a BLAS workspace) is not seen. The same on every machine and in every run.

        with LiveBytes() as memory:
            attention(q, k, v)
        print(memory.peak)
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._alive: dict[int, weakref.ref] = {}  # storages by id; a reference calls back when its storage is freed

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # there a composite operation comes whole, and hides what it allocates
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        for tensor in _tensors([*args, *kwargs.values()]):
            self._take_in(tensor, there_before=True)
        result = func(*args, **kwargs)
        for tensor in _tensors([result]):
            self._take_in(tensor, there_before=False)
        return result

    def _take_in(self, tensor: Tensor, there_before: bool) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive:
            return
        size = 0 if there_before else storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)

        def freed(_) -> None:
            del self._alive[key]
            self.live -= size

        self._alive[key] = weakref.ref(storage, freed)


def _tensors(values) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes alive at once while ``run`` runs."""
    with LiveBytes() as memory:
        run()
    return memory.peak


def slope(sizes: Sequence[int], amounts: Sequence[float]) -> float:
    """Of the line from first to last point on log-log paper: 1 for what grows like size, 2 for its square."""
    return math.log(amounts[-1] / amounts[0]) / math.log(sizes[-1] / sizes[0])


def growth_rows(runs: dict[str, Callable], inputs: Callable[[int], tuple], sizes: Sequence[int]) -> list[dict]:
    """Peaks of each of ``runs`` on ``inputs(n)``, inputs included, and their slopes since the size before."""
    peaks: dict[str, list[int]] = {name: [] for name in runs}
    rows = []
    for i, n in enumerate(sizes):
        rows.append({"N": f"{n:,}"})
        for name, run in runs.items():
            seen = peaks[name]
            seen.append(peak_bytes(lambda run=run, n=n: run(*inputs(n))))
            rows[-1][f"{name}, MiB"] = f"{seen[-1] / 2**20:.1f}"
            rows[-1][f"{name}, slope"] = f"{slope(sizes[i - 1 : i + 1], seen[-2:]):.1f}" if i else ""
    return rows
