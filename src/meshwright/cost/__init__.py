"""The simulated step: pure functions on plain data. Never imports torch."""

from meshwright.cost.memory import Memory, element_bytes, local_shape, memory, padded_bytes, shape_on
from meshwright.cost.names import names_class
from meshwright.cost.owners import balanced_owners
from meshwright.cost.step import (
    Activations,
    Block,
    Boundary,
    Buffer,
    OuterState,
    Parameter,
    Placement,
    RecomputePart,
    Stages,
    StateTensor,
    Step,
    Traffic,
)
from meshwright.cost.traffic import gather_traffic, gathered_bytes, mean_traffic, reduce_traffic, reduced_bytes
from meshwright.cost.wire import Encoding, Wire

__all__ = [
    "Activations",
    "Block",
    "Boundary",
    "Buffer",
    "Encoding",
    "Memory",
    "OuterState",
    "Parameter",
    "Placement",
    "RecomputePart",
    "Stages",
    "StateTensor",
    "Step",
    "Traffic",
    "Wire",
    "balanced_owners",
    "element_bytes",
    "gather_traffic",
    "gathered_bytes",
    "local_shape",
    "mean_traffic",
    "memory",
    "names_class",
    "padded_bytes",
    "reduce_traffic",
    "reduced_bytes",
    "shape_on",
]
