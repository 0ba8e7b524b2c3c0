"""The collectives of sharding and of data parallelism, in whole numbers or in few bits, over one level or two."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from meshwright.cost.memory import element_bytes, gathered_itemsize, padded_bytes
from meshwright.cost.step import Moment, Parameter, Step, Traffic

if TYPE_CHECKING:
    from meshwright.cost.wire import Encoding

_BUCKET_BYTES = 25 * 2**20  # what DDP reduces at once


def gathered_bytes(step: Step, parameter: Parameter) -> int:
    """Bytes of a parameter in an all-gather over the sharding axis, from equal rows of every rank."""
    return _bytes(step, parameter, gathered_itemsize(step, parameter), step.wire.gather if step.wire else None)


def reduced_bytes(step: Step, parameter: Parameter) -> int:
    """Bytes of its gradient in a reduction over the sharding axis."""
    size = element_bytes(parameter, step.reduce_itemsize)
    return _bytes(step, parameter, size, step.wire.reduce if step.wire else None)


def _bytes(step: Step, parameter: Parameter, size: int, encoding: Encoding | None) -> int:
    if step.wire is None or encoding is None or not parameter.floating:
        return padded_bytes(step, parameter, size)
    ranks = step.size(step.shard_axis)
    return ranks * step.wire.num_bytes(encoding, parameter.numel, padded_bytes(step, parameter, 1) // ranks, size)


def gather_traffic(
    step: Step, axis: str, num_bytes: int, moment: Moment, *, calls: int = 1, each: bool = False
) -> tuple[Traffic, ...]:
    """An all-gather of so many bytes; in a hierarchy between nodes first, then within them.

    Args:
        calls: Collectives that the bytes are cut into.
        each: Whether each micro-batch sends its part.
    """
    around = _between_nodes(step, axis, num_bytes)
    sizes = (num_bytes,) if around is None else (around, num_bytes)
    return tuple(Traffic("all_gather", axis, size, moment, calls=max(calls, 1), per_micro_batch=each) for size in sizes)


def reduce_traffic(step: Step, axis: str, num_bytes: int, *, calls: int = 1, each: bool = False) -> tuple[Traffic, ...]:
    """A reduce-scatter of so many bytes; an all-to-all on CPUs and with a wire, in a hierarchy within nodes first."""
    around = _between_nodes(step, axis, num_bytes)
    calls = max(calls, 1)
    if not step.on_cpu and (step.wire is None or (step.wire.reduce is None and around is None)):
        return (Traffic("reduce_scatter", axis, num_bytes, "backward", calls=calls, per_micro_batch=each),)
    sizes = (num_bytes,) if around is None else (num_bytes, around)
    return tuple(Traffic("all_to_all", axis, size, "backward", calls=calls, per_micro_batch=each) for size in sizes)


def mean_traffic(step: Step, axis: str, ranks: int) -> tuple[Traffic, ...]:
    """The mean of all whole gradients but experts' over replicas: an all-reduce; with a wire, its two legs.

    Each gradient is cut into equal pieces, one for every rank; the owner of a piece forms its mean.
    """
    meant = [(count, p) for count, p in step.every_parameter() if p.trainable and p.expert is None]
    trained = [(count, p, element_bytes(p, step.reduce_itemsize)) for count, p in meant]
    wire = step.wire
    if wire is None or (wire.reduce is None and wire.neighbours(step.axes, axis) is None):
        total = sum(count * p.numel * size for count, p, size in trained)
        return (Traffic("all_reduce", axis, total, "backward", calls=math.ceil(total / _BUCKET_BYTES) or 1),)
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
