"""Seconds of one collective over a mesh axis: rings, trees and both tiers of links (alpha-beta; Thakur et al. 2005)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.cost.cluster import Cluster
from meshwright.cost.efficiency import Constants, Efficiency


@dataclass(frozen=True)
class Group:
    """The ranks of one mesh axis as they lie on nodes."""

    size: int
    in_node: int  # of them in one node

    @property
    def nodes(self) -> int:
        """Nodes that it spans."""
        return math.ceil(self.size / self.in_node)


@dataclass(frozen=True)
class Network:
    """A cluster's links with what collectives reach of them."""

    cluster: Cluster
    efficiency: Efficiency
    constants: Constants

    @property
    def intra_bytes_per_s(self) -> float:
        """Per device, inside a node, in one direction."""
        return self.cluster.intra.bytes_per_s * self.efficiency.intra

    @property
    def hop_s(self) -> float:
        """From one node to the next."""
        return self.cluster.inter.latency_s * self.constants.hop

    @property
    def inter_bytes_per_s(self) -> float:
        """Per device, between nodes, in one direction, when all of a node's devices send."""
        return self.cluster.inter.bytes_per_s * self.efficiency.inter


def group_of(
    axes: tuple[tuple[str, int], ...],
    names: tuple[str, ...],
    devices_per_node: int,
    counted_again: tuple[str, ...] = (),
) -> Group:
    """How the ranks along some axes (taken as one) lie on nodes; the first axis is innermost.

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
    """Seconds of ``calls`` collectives that carry ``num_bytes`` together.

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
    """All-gather or reduce-scatter: inside nodes and between them at the same time, the slower one counts."""
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
