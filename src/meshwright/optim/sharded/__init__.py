"""Updates with statistics over whole parameters, computed on shards; the sums of all are reduced together."""

from typing import TYPE_CHECKING

from meshwright.on_demand import on_demand

if TYPE_CHECKING:
    from meshwright.optim.sharded.base import ShardedOptimizer
    from meshwright.optim.sharded.block import Blocks, stack
    from meshwright.optim.sharded.checks import bad_value, check_at_least_zero, check_betas
    from meshwright.optim.sharded.chunk import Chunk
    from meshwright.optim.sharded.layout import Axis, Kept, Layout
    from meshwright.optim.sharded.regions import Region
    from meshwright.optim.sharded.sums import Request, Sum, Update
    from meshwright.optim.sharded.tensor_list import TensorList
    from meshwright.optim.sharded.whole import Parts, Whole
else:
    on_demand(
        __name__,
        """
        base: ShardedOptimizer
        block: Blocks stack
        checks: bad_value check_at_least_zero check_betas
        chunk: Chunk
        layout: Axis Kept Layout
        regions: Region
        sums: Request Sum Update
        tensor_list: TensorList
        whole: Parts Whole
        """,
    )

__all__ = [
    "Axis",
    "Blocks",
    "Chunk",
    "Kept",
    "Layout",
    "Parts",
    "Region",
    "Request",
    "ShardedOptimizer",
    "Sum",
    "TensorList",
    "Update",
    "Whole",
    "bad_value",
    "check_at_least_zero",
    "check_betas",
    "stack",
]
