"""Whole tensors on one rank each: shards travel to owners, results travel back, many tensors in one exchange."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from meshwright.optim.sharded.layout import Layout
from meshwright.optim.sharded.meeting import Meeting
from meshwright.optim.sharded.regions import Block
from meshwright.optim.sharded.routes import Move, Route


@dataclass(frozen=True)
class Journey:
    """What is asked of owners for one tensor.

    Args:
        source: How the tensor that travels to owners is laid out.
        target: How the result is laid out.
        parts: Blocks of the source and of the target: the second is made from the first alone, on one rank. One pair
            for a matrix; one for each matrix of a stack.
        costs: Of the work on each part, in any unit.
    """

    source: Layout
    target: Layout
    parts: tuple[tuple[Block, Block], ...]
    costs: tuple[float, ...]


class OwnerExchange:
    """Sends the shards of many tensors to owners, and their results back: one all-to-all each way, or none.

    Every rank of the meeting is an owner, replicas as well. The work is balanced greedily, most expensive first, and
    equally on all ranks. A part that one rank holds alone is worked on there: a stack of experts that is split by
    expert does not travel at all.

    Args:
        journeys: One for every tensor; equal on all ranks.
        meeting: The ranks that hold their shards.
        dtype: In which they travel both ways, and are worked on.
    """

    def __init__(self, journeys: Sequence[Journey], meeting: Meeting, dtype: torch.dtype = torch.float32) -> None:
        self._meeting, self._dtype = meeting, dtype
        self._held = [meeting.held(journey.source) for journey in journeys]
        self._wanted = [meeting.held(journey.target) for journey in journeys]
        self.member_of = [member for member, journey in enumerate(journeys) for _ in journey.parts]
        """For every part the number of its tensor; parts are numbered through all journeys."""
        self._sources = [source for journey in journeys for source, _ in journey.parts]
        self._targets = [target for journey in journeys for _, target in journey.parts]
        self.owners = self._assigned([cost for journey in journeys for cost in journey.costs])
        """For every part the global rank that works on it."""
        self._out = Route((move for part in range(len(self.owners)) for move in self._to_owner(part)), meeting)
        self._back = Route((move for part in range(len(self.owners)) for move in self._from_owner(part)), meeting)

    def gather(self, shards: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        """The whole parts that this rank owns. Collective over the meeting.

        Args:
            shards: This rank's shard of every tensor, of any type, on any device; None stands for zeros.

        Returns:
            By number of the part; to be read only, as they may be views of the shards.
        """
        meeting, wholes = self._meeting, {}
        views = set()
        for part, owner in enumerate(self.owners):
            if owner != meeting.rank:
                continue
            source = self._sources[part]
            here = _cut(shards[self.member_of[part]], source, self._held[self.member_of[part]][owner])
            if here is not None and here.shape == source.size:
                wholes[part] = here.to(meeting.device, self._dtype)
                views.add(part)
            else:
                wholes[part] = torch.empty(source.size, dtype=self._dtype, device=meeting.device)

        def read(move: Move) -> torch.Tensor | None:
            member = self.member_of[move.part]
            return _cut(shards[member], move.block, self._held[member][meeting.rank])

        def take(move: Move, block: torch.Tensor | None) -> None:
            if move.part not in views:
                _fill(wholes[move.part][move.block.inside(self._sources[move.part])], block)

        self._out.carry(self._dtype, read, take)
        return wholes

    def scatter(self, results: Mapping[int, torch.Tensor | None]) -> list[torch.Tensor]:
        """This rank's shards of the results. Collective over the meeting.

        Args:
            results: One for every part that this rank owns, of any type; None stands for zeros.

        Returns:
            One for every tensor, in the dtype of the exchange, where ranks meet.
        """
        me = self._meeting.rank
        wanted = [held[me] for held in self._wanted]
        shards: dict[int, torch.Tensor] = {}

        def read(move: Move) -> torch.Tensor | None:
            return _cut(results[move.part], move.block, self._targets[move.part])

        def take(move: Move, block: torch.Tensor | None) -> None:
            member = self.member_of[move.part]
            if block is not None and move.block == wanted[member]:  # all of this rank's shard: no copy
                shards[member] = block.to(self._meeting.device, self._dtype)
                return
            if member not in shards:
                shards[member] = self._empty(wanted[member])
            _fill(shards[member][move.block.inside(wanted[member])], block)

        self._back.carry(self._dtype, read, take)
        return [shards[member] if member in shards else self._empty(block) for member, block in enumerate(wanted)]

    def _empty(self, block: Block) -> torch.Tensor:
        return torch.empty(block.size, dtype=self._dtype, device=self._meeting.device)

    def _assigned(self, costs: Sequence[float]) -> list[int]:
        """Owners: most expensive parts first, each to the rank with least work among those that may have it."""
        owners = [0] * len(costs)
        load = dict.fromkeys(self._meeting.ranks, 0.0)
        for part in sorted(range(len(costs)), key=lambda part: -costs[part]):
            held, source = self._held[self.member_of[part]], self._sources[part]
            alone = [rank for rank, block in held.items() if block.common(source) == source]
            owner = min(alone or self._meeting.ranks, key=lambda rank: load[rank])
            load[owner] += costs[part]
            owners[part] = owner
        return owners

    def _to_owner(self, part: int) -> Iterator[Move]:
        """Each distinct block of a part once, from the nearest rank that holds it."""
        owner, source = self.owners[part], self._sources[part]
        holders: dict[Block, list[int]] = defaultdict(list)
        for rank, block in self._held[self.member_of[part]].items():
            holders[block.common(source)].append(rank)
        for block, ranks in holders.items():
            yield Move(min(ranks, key=lambda rank: (abs(rank - owner), rank)), owner, part, block)

    def _from_owner(self, part: int) -> Iterator[Move]:
        """To every rank what its shard has of a result."""
        owner, target = self.owners[part], self._targets[part]
        for rank, block in self._wanted[self.member_of[part]].items():
            yield Move(owner, rank, part, block.common(target))


def _cut(tensor: torch.Tensor | None, block: Block, held: Block) -> torch.Tensor | None:
    """What a tensor that holds ``held`` has of a block."""
    return None if tensor is None else tensor[block.common(held).inside(held)]


def _fill(target: torch.Tensor, block: torch.Tensor | None) -> None:
    if block is None:
        target.zero_()
    else:
        target.copy_(block)
