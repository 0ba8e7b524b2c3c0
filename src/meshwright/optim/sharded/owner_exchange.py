"""Send shards of many tensors to one owner rank each, and results back, in one all-to-all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from meshwright.optim.sharded.tensor_layout import Layout, Meeting, Region
from meshwright.runtime.torch_internals.optim import foreach_copy_, foreach_zero_


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
    parts: tuple[tuple[Region, Region], ...]
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
        known: dict[Hashable, Overlaps] = {}
        self._held = [_overlaps(journey.source, meeting, known) for journey in journeys]
        self._wanted = [_overlaps(journey.target, meeting, known) for journey in journeys]
        self.member_of = [member for member, journey in enumerate(journeys) for _ in journey.parts]
        """For every part the number of its tensor; parts are numbered through all journeys."""
        self._sources = [source for journey in journeys for source, _ in journey.parts]
        self._targets = [target for journey in journeys for _, target in journey.parts]
        self.owners = self._assigned([cost for journey in journeys for cost in journey.costs])
        """For every part the global rank that works on it."""
        parts = range(len(self.owners))
        sources, targets = map(self._source, parts), map(self._target, parts)
        gathers = any(not source.whole for source in sources)
        scatters = any(
            set(target.regions) != {self.owners[part]} for part, target in enumerate(targets) if target.regions
        )
        self._out = Route((move for part in parts for move in self._to_owner(part)), meeting, travels=gathers)
        self._back = Route((move for part in parts for move in self._from_owner(part)), meeting, travels=scatters)

    def gather(self, shards: Sequence[torch.Tensor | None]) -> Callable[[], dict[int, torch.Tensor]]:
        """Begin to bring the whole parts together. Collective over the meeting.

        Args:
            shards: This rank's shard of every tensor, of any type, on any device; None stands for zeros.

        Returns:
            A function that waits for the parts that this rank owns and returns them by number; to be read only, as they
            may be views of the shards.
        """
        meeting = self._meeting
        wholes: dict[int, torch.Tensor] = {}
        views = set()
        owned = [part for part, owner in enumerate(self.owners) if owner == meeting.rank]
        for part in owned:
            member, source = self.member_of[part], self._sources[part]
            here = _cut(shards[member], source, self._held[member].held[meeting.rank])
            if here is not None and here.shape == source.size:
                wholes[part] = here.to(meeting.device, self._dtype)
                views.add(part)

        def read(move: Move) -> torch.Tensor | None:
            member = self.member_of[move.part]
            return (
                None if move.part in views else _cut(shards[member], move.region, self._held[member].held[meeting.rank])
            )

        def take(move: Move, region: torch.Tensor | None) -> None:
            if move.part not in views:
                source = self._sources[move.part]
                _fill(self._made(wholes, move.part, source)[move.region.inside(source)], region)

        finish = self._out.begin(self._dtype, read)

        def wait() -> dict[int, torch.Tensor]:
            finish(take)
            return {part: self._made(wholes, part, self._sources[part]) for part in owned}

        return wait

    def scatter(self, results: Mapping[int, torch.Tensor | None]) -> Callable[[], list[torch.Tensor]]:
        """Begin to send results to the ranks that hold shards of them. Collective over the meeting.

        Args:
            results: One for every part that this rank owns, of any type; None stands for zeros.

        Returns:
            A function that waits for this rank's shards and returns one for every tensor, in the dtype of the exchange,
            where ranks meet.
        """
        wanted = [wanted.held[self._meeting.rank] for wanted in self._wanted]
        shards: dict[int, torch.Tensor] = {}

        def read(move: Move) -> torch.Tensor | None:
            return _cut(results[move.part], move.region, self._targets[move.part])

        def take(move: Move, region: torch.Tensor | None) -> None:
            member = self.member_of[move.part]
            if region is not None and move.region == wanted[member]:  # all of this rank's shard: no copy
                shards[member] = region.to(self._meeting.device, self._dtype)
            else:
                shard = self._made(shards, member, wanted[member])
                _fill(shard[move.region.inside(wanted[member])], region)

        finish = self._back.begin(self._dtype, read)

        def wait() -> list[torch.Tensor]:
            finish(take)
            return [self._made(shards, member, region) for member, region in enumerate(wanted)]

        return wait

    def _made(self, tensors: dict[int, torch.Tensor], key: int, region: Region) -> torch.Tensor:
        """Return a tensor of the collection, made when its first region arrives."""
        if key not in tensors:
            tensors[key] = torch.empty(region.size, dtype=self._dtype, device=self._meeting.device)
        return tensors[key]

    def _assigned(self, costs: Sequence[float]) -> list[int]:
        """Return the owners.

        Most expensive parts first, each to the rank with least work among those that may have it.
        """
        owners = [0] * len(costs)
        load = dict.fromkeys(self._meeting.ranks, 0.0)
        for part in sorted(range(len(costs)), key=lambda part: -costs[part]):
            owner = min(self._source(part).whole or self._meeting.ranks, key=lambda rank: load[rank])
            load[owner] += costs[part]
            owners[part] = owner
        return owners

    def _source(self, part: int) -> Overlap:
        return self._held[self.member_of[part]].of(self._sources[part])

    def _target(self, part: int) -> Overlap:
        return self._wanted[self.member_of[part]].of(self._targets[part])

    def _to_owner(self, part: int) -> Iterator[Move]:
        """Each distinct region of a part once, from the nearest rank that holds it; only what concerns this rank.

        Numbers that differ in low bits only are close: ranks of one node, or of one replica, follow each other.
        """
        me, owner, source = self._meeting.rank, self.owners[part], self._source(part)
        mine = source.regions.get(me)
        regions = source.holders if owner == me else () if mine is None else (mine,)
        for region in regions:
            sender = min(source.holders[region], key=lambda rank: rank ^ owner)
            if me in (sender, owner):
                yield Move(sender, owner, part, region)

    def _from_owner(self, part: int) -> Iterator[Move]:
        """To every rank what its shard has of a result; only what concerns this rank."""
        me, owner, target = self._meeting.rank, self.owners[part], self._target(part)
        for rank in target.regions if owner == me else (me,):
            if rank in target.regions:
                yield Move(owner, rank, part, target.regions[rank])


def _overlaps(layout: Layout, meeting: Meeting, known: dict[Hashable, Overlaps]) -> Overlaps:
    """Who holds what of a tensor; made once for each layout."""
    key = (layout.shape, layout.mesh, layout.placements)
    if key not in known:
        known[key] = Overlaps(meeting.held(layout))
    return known[key]


def _cut(tensor: torch.Tensor | None, region: Region, held: Region) -> torch.Tensor | None:
    """Return what a tensor that holds ``held`` has of a region."""
    return None if tensor is None else tensor[region.common(held).inside(held)]


def _fill(target: torch.Tensor, region: torch.Tensor | None) -> None:
    if region is None:
        target.zero_()
    else:
        target.copy_(region)


# --- Blocks of many tensors carried between ranks in one all-to-all.


@dataclass(frozen=True, slots=True)
class Move:
    """A region on its way from one rank to another, or to a place of its own on the same one."""

    sender: int
    receiver: int
    part: int
    """What it belongs to: a number with a meaning to the caller."""
    region: Region


class Route:
    """The moves of one exchange: what this rank sends, receives and keeps.

    Args:
        moves: That this rank has to do with. Those between two ranks are in the same order on both.
        meeting: The ranks.
        travels: Whether any rank sends anything to another one.
    """

    def __init__(self, moves: Iterable[Move], meeting: Meeting, *, travels: bool) -> None:
        self._meeting = meeting
        me = meeting.rank
        sent: dict[int, list[Move]] = {rank: [] for rank in meeting.ranks}
        received: dict[int, list[Move]] = {rank: [] for rank in meeting.ranks}
        self._kept: list[Move] = []
        self._travels = travels
        for move in moves:
            if move.sender == move.receiver:
                self._kept.append(move)
            elif move.sender == me:
                sent[move.receiver].append(move)
            else:
                received[move.sender].append(move)
        self._sent, self._received = list(sent.values()), list(received.values())

    def begin(
        self, dtype: torch.dtype, read: Callable[[Move], torch.Tensor | None]
    ) -> Callable[[Callable[[Move, torch.Tensor | None], None]], None]:
        """Begin all moves. Collective over the meeting, unless nothing travels.

        Args:
            dtype: Of what travels.
            read: The region to send; None stands for zeros.

        Returns:
            A function that waits until all regions are here, and hands each to its argument: those that have arrived as
            views of memory that is not used again, those that stay on this rank as they were read.
        """
        kept = [(move, read(move)) for move in self._kept]
        if not self._travels:
            return lambda take: _hand_out(kept, take)
        flat, parts = self._buffer(self._sent, dtype)
        _copy([(part, read(move)) for move, part in parts])
        arrived, places = self._buffer(self._received, dtype)
        work = dist.all_to_all_single(
            arrived.view(torch.uint8),  # bytes: every backend sends them, whatever they mean
            flat.view(torch.uint8),
            _sizes(self._received, dtype.itemsize),
            _sizes(self._sent, dtype.itemsize),
            group=self._meeting.group,
            async_op=True,
        )

        def finish(take: Callable[[Move, torch.Tensor | None], None]) -> None:
            _hand_out(kept, take)
            work.wait()
            _hand_out(places, take)

        return finish

    def _buffer(
        self, moves: Sequence[Sequence[Move]], dtype: torch.dtype
    ) -> tuple[torch.Tensor, list[tuple[Move, torch.Tensor]]]:
        """One flat tensor for regions from or to all ranks, and the view of each."""
        every = [move for of_rank in moves for move in of_rank]
        flat = torch.empty(sum(move.region.numel for move in every), dtype=dtype, device=self._meeting.device)
        views = flat.split([move.region.numel for move in every])
        return flat, [(move, view.view(move.region.size)) for move, view in zip(every, views, strict=False)]


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Write every source into its target; zeros where there is none."""
    zeros = [target for target, source in pairs if source is None]
    filled = [(target, source) for target, source in pairs if source is not None]
    if zeros:
        foreach_zero_(zeros)
    if filled:
        foreach_copy_([target for target, _ in filled], [source for _, source in filled])


def _hand_out(
    regions: Iterable[tuple[Move, torch.Tensor | None]], take: Callable[[Move, torch.Tensor | None], None]
) -> None:
    for move, region in regions:
        take(move, region)


def _sizes(moves: Sequence[Sequence[Move]], itemsize: int) -> list[int]:
    return [sum(move.region.numel for move in of_rank) * itemsize for of_rank in moves]


# --- Who holds what of a region of a tensor, looked up once for the many tensors of a model that are laid out alike.


@dataclass(frozen=True, slots=True)
class Overlap:
    """What ranks hold of one region."""

    regions: Mapping[int, Region]
    """By rank; only of those that hold anything of it."""
    holders: Mapping[Region, list[int]]
    """The ranks that hold each of these."""
    whole: list[int]
    """Ranks that hold all of it."""


@dataclass
class Overlaps:
    """The regions of one layout, by rank."""

    held: Mapping[int, Region]
    _known: dict[Region, Overlap] = field(default_factory=dict)

    def of(self, region: Region) -> Overlap:
        """Return what every rank holds of a region."""
        if region not in self._known:
            common = {rank: held.common(region) for rank, held in self.held.items()}
            regions = {rank: part for rank, part in common.items() if part.numel > 0}
            holders: dict[Region, list[int]] = defaultdict(list)
            for rank, part in regions.items():
                holders[part].append(rank)
            self._known[region] = Overlap(regions, dict(holders), holders.get(region, []))
        return self._known[region]
