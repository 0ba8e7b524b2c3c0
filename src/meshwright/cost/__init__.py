"""The simulated step: pure functions on plain data. Never imports torch."""

from meshwright.cost.memory import Memory, element_bytes, local_shape, memory, padded_bytes
from meshwright.cost.names import names_class
from meshwright.cost.step import (
    Activations,
    Block,
    Boundary,
    Buffer,
    Parameter,
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
    "Buffer",
    "Memory",
    "Parameter",
    "Placement",
    "RecomputePart",
    "Stages",
    "StateTensor",
    "Step",
    "Traffic",
    "element_bytes",
    "local_shape",
    "memory",
    "names_class",
    "padded_bytes",
]
