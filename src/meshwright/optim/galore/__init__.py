"""GaLore: optimizer states in the space of the gradients' leading singular vectors."""

from meshwright.optim.galore.adafactor import GaLoreAdafactor
from meshwright.optim.galore.groups import get_galore_param_groups
from meshwright.optim.galore.optimizer import DistGaloreAdamW, DistGaloreAwamW, GaLoreAdamW, GaLoreAdamW8bit

__all__ = [
    "DistGaloreAdamW",
    "DistGaloreAwamW",
    "GaLoreAdafactor",
    "GaLoreAdamW",
    "GaLoreAdamW8bit",
    "get_galore_param_groups",
]
