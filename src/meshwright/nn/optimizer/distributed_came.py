"""CAME under ColossalAI's module name; see :mod:`meshwright.optim`."""

from meshwright.optim import DistributedCAME

__all__ = ["DistributedCAME"]
