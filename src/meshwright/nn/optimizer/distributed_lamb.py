"""LAMB under ColossalAI's module name; see :mod:`meshwright.optim`."""

from meshwright.optim import DistributedLamb

__all__ = ["DistributedLamb"]
