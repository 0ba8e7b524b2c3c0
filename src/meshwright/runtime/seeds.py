"""Random seeds: equal on all ranks where parameters are made, different per replica where dropout is drawn."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

# Spreads neighbouring (seed, replica) pairs over the 63-bit range (the golden-ratio constant of SplitMix64).
_SPREAD = 0x9E3779B97F4A7C15


def seed_everything(seed: int) -> None:
    """Seeds torch (all devices), numpy and random alike on every rank, so that models are made equal."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_replica(seed: int, replica: int) -> None:
    """Seeds the generators for training: each data-parallel replica draws its own dropout masks.

    Args:
        seed: The run's seed.
        replica: Index of this rank's data-parallel replica; ranks that share a batch share it.
    """
    seed_everything((seed + (replica + 1) * _SPREAD) % 2**63)


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Leaves torch's, numpy's and random's generators as they were before the block."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    own = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # other devices are other ranks'
    with torch.random.fork_rng(own):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
