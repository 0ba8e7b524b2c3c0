"""Compute statistics over whole parameters on shards; see :mod:`meshwright.optim.sharded.whole_tensors`."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.optim.checks import (
        bad_value as bad_value,
        check_at_least_zero as check_at_least_zero,
        check_betas as check_betas,
    )
    from meshwright.optim.sharded.chunk import Chunk as Chunk, TensorList as TensorList
    from meshwright.optim.sharded.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
    from meshwright.optim.sharded.tensor_layout import Axis as Axis, Kept as Kept, Layout as Layout, Region as Region
    from meshwright.optim.sharded.whole_tensors import (
        Parts as Parts,
        Request as Request,
        Sum as Sum,
        Update as Update,
        Whole as Whole,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
