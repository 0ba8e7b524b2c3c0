"""Collectives of a step: the seconds they take over links of two tiers (alpha-beta), and the bytes they carry."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.cost.calibration import Constants, Efficiency
from meshwright.cost.cluster import Cluster
from meshwright.cost.device_time import Machine, backward_s, forward_s
from meshwright.cost.rank_memory import element_bytes, gathered_itemsize, padded_bytes
from meshwright.cost.step import Boundary, CollectiveKind, Moment, Parameter, Step, Traffic

if TYPE_CHECKING:
    from meshwright.cost.step import Encoding


@dataclass(frozen=True)
class Group:
    """Ranks of one mesh axis as they lie on nodes."""

    size: int
    in_node: int  # of them in one node

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return math.ceil(self.size / self.in_node)


@dataclass(frozen=True)
class Network:
    """A cluster's links with what collectives reach of them."""

    cluster: Cluster
    efficiency: Efficiency
    constants: Constants

    @property
    def intra_bytes_per_s(self) -> float:
        """Rate per device inside a node, in one direction."""
        return self.cluster.intra.bytes_per_s * self.efficiency.intra

    @property
    def hop_s(self) -> float:
        """Seconds from one node to the next."""
        return self.cluster.inter.latency_s * self.constants.hop

    @property
    def inter_bytes_per_s(self) -> float:
        """Rate per device between nodes, in one direction, when all of a node's devices send."""
        return self.cluster.inter.bytes_per_s * self.efficiency.inter


def group_of(
    axes: tuple[tuple[str, int], ...],
    names: tuple[str, ...],
    devices_per_node: int,
    counted_again: tuple[str, ...] = (),
) -> Group:
    """Return how the ranks along some axes (taken as one) lie on nodes; the first axis is innermost.

    Args:
        axes: Names and sizes.
        names: Those taken as one.
        devices_per_node: In one node.
        counted_again: Axes whose ranks those behind them have, too.
    """
    stride, size, in_node = 1, 1, 1
    for name, length in axes:
        if name in names:
            size *= length
            in_node *= max(1, min(length, devices_per_node // stride))
        stride *= 1 if name in counted_again else length
    return Group(size, max(1, min(in_node, size)))


def collective_s(kind: str, num_bytes: float, group: Group, network: Network, calls: int = 1) -> float:
    """Return the seconds of ``calls`` collectives that carry ``num_bytes`` together.

    Args:
        kind: As in ``Traffic``; so is what ``num_bytes`` counts.
        num_bytes: Payload of the whole tensors; of an all-to-all, what one rank has for all.
        group: Who takes part. All groups of the axis run at once, so that each has its own devices' share of a node's
            links and no more.
        network: The links.
        calls: Collectives that the bytes are cut into.
    """
    if group.size == 1 or num_bytes <= 0:
        return 0.0
    overhead = calls * network.constants.call_s
    overhead += calls * network.constants.reduce_scatter_s if kind == "reduce_scatter" else 0.0
    num_bytes = num_bytes / network.efficiency.of_collective(kind)  # as if the links were that much slower
    if kind == "send":
        link = network.intra_bytes_per_s if group.nodes == 1 else network.inter_bytes_per_s
        return num_bytes / link + overhead + calls * _hop_s(group, network)
    if kind == "all_to_all":
        return _all_to_all_s(num_bytes, group, network) + overhead + calls * _hop_s(group, network)
    if kind == "broadcast":  # piece by piece from rank to rank: each takes in the whole
        cards = group.in_node * network.inter_bytes_per_s
        link = network.intra_bytes_per_s if group.nodes == 1 else min(network.intra_bytes_per_s, cards)
        return num_bytes / link + overhead + calls * _ring_hops_s(group, network)
    once = _ring_s(num_bytes, group, network)
    if kind == "all_reduce":
        # NCCL takes a tree where the ring's many hops cost more than its bytes.
        return 2 * once + overhead + 2 * calls * min(_ring_hops_s(group, network), _tree_hops_s(group, network))
    return once + overhead + calls * _ring_hops_s(group, network)


def _ring_s(num_bytes: float, group: Group, network: Network) -> float:
    """Return the seconds of an all-gather or reduce-scatter.

    It runs inside nodes and between them at the same time, and the slower one counts.
    """
    inside = num_bytes * (group.size - 1) / group.size / network.intra_bytes_per_s if group.in_node > 1 else 0.0
    if group.nodes == 1:
        return inside
    # Every node takes what it lacks through the links of its devices in this group.
    across = num_bytes * (group.nodes - 1) / group.nodes / (group.in_node * network.inter_bytes_per_s)
    return max(inside, across)


def _all_to_all_s(num_bytes: float, group: Group, network: Network) -> float:
    one = num_bytes / group.size  # what one rank has for another
    inside = one * (group.in_node - 1) / network.intra_bytes_per_s
    across = one * (group.size - group.in_node) / network.inter_bytes_per_s
    return max(inside, across)


def _ring_hops_s(group: Group, network: Network) -> float:
    inside = (group.size - group.nodes) * network.cluster.intra.latency_s
    return inside + (group.nodes if group.nodes > 1 else 0) * network.hop_s


def _tree_hops_s(group: Group, network: Network) -> float:
    inside = math.log2(group.in_node) * network.cluster.intra.latency_s if group.in_node > 1 else 0.0
    return inside + 2 * math.log2(group.nodes) * network.hop_s if group.nodes > 1 else inside


def _hop_s(group: Group, network: Network) -> float:
    return network.cluster.intra.latency_s if group.nodes == 1 else network.hop_s


# --- Collectives at the boundaries of tensor, sequence and expert parallelism.


def inline_traffic(step: Step, axis: str, boundaries: Iterable[Boundary]) -> list[Traffic]:
    """Return the collectives of boundaries in every micro-batch, by kind and moment; blocks wait for them."""
    sent: dict[tuple[CollectiveKind, Moment], tuple[int, int]] = {}
    for each in boundaries:
        size, calls = sent.get((each.kind, each.moment), (0, 0))
        sent[each.kind, each.moment] = size + each.num_bytes, calls + each.count
    return [
        Traffic(
            kind,
            axis,
            size * step.num_micro_batches,
            moment,
            calls=calls * step.num_micro_batches,
            per_micro_batch=True,
            hidden=False,
        )
        for (kind, moment), (size, calls) in sent.items()
    ]


def send_boundaries(step: Step, axis: str) -> Step:
    """Return the step with the traffic of its boundaries over ``axis`` in all micro-batches."""
    return step.send(*inline_traffic(step, axis, (each for each in step.boundaries if each.axis == axis)))


# --- Collectives of sharding and of data parallelism, compressed or not, over one level or two.

_BUCKET_BYTES = 25 * 2**20  # what DDP reduces at once


def gathered_bytes(step: Step, parameter: Parameter) -> int:
    """Return the bytes of a parameter in an all-gather over the sharding axis, with equal rows from every rank."""
    return _bytes(
        step, parameter, gathered_itemsize(step, parameter), step.compression.gather if step.compression else None
    )


def reduced_bytes(step: Step, parameter: Parameter) -> int:
    """Return the bytes of a parameter's gradient in a reduction over the sharding axis."""
    size = element_bytes(parameter, step.reduce_itemsize)
    return _bytes(step, parameter, size, step.compression.reduce if step.compression else None)


def _bytes(step: Step, parameter: Parameter, size: int, encoding: Encoding | None) -> int:
    if step.compression is None or encoding is None or not parameter.floating:
        return padded_bytes(step, parameter, size)
    ranks = step.size(step.shard_axis)
    return ranks * step.compression.num_bytes(
        encoding, parameter.numel, padded_bytes(step, parameter, 1) // ranks, size
    )


def gather_traffic(
    step: Step, axis: str, num_bytes: int, moment: Moment, *, calls: int = 1, each: bool = False
) -> tuple[Traffic, ...]:
    """Return an all-gather of so many bytes; in a hierarchy one between nodes, then one within them.

    Args:
        step: What gathers.
        axis: Over which.
        num_bytes: Payload of the whole tensor.
        moment: When.
        calls: Collectives that the bytes are cut into.
        each: Whether each micro-batch sends its part.
    """
    around = _between_nodes(step, axis, num_bytes)
    sizes = (num_bytes,) if around is None else (around, num_bytes)
    return tuple(Traffic("all_gather", axis, size, moment, calls=max(calls, 1), per_micro_batch=each) for size in sizes)


def reduce_traffic(step: Step, axis: str, num_bytes: int, *, calls: int = 1, each: bool = False) -> tuple[Traffic, ...]:
    """Return a reduce-scatter of so many bytes.

    It is an all-to-all on CPUs and with compression; in a hierarchy one within nodes, then one between them.

    Args:
        step: What reduces.
        axis: Over which.
        num_bytes: Payload of the whole tensor.
        calls: Collectives that the bytes are cut into.
        each: Whether each micro-batch sends its part.
    """
    around = _between_nodes(step, axis, num_bytes)
    calls = max(calls, 1)
    if not step.on_cpu and (step.compression is None or (step.compression.reduce is None and around is None)):
        return (Traffic("reduce_scatter", axis, num_bytes, "backward", calls=calls, per_micro_batch=each),)
    sizes = (num_bytes,) if around is None else (num_bytes, around)
    return tuple(Traffic("all_to_all", axis, size, "backward", calls=calls, per_micro_batch=each) for size in sizes)


def mean_traffic(step: Step, axis: str, ranks: int) -> tuple[Traffic, ...]:
    """Return the mean over replicas of all whole gradients but experts': an all-reduce, or two legs if compressed.

    Each gradient is cut into equal pieces, one for every rank; the owner of a piece forms its mean.
    """
    meant = [(count, p) for count, p in step.every_parameter() if p.trainable and p.expert is None]
    trained = [(count, p, element_bytes(p, step.reduce_itemsize)) for count, p in meant]
    compression = step.compression
    if compression is None or (compression.reduce is None and compression.neighbours(step.axes, axis) is None):
        total = sum(count * p.numel * size for count, p, size in trained)
        return (Traffic("all_reduce", axis, total, "backward", calls=math.ceil(total / _BUCKET_BYTES) or 1),)
    message = sum(
        count * compression.num_bytes(compression.reduce, p.numel, math.ceil(p.numel / ranks), size)
        for count, p, size in trained
    )
    return (
        *reduce_traffic(step, axis, message * ranks),
        *gather_traffic(step, axis, message * ranks, "backward"),
    )


def _between_nodes(step: Step, axis: str, num_bytes: int) -> int | None:
    """Return the bytes of the collective between nodes, which one rank of each joins; None without hierarchy."""
    neighbours = step.compression.neighbours(step.axes, axis) if step.compression is not None else None
    return None if neighbours is None else num_bytes // neighbours


# --- The ring of a context axis: keys and values travel while ranks attend to those they have.

AXIS = "context"


def ring_s(step: Step, network: Network, moment: str) -> float:
    """Return the exposed seconds of a micro-batch's ring: what attention does not hide of keys and values.

    Args:
        step: After all ``cost`` twins.
        network: What carries it, between devices that attend.
        moment: ``"forward"`` or ``"backward"``.
    """
    sent = [each for each in step.traffic if each.moment == moment and each.axis == AXIS and each.kind == "send"]
    if not sent:
        return 0.0
    group = group_of(step.axes, (AXIS,), network.cluster.devices_per_node, step.counted_again)
    travels = sum(collective_s("send", each.bytes_per_step, group, network, each.calls) for each in sent)
    cluster = network.cluster
    machine = Machine(cluster.device, network.efficiency, network.constants, cluster.num_devices)
    seconds = forward_s if moment == "forward" else backward_s
    hides = sum(b.count * seconds(op, machine) for b in step.blocks for op in b.ops if op.kind == "attention")
    waits = sum(each.calls * network.constants.waits_s(step.size(each.axis)) for each in sent)
    return max(travels / step.num_micro_batches - hides, 0.0) + waits / step.num_micro_batches
