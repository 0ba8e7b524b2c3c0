"""ColossalAI's names for the optimizers of those of :mod:`meshwright.optim`."""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim import Optimizer

from meshwright.optim import (
    CAME,
    Adafactor,
    GaLoreAdafactor,
    GaLoreAdamW,
    GaLoreAdamW8bit,
    Lamb,
    get_galore_param_groups,
)
from meshwright.optim.lamb import BiasCorrection

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


class DistributedAdaFactor(Adafactor):
    """:class:`~meshwright.optim.Adafactor` under ColossalAI's name for its distributed form; RMS(p) counts here.

    ColossalAI takes an ``lr`` and ignores it, also with ``relative_step=True``: so does this class, with a warning.
    With ``relative_step=False`` the ``lr`` counts, which ColossalAI's class does not offer.
    """

    def check_group(self, group: dict[str, Any]) -> None:
        """Remove an ``lr`` beside a relative step, with a warning, and check the rest."""
        if group["lr"] is not None and group["relative_step"]:
            warnings.warn(
                f"DistributedAdaFactor: lr={group['lr']!r} changes nothing, as in ColossalAI; relative_step=True "
                "chooses the step size. Pass relative_step=False for steps by lr, or leave lr out",
                stacklevel=6,  # whoever builds the optimizer
            )
            group["lr"] = None
        super().check_group(group)


class DistributedCAME(CAME):
    """:class:`~meshwright.optim.CAME` under ColossalAI's name for its distributed form."""


class DistributedLamb(Lamb):
    """:class:`~meshwright.optim.Lamb` under the name and with the arguments of ColossalAI's distributed form.

    ``bias_correction`` stands where :class:`~meshwright.optim.Lamb` has ``adam``, which can be given by name. True
    means ``"paper"``, as there; pass ``bias_correction="lr"`` for ColossalAI's numbers.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: BiasCorrection = "paper",
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction=bias_correction, **options)


class DistGaloreAdamW(GaLoreAdamW8bit):
    """:class:`~meshwright.optim.GaLoreAdamW8bit` under ColossalAI's name for its distributed form."""


class DistGaloreAwamW(DistGaloreAdamW):
    """:class:`DistGaloreAdamW` in ColossalAI's spelling."""


def cast_to_distributed(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer itself, so that code which calls ColossalAI's function runs.

    There it rebuilds a ``Lamb``, ``CAME``, ``Adafactor`` or ``GaLoreAdamW8bit`` as the ``Distributed…`` class. Here
    these are right on any layout.

    Args:
        optimizer: Any torch optimizer.
    """
    return optimizer
