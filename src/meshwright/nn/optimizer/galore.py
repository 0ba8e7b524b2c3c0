"""GaLore under ColossalAI's module name; see :mod:`meshwright.optim`."""

from meshwright.optim import GaLoreAdafactor, GaLoreAdamW, GaLoreAdamW8bit, get_galore_param_groups

__all__ = ["GaLoreAdafactor", "GaLoreAdamW", "GaLoreAdamW8bit", "get_galore_param_groups"]
