"""States, master weights and gradients in host memory or on disk, for any torch optimizer."""

from meshwright.optim.offload.copies import Copies, copies_for
from meshwright.optim.offload.disk import Disk
from meshwright.optim.offload.host_weights import HostWeights
from meshwright.optim.offload.optimizer import OffloadedOptimizer

__all__ = ["Copies", "Disk", "HostWeights", "OffloadedOptimizer", "copies_for"]
