"""Adam over shards and half precision, on the device or offloaded to the host."""

from meshwright.optim.adam.offload import AdamOffloadOptimizer
from meshwright.optim.adam.optimizer import AdamOptimizer

__all__ = ["AdamOffloadOptimizer", "AdamOptimizer"]
