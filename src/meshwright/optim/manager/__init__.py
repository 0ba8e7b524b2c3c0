"""Several optimizers and schedulers under one loss scale."""

from meshwright.optim.manager.manager import OptimManager

__all__ = ["OptimManager"]
