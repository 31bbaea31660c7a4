"""Random numbers of a request: a pure function of who asks, never of who else is in the batch."""

from __future__ import annotations

import numpy as np

# Different uses of randomness at one output position must not share numbers.
SAMPLE, ACCEPT, RESAMPLE, DRAFT = range(4)


def uniform(seed: int, sample_index: int, position: int, purpose: int = SAMPLE) -> float:
    """A number in [0, 1) from the counter-based generator Philox (Salmon et al. 2011).

    ``seed`` is the key; the counter is made of sample index, output position and purpose. Counter-based means that
    no state is kept: a preempted request, or another rank, draws the same number at the same place.
    """
    bits = np.random.Philox(key=seed, counter=[0, purpose, sample_index, position])
    return float(np.random.Generator(bits).random())
