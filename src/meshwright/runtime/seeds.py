"""Random seeds: equal on all ranks where parameters are made, different per replica where dropout is drawn."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
    seed_everything(spread_seed(seed, replica))


def spread_seed(seed: int, index: int) -> int:
    """A seed of its own for each of several that share one."""
    return (seed + (index + 1) * _SPREAD) % 2**63


def seed_in_use(seed: int) -> None:
    """As :func:`seed_everything`, but fast: of CUDA devices the current one only, once it is used."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@dataclass(frozen=True)
class GeneratorState:
    """The state of torch's, numpy's and random's generators at some moment; of CUDA devices, the current one's."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def now(cls) -> GeneratorState:
        """As they are."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Puts them back."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Leaves torch's, numpy's and random's generators as they were before the block."""
    before = GeneratorState.now()
    try:
        yield
    finally:
        before.restore()
