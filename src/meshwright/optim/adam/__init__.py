"""Adam over shards and half precision, on the device or offloaded to the host."""

from typing import TYPE_CHECKING

from meshwright.on_demand import on_demand

if TYPE_CHECKING:
    from meshwright.optim.adam.offload import AdamOffloadOptimizer
    from meshwright.optim.adam.optimizer import AdamOptimizer
else:
    on_demand(
        __name__,
        """
        offload: AdamOffloadOptimizer
        optimizer: AdamOptimizer
        """,
    )

__all__ = ["AdamOffloadOptimizer", "AdamOptimizer"]
