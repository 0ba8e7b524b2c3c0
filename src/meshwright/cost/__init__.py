"""The simulated step: pure functions on plain data. Never imports torch."""

from meshwright.cost.memory import Memory, element_bytes, gathered_itemsize, local_shape, memory, padded_bytes, shape_on
from meshwright.cost.names import names_class
from meshwright.cost.owners import balanced_owners
from meshwright.cost.step import (
    Activations,
    Block,
    Boundary,
    BoundaryAxis,
    Buffer,
    CollectiveKind,
    Moment,
    OuterState,
    Parameter,
    Placed,
    Placement,
    RecomputePart,
    Stages,
    StateTensor,
    Step,
    Traffic,
)

__all__ = [
    "Activations",
    "Block",
    "Boundary",
    "BoundaryAxis",
    "Buffer",
    "CollectiveKind",
    "Memory",
    "Moment",
    "OuterState",
    "Parameter",
    "Placed",
    "Placement",
    "RecomputePart",
    "Stages",
    "StateTensor",
    "Step",
    "Traffic",
    "balanced_owners",
    "element_bytes",
    "gathered_itemsize",
    "local_shape",
    "memory",
    "names_class",
    "padded_bytes",
    "shape_on",
]
