"""ColossalAI's names of the optimizers, which are :mod:`meshwright.optim`'s."""

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


# ColossalAI has a module for each (``nn.optimizer.lamb``): they are imported as if this were their package.
__path__: list[str] = []


def cast_to_distributed(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer itself: ours are right on any layout, and ColossalAI changes no other either.

    There it rebuilds a ``Lamb``, ``CAME``, ``Adafactor`` or ``GaLoreAdamW8bit`` as the ``Distributed…`` class. Accepted
    so that code which calls it runs.

    Args:
        optimizer: Any torch optimizer.
    """
    return optimizer
