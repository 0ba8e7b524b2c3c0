"""The simulated step: pure functions on plain data. Never imports torch."""

from meshwright.cost.cluster import Cluster, Link, find_cluster, make_cluster, read_cluster
from meshwright.cost.device import DEVICES, Device, find_device
from meshwright.cost.efficiency import Calibration, Constants, Efficiency, fitted, read_calibration, write_calibration
from meshwright.cost.liveness import Peak, peak
from meshwright.cost.memory import Memory, element_bytes, local_shape, memory, padded_bytes, shape_on
from meshwright.cost.names import names_class
from meshwright.cost.owners import balanced_owners
from meshwright.cost.simulate import StepTime, simulate, timeline
from meshwright.cost.step import (
    Activations,
    Block,
    Boundary,
    Buffer,
    Op,
    OuterState,
    Parameter,
    Placement,
    RecomputePart,
    Stages,
    StateTensor,
    Step,
    Traffic,
)
from meshwright.cost.timeline import Event
from meshwright.cost.traffic import inline_traffic

__all__ = [
    "DEVICES",
    "Activations",
    "Block",
    "Boundary",
    "Buffer",
    "Calibration",
    "Cluster",
    "Constants",
    "Device",
    "Efficiency",
    "Event",
    "Link",
    "Memory",
    "Op",
    "OuterState",
    "Parameter",
    "Peak",
    "Placement",
    "RecomputePart",
    "Stages",
    "StateTensor",
    "Step",
    "StepTime",
    "Traffic",
    "balanced_owners",
    "element_bytes",
    "find_cluster",
    "find_device",
    "fitted",
    "inline_traffic",
    "local_shape",
    "make_cluster",
    "memory",
    "names_class",
    "padded_bytes",
    "peak",
    "read_calibration",
    "read_cluster",
    "shape_on",
    "simulate",
    "timeline",
    "write_calibration",
]
