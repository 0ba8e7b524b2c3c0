"""ColossalAI's step from an optimizer to its distributed form."""

from __future__ import annotations

from torch.optim import Optimizer


def cast_to_distributed(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself: ours are right on any layout, and every other is not changed by ColossalAI either.

    There it rebuilds a ``Lamb``, ``CAME``, ``Adafactor`` or ``GaLoreAdamW8bit`` as the ``Distributed…`` class. Accepted
    so that code which calls it runs.

    Args:
        optimizer: Any torch optimizer.
    """
    return optimizer
