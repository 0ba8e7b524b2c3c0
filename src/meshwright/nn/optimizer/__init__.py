"""The optimizers under ColossalAI's module names; they live in :mod:`meshwright.optim`."""

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
    cast_to_distributed,
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
