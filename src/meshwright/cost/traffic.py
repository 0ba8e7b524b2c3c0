"""The collectives of sharding and of data parallelism, in whole numbers or in few bits, over one level or two."""

from __future__ import annotations

import math
from typing import Literal

from meshwright.cost.memory import element_bytes, padded_bytes
from meshwright.cost.step import Parameter, Step, Traffic
from meshwright.cost.wire import Encoding

Moment = Literal["forward", "backward"]


def gathered_bytes(step: Step, parameter: Parameter) -> int:
    """Bytes of a parameter in an all-gather over the sharding axis, from equal rows of every rank."""
    return _bytes(step, parameter, step.compute_itemsize, step.wire.gather if step.wire else None)


def reduced_bytes(step: Step, parameter: Parameter) -> int:
    """Bytes of its gradient in a reduction over the sharding axis."""
    return _bytes(step, parameter, step.reduce_itemsize, step.wire.reduce if step.wire else None)


def _bytes(step: Step, parameter: Parameter, itemsize: int | None, encoding: Encoding | None) -> int:
    size = element_bytes(parameter, itemsize)
    if step.wire is None or encoding is None or not parameter.floating:
        return padded_bytes(step, parameter, size)
    ranks = step.size(step.shard_axis)
    return ranks * step.wire.num_bytes(encoding, parameter.numel, padded_bytes(step, parameter, 1) // ranks, size)


def gather_traffic(step: Step, axis: str, num_bytes: int, moment: Moment) -> tuple[Traffic, ...]:
    """An all-gather of so many bytes; in a hierarchy between nodes first, then within them."""
    around = _between_nodes(step, axis, num_bytes)
    between = () if around is None else (Traffic("all_gather", axis, around, moment),)
    return (*between, Traffic("all_gather", axis, num_bytes, moment))


def reduce_traffic(step: Step, axis: str, num_bytes: int) -> tuple[Traffic, ...]:
    """A reduce-scatter of so many bytes; with a wire, an all-to-all, in a hierarchy within nodes first."""
    around = _between_nodes(step, axis, num_bytes)
    if step.wire is None or (step.wire.reduce is None and around is None):
        return (Traffic("reduce_scatter", axis, num_bytes, "backward"),)
    between = () if around is None else (Traffic("all_to_all", axis, around, "backward"),)
    return (Traffic("all_to_all", axis, num_bytes, "backward"), *between)


def mean_traffic(step: Step, axis: str, ranks: int) -> tuple[Traffic, ...]:
    """The mean of all whole gradients over replicas: an all-reduce; with a wire, its two legs.

    Each gradient is cut into equal pieces, one for every rank; the owner of a piece forms its mean.
    """
    trained = [(count, p, element_bytes(p, step.reduce_itemsize)) for count, p in step.every_parameter() if p.trainable]
    wire = step.wire
    if wire is None or (wire.reduce is None and wire.neighbours(step.axes, axis) is None):
        return (Traffic("all_reduce", axis, sum(count * p.numel * size for count, p, size in trained), "backward"),)
    message = sum(
        count * wire.num_bytes(wire.reduce, p.numel, math.ceil(p.numel / ranks), size) for count, p, size in trained
    )
    return (
        *reduce_traffic(step, axis, message * ranks),
        *gather_traffic(step, axis, message * ranks, "backward"),
    )


def _between_nodes(step: Step, axis: str, num_bytes: int) -> int | None:
    """Bytes of the collective between nodes: one rank of each takes part."""
    neighbours = step.wire.neighbours(step.axes, axis) if step.wire is not None else None
    return None if neighbours is None else num_bytes // neighbours
