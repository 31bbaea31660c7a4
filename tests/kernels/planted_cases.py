"""Launches that a compile check must find fault with, and one that it must not."""

from unittest import mock

import torch

from minillm.kernels import flash_attention
from minillm.kernels.ahead_of_time import CompileCase


def planted(name: str, head_dim: int, settings: tuple[int, int, int, int], max_shared: int | None = None):
    """Float16 attention with (block_m, block_n, num_warps, num_stages) of this head dim as the wrapper's choice."""

    def launch() -> None:
        q = torch.empty(64, 4, head_dim, dtype=torch.float16)
        numbers = torch.zeros(2, dtype=torch.int32)
        with mock.patch.object(flash_attention, "launch_settings", lambda *_: settings):
            flash_attention.flash_attention(q, q, q, numbers, numbers[:1], numbers[:1], 64, 1.0)

    return CompileCase(name, launch, max_shared)


COMPILE_CASES = [
    planted("spills", 256, (64, 64, 4, 2)),
    planted("more shared memory than there is", 128, (64, 128, 8, 4)),
    planted("more shared memory than stated", 64, (128, 64, 8, 3), max_shared=10_000),
    planted("no power of 2", 64, (48, 64, 4, 2)),
    CompileCase("no launch", lambda: None),
    planted("nothing wrong", 64, (128, 64, 8, 3)),
]
