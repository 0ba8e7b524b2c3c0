"""Adafactor under ColossalAI's module name; see :mod:`meshwright.optim`."""

from meshwright.optim import Adafactor

__all__ = ["Adafactor"]
