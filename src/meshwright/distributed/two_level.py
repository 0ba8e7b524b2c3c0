"""Gathering and summing packed messages, in one collective or between and within nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.distributed.groups import groups_of_ranks
from meshwright.distributed.packing import Packing
from meshwright.distributed.transport import all_gather_flat


@dataclass(frozen=True)
class Nodes:
    """A group of ranks in its two levels: rank ``node * per_node + place`` of it is the ``place``-th on its node."""

    within: dist.ProcessGroup
    """The ranks of this node."""
    between: dist.ProcessGroup
    """The ranks of this place, one of every node."""
    num_nodes: int
    per_node: int


@dataclass(frozen=True)
class Route:
    """The ranks that communicate, and their nodes where messages go in two levels."""

    group: dist.ProcessGroup
    nodes: Nodes | None

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.group.size()


def route(group: dist.ProcessGroup, per_node: int | None) -> Route:
    """Finds the way of a group's messages; collective over the world, in which all groups are cut alike.

    Args:
        group: Its ranks lie node by node.
        per_node: How many consecutive ones share a node; None sends over all of them at once.
    """
    if per_node is None:
        return Route(group, None)
    ranks, own = dist.get_process_group_ranks(group), group.rank()
    node = own // per_node
    within = tuple(ranks[node * per_node : (node + 1) * per_node])
    between = tuple(ranks[own % per_node :: per_node])
    inner, outer = groups_of_ranks([within, between])
    return Route(group, Nodes(inner, outer, len(between), per_node))


def gathered_messages(message: torch.Tensor, way: Route) -> torch.Tensor:
    """Every rank's message of equal size, ``(ranks, bytes)``; over nodes, between them first.

    So each message enters a node once, and its ranks hand the messages on to each other.
    """
    if way.nodes is None:
        return _gathered(message, way.group)
    nodes = way.nodes
    of_my_place = _gathered(message, nodes.between)
    every = _gathered(of_my_place.view(-1), nodes.within).view(nodes.per_node, nodes.num_nodes, -1)
    return every.transpose(0, 1).reshape(way.size, -1)


def reduced_row(rows: torch.Tensor, packing: Packing, way: Route) -> torch.Tensor:
    """The sum over ranks of the row that is this rank's, ``(elements,)``, added up in fp32 (fp64 for fp64).

    One all-to-all of packed rows. Over nodes two: ranks of a node add up what they have for each place, then nodes
    exchange these sums, packed once more, so that each sum leaves its node once (qgZ of ZeRO++, Wang et al. 2023).

    Args:
        rows: ``(ranks, elements)``: row ``r`` is for rank ``r``.
        packing: How they travel.
        way: Who communicates.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    if way.nodes is None:
        return _exchanged(rows, packing, way.group, wide).sum(0)
    nodes, length = way.nodes, rows.shape[1]
    by_place = rows.view(nodes.num_nodes, nodes.per_node, length).transpose(0, 1).reshape(way.size, length)
    arrived = _exchanged(by_place, packing, nodes.within, wide)
    for_nodes = arrived.view(nodes.per_node, nodes.num_nodes, length).sum(0)
    return _exchanged(for_nodes.to(rows.dtype), packing, nodes.between, wide).sum(0)


def _gathered(message: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    every = message.new_empty(group.size() * message.numel())
    all_gather_flat(every, message, group=group)
    return every.view(group.size(), -1)


def _exchanged(rows: torch.Tensor, packing: Packing, group: dist.ProcessGroup, wide: torch.dtype) -> torch.Tensor:
    """All-to-all of rows in equal runs, one for every rank; what has arrived, unpacked."""
    sent = packing.pack(rows)
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent, group=group)
    result = torch.empty(rows.shape, dtype=wide, device=rows.device)
    packing.unpack(arrived, rows.dtype, result)
    return result
