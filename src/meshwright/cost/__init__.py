"""The simulated step: pure functions on plain data. Never imports torch."""

from meshwright.cost.copies import copies
from meshwright.cost.homes import Home, homes_of, pick_largest
from meshwright.cost.memory import Memory, element_bytes, local_shape, memory, padded_bytes, shape_on
from meshwright.cost.names import names_class
from meshwright.cost.owners import balanced_owners
from meshwright.cost.step import (
    Activations,
    Block,
    BlockSaves,
    Boundary,
    Buffer,
    Copy,
    Hosted,
    OuterState,
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
    "BlockSaves",
    "Boundary",
    "Buffer",
    "Copy",
    "Home",
    "Hosted",
    "Memory",
    "OuterState",
    "Parameter",
    "Placement",
    "RecomputePart",
    "Stages",
    "StateTensor",
    "Step",
    "Traffic",
    "balanced_owners",
    "copies",
    "element_bytes",
    "homes_of",
    "local_shape",
    "memory",
    "names_class",
    "padded_bytes",
    "pick_largest",
    "shape_on",
]
