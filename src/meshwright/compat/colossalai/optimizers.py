"""ColossalAI's names for the optimizers of :mod:`meshwright.optim`."""

from __future__ import annotations

from torch.optim import Optimizer

from meshwright.optim import (
    CAME,
    Adafactor,
    DistGaloreAdamW,
    DistGaloreAwamW,
    DistributedAdaFactor,
    DistributedCAME,
    DistributedLamb,
    GaLoreAdafactor,
    GaLoreAdamW,
    GaLoreAdamW8bit,
    Lamb,
    get_galore_param_groups,
)

__all__ = [
    "CAME",
    "Adafactor",
    "DistGaloreAdamW",
    "DistGaloreAwamW",
    "DistributedAdaFactor",
    "DistributedCAME",
    "DistributedLamb",
    "GaLoreAdafactor",
    "GaLoreAdamW",
    "GaLoreAdamW8bit",
    "Lamb",
    "cast_to_distributed",
    "get_galore_param_groups",
]


# ColossalAI has a module for each (``nn.optimizer.lamb``), which are aliases of this one: it must look like a package.
__path__: list[str] = []


def cast_to_distributed(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer itself, so that code which calls ColossalAI's function runs.

    There it rebuilds a ``Lamb``, ``CAME``, ``Adafactor`` or ``GaLoreAdamW8bit`` as the ``Distributed…`` class. Here
    these are right on any layout.

    Args:
        optimizer: Any torch optimizer.
    """
    return optimizer
