"""Adam over shards and half precision, on the device or offloaded to the host."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.optim.adam.adam_optimizer import (
        AdamOffloadOptimizer as AdamOffloadOptimizer,
        AdamOptimizer as AdamOptimizer,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
