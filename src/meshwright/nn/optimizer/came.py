"""CAME under ColossalAI's module name; see :mod:`meshwright.optim`."""

from meshwright.optim import CAME

__all__ = ["CAME"]
