"""Adafactor under ColossalAI's module name; see :mod:`meshwright.optim`."""

from meshwright.optim import DistributedAdaFactor

__all__ = ["DistributedAdaFactor"]
