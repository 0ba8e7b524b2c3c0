"""The state of a rank's random generators as tensors: torch (CPU and CUDA), numpy and ``random``."""

from __future__ import annotations

import random

import numpy as np
import torch


def generator_tensors() -> dict[str, torch.Tensor]:
    """The state of all generators of this process; CPU tensors."""
    _, internal, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    tensors = {
        "torch.cpu": torch.get_rng_state(),
        "python.state": torch.tensor(internal, dtype=torch.int64),
        # A normal number that random.gauss keeps for its next call; nan says there is none.
        "python.gauss": torch.tensor(float("nan") if gauss is None else gauss, dtype=torch.float64),
        "numpy.keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy.position": torch.tensor([int(position), int(has_gauss)], dtype=torch.int64),
        "numpy.gauss": torch.tensor(float(cached), dtype=torch.float64),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors["torch.cuda"] = torch.cuda.get_rng_state()
    return tensors


def set_generators(tensors: dict[str, torch.Tensor]) -> bool:
    """Puts all generators into a saved state.

    Returns:
        Whether it did: nothing is changed when this process has other generators (CUDA or not) than the saved one.
    """
    if tensors.keys() != generator_tensors().keys():
        return False
    gauss = tensors["python.gauss"].item()
    random.setstate((3, tuple(tensors["python.state"].tolist()), None if gauss != gauss else gauss))
    position, has_gauss = tensors["numpy.position"].tolist()
    keys = tensors["numpy.keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, tensors["numpy.gauss"].item()))
    torch.set_rng_state(tensors["torch.cpu"])
    if "torch.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["torch.cuda"])
    return True
