"""Updates with statistics over whole parameters, computed on shards; the sums of all are reduced together."""

from meshwright.optim.sharded.base import ShardedOptimizer
from meshwright.optim.sharded.block import Blocks, stack
from meshwright.optim.sharded.checks import bad_value, check_at_least_zero, check_betas
from meshwright.optim.sharded.chunk import Chunk
from meshwright.optim.sharded.layout import Axis, Kept, Layout
from meshwright.optim.sharded.regions import Region
from meshwright.optim.sharded.sums import Request, Sum, Update
from meshwright.optim.sharded.tensor_list import TensorList
from meshwright.optim.sharded.whole import Parts, Whole

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
