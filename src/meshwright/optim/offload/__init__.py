"""States, master weights and gradients in host memory or on disk, for any torch optimizer."""

from typing import TYPE_CHECKING

from meshwright.on_demand import on_demand

if TYPE_CHECKING:
    from meshwright.optim.offload.copies import Copies, copies_for
    from meshwright.optim.offload.disk import Disk
    from meshwright.optim.offload.host_weights import HostWeights
    from meshwright.optim.offload.optimizer import OffloadedOptimizer
else:
    on_demand(
        __name__,
        """
        copies: Copies copies_for
        disk: Disk
        host_weights: HostWeights
        optimizer: OffloadedOptimizer
        """,
    )

__all__ = ["Copies", "Disk", "HostWeights", "OffloadedOptimizer", "copies_for"]
