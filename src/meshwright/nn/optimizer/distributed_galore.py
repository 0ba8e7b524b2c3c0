"""GaLore under ColossalAI's module name; see :mod:`meshwright.optim`."""

from meshwright.optim import DistGaloreAwamW

__all__ = ["DistGaloreAwamW"]
