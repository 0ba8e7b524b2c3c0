"""What is kept of the weights beside them, over many steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OuterState:
    """What replicas keep to synchronise: tensors in fp32 (fp64 beside fp64) as large as what trains."""

    num_tensors: int  # global weights, and the outer momentum
    split_axis: str | None = None  # dealt out over this axis, parameter by parameter; None: all on every rank
    on_host: bool = False  # in host memory, beside a device with memory of its own


@dataclass(frozen=True)
class Average:
    """A moving average of what trains, sharded as it is, and on the host where its optimizer's copy is."""

    itemsize: int | None = None  # bytes per element; None: as wide as the weights, fp32 at least
    every: int = 1  # steps from one update to the next
