"""LAMB under ColossalAI's module name; see :mod:`meshwright.optim`."""

from meshwright.optim import Lamb

__all__ = ["Lamb"]
