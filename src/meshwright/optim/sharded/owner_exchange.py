"""Send shards of many tensors to one owner rank each, and results back, in one all-to-all each way.

See [Note: sharded statistics] in :mod:`meshwright.optim.sharded.whole_tensors`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from meshwright.optim.sharded.tensor_layout import Layout, Region, ShardGroup
from meshwright.runtime.torch_internals.optim import foreach_copy_, foreach_zero_


@dataclass(frozen=True)
class OwnerWork:
    """Work that owners do on one tensor.

    Args:
        source: Layout of the tensor that is sent to owners.
        target: Layout of the result.
        parts: Blocks of the source and of the target: the second is made from the first alone, on one rank. One pair
            for a matrix; one for each matrix of a stack.
        costs: Costs of the work on each part, in any unit.
    """

    source: Layout
    target: Layout
    parts: tuple[tuple[Region, Region], ...]
    costs: tuple[float, ...]


class OwnerExchange:
    """Exchange of the shards of many tensors with their owners: one all-to-all each way, or none.

    Every rank of the group is an owner, replicas as well. Work is assigned greedily, most expensive first, by the same
    computation on all ranks. A part that one rank has whole is worked on there: a stack of experts that is split by
    expert is not sent at all.

    Args:
        works: One for every tensor; equal on all ranks.
        group: The ranks that have shards of them.
        dtype: Type in which tensors travel both ways, and of the work.
    """

    def __init__(self, works: Sequence[OwnerWork], group: ShardGroup, dtype: torch.dtype = torch.float32) -> None:
        self._group, self._dtype = group, dtype
        known: dict[Hashable, Overlaps] = {}
        self._source_overlaps = [_overlaps(work.source, group, known) for work in works]
        self._target_overlaps = [_overlaps(work.target, group, known) for work in works]
        self.member_of = [member for member, work in enumerate(works) for _ in work.parts]
        """The number of each part's tensor; parts are numbered through all works."""
        self._sources = [source for work in works for source, _ in work.parts]
        self._targets = [target for work in works for _, target in work.parts]
        self.owners = self._assigned([cost for work in works for cost in work.costs])
        """The global rank that works on each part."""
        parts = range(len(self.owners))
        sources, targets = map(self._source, parts), map(self._target, parts)
        gathers = any(not source.whole for source in sources)
        scatters = any(
            set(target.regions) != {self.owners[part]} for part, target in enumerate(targets) if target.regions
        )
        self._out = Route((move for part in parts for move in self._to_owner(part)), group, exchanges=gathers)
        self._back = Route((move for part in parts for move in self._from_owner(part)), group, exchanges=scatters)

    def gather(self, shards: Sequence[torch.Tensor | None]) -> Callable[[], dict[int, torch.Tensor]]:
        """Begin to gather the parts on their owners; collective over the group.

        Args:
            shards: This rank's shard of every tensor, of any type, on any device; None stands for zeros.

        Returns:
            A function that waits for the parts that this rank owns and returns them by number. They may be views of the
            shards, and must only be read.
        """
        group = self._group
        wholes: dict[int, torch.Tensor] = {}
        views = set()
        owned = [part for part, owner in enumerate(self.owners) if owner == group.rank]
        for part in owned:
            member, source = self.member_of[part], self._sources[part]
            here = _cut(shards[member], source, self._source_overlaps[member].by_rank[group.rank])
            if here is not None and here.shape == source.size:
                wholes[part] = here.to(group.device, self._dtype)
                views.add(part)

        def read(move: Move) -> torch.Tensor | None:
            member = self.member_of[move.part]
            return (
                None
                if move.part in views
                else _cut(shards[member], move.region, self._source_overlaps[member].by_rank[group.rank])
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
        """Begin to send results to the ranks that hold shards of them; collective over the group.

        Args:
            results: One for every part that this rank owns, of any type; None stands for zeros.

        Returns:
            A function that waits for this rank's shards and returns one for every tensor, in the type and on the device
            of the exchange.
        """
        wanted = [overlaps.by_rank[self._group.rank] for overlaps in self._target_overlaps]
        shards: dict[int, torch.Tensor] = {}

        def read(move: Move) -> torch.Tensor | None:
            return _cut(results[move.part], move.region, self._targets[move.part])

        def take(move: Move, region: torch.Tensor | None) -> None:
            member = self.member_of[move.part]
            if region is not None and move.region == wanted[member]:  # this rank's whole shard needs no copy
                shards[member] = region.to(self._group.device, self._dtype)
            else:
                shard = self._made(shards, member, wanted[member])
                _fill(shard[move.region.inside(wanted[member])], region)

        finish = self._back.begin(self._dtype, read)

        def wait() -> list[torch.Tensor]:
            finish(take)
            return [self._made(shards, member, region) for member, region in enumerate(wanted)]

        return wait

    def _made(self, tensors: dict[int, torch.Tensor], key: int, region: Region) -> torch.Tensor:
        """Return a tensor of the collection; make it when its first region arrives."""
        if key not in tensors:
            tensors[key] = torch.empty(region.size, dtype=self._dtype, device=self._group.device)
        return tensors[key]

    def _assigned(self, costs: Sequence[float]) -> list[int]:
        """Assign the most expensive parts first, each to the rank with the least work among those that may own it."""
        owners = [0] * len(costs)
        load = dict.fromkeys(self._group.ranks, 0.0)
        for part in sorted(range(len(costs)), key=lambda part: -costs[part]):
            owner = min(self._source(part).whole or self._group.ranks, key=lambda rank: load[rank])
            load[owner] += costs[part]
            owners[part] = owner
        return owners

    def _source(self, part: int) -> Overlap:
        return self._source_overlaps[self.member_of[part]].of(self._sources[part])

    def _target(self, part: int) -> Overlap:
        return self._target_overlaps[self.member_of[part]].of(self._targets[part])

    def _to_owner(self, part: int) -> Iterator[Move]:
        """Yield this rank's moves of a part to its owner: each distinct region once, from the nearest rank that has it.

        Ranks whose numbers differ in low bits only are near: those of one node, or of one replica, are consecutive.
        """
        me, owner, source = self._group.rank, self.owners[part], self._source(part)
        mine = source.regions.get(me)
        regions = source.holders if owner == me else () if mine is None else (mine,)
        for region in regions:
            sender = min(source.holders[region], key=lambda rank: rank ^ owner)
            if me in (sender, owner):
                yield Move(sender, owner, part, region)

    def _from_owner(self, part: int) -> Iterator[Move]:
        """Yield this rank's moves of a result from its owner to the ranks that have shards of it."""
        me, owner, target = self._group.rank, self.owners[part], self._target(part)
        for rank in target.regions if owner == me else (me,):
            if rank in target.regions:
                yield Move(owner, rank, part, target.regions[rank])


def _overlaps(layout: Layout, group: ShardGroup, known: dict[Hashable, Overlaps]) -> Overlaps:
    """Return the regions of a tensor that ranks hold, made once for each layout."""
    key = (layout.shape, layout.mesh, layout.placements)
    if key not in known:
        known[key] = Overlaps(group.regions(layout))
    return known[key]


def _cut(tensor: torch.Tensor | None, region: Region, covered: Region) -> torch.Tensor | None:
    """Return the part of a region that a tensor has, which covers the region ``covered``."""
    return None if tensor is None else tensor[region.common(covered).inside(covered)]


def _fill(target: torch.Tensor, region: torch.Tensor | None) -> None:
    if region is None:
        target.zero_()
    else:
        target.copy_(region)


# --- Routes: blocks of many tensors in one all-to-all


@dataclass(frozen=True, slots=True)
class Move:
    """A region to send from one rank to another, or to copy on the same one."""

    sender: int
    receiver: int
    part: int
    """The number of its part."""
    region: Region


class Route:
    """The moves of one exchange: those that this rank sends, receives, or copies locally.

    Args:
        moves: Moves from or to this rank. Those between two ranks are in the same order on both.
        group: The ranks.
        exchanges: Whether any rank sends anything to another one.
    """

    def __init__(self, moves: Iterable[Move], group: ShardGroup, *, exchanges: bool) -> None:
        self._group = group
        me = group.rank
        sent: dict[int, list[Move]] = {rank: [] for rank in group.ranks}
        received: dict[int, list[Move]] = {rank: [] for rank in group.ranks}
        self._local: list[Move] = []
        self._exchanges = exchanges
        for move in moves:
            if move.sender == move.receiver:
                self._local.append(move)
            elif move.sender == me:
                sent[move.receiver].append(move)
            else:
                received[move.sender].append(move)
        self._sent, self._received = list(sent.values()), list(received.values())

    def begin(
        self, dtype: torch.dtype, read: Callable[[Move], torch.Tensor | None]
    ) -> Callable[[Callable[[Move, torch.Tensor | None], None]], None]:
        """Begin all moves; collective over the group, unless no rank sends anything.

        Args:
            dtype: Type of the regions that are sent.
            read: Returns the region to send; None stands for zeros.

        Returns:
            A function that waits until all regions are here, and passes each to its argument. Regions that have arrived
            are views of memory that is not used again; those of this rank are as they were read.
        """
        local = [(move, read(move)) for move in self._local]
        if not self._exchanges:
            return lambda take: _deliver(local, take)
        flat, parts = self._buffer(self._sent, dtype)
        _copy([(part, read(move)) for move, part in parts])
        arrived, places = self._buffer(self._received, dtype)
        work = dist.all_to_all_single(
            arrived.view(torch.uint8),  # bytes, which every backend can send
            flat.view(torch.uint8),
            _sizes(self._received, dtype.itemsize),
            _sizes(self._sent, dtype.itemsize),
            group=self._group.group,
            async_op=True,
        )

        def finish(take: Callable[[Move, torch.Tensor | None], None]) -> None:
            _deliver(local, take)
            work.wait()
            _deliver(places, take)

        return finish

    def _buffer(
        self, moves: Sequence[Sequence[Move]], dtype: torch.dtype
    ) -> tuple[torch.Tensor, list[tuple[Move, torch.Tensor]]]:
        """Make one flat tensor for regions from or to all ranks, and the view of each."""
        every = [move for of_rank in moves for move in of_rank]
        flat = torch.empty(sum(move.region.numel for move in every), dtype=dtype, device=self._group.device)
        views = flat.split([move.region.numel for move in every])
        return flat, [(move, view.view(move.region.size)) for move, view in zip(every, views, strict=False)]


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Copy every source into its target, or zeros where there is none."""
    zeros = [target for target, source in pairs if source is None]
    filled = [(target, source) for target, source in pairs if source is not None]
    if zeros:
        foreach_zero_(zeros)
    if filled:
        foreach_copy_([target for target, _ in filled], [source for _, source in filled])


def _deliver(
    regions: Iterable[tuple[Move, torch.Tensor | None]], take: Callable[[Move, torch.Tensor | None], None]
) -> None:
    for move, region in regions:
        take(move, region)


def _sizes(moves: Sequence[Sequence[Move]], itemsize: int) -> list[int]:
    return [sum(move.region.numel for move in of_rank) * itemsize for of_rank in moves]


# --- Overlaps of a region with the shards of ranks, computed once for all tensors of one layout


@dataclass(frozen=True, slots=True)
class Overlap:
    """The parts of one region that ranks hold."""

    regions: Mapping[int, Region]
    """The part of each rank that holds any of it."""
    holders: Mapping[Region, list[int]]
    """The ranks that hold each of these parts."""
    whole: list[int]
    """The ranks that hold all of it."""


@dataclass
class Overlaps:
    """The regions of one layout, by rank."""

    by_rank: Mapping[int, Region]
    _known: dict[Region, Overlap] = field(default_factory=dict)

    def of(self, region: Region) -> Overlap:
        """Return the parts of a region that ranks hold."""
        if region not in self._known:
            common = {rank: shard.common(region) for rank, shard in self.by_rank.items()}
            regions = {rank: part for rank, part in common.items() if part.numel > 0}
            holders: dict[Region, list[int]] = defaultdict(list)
            for rank, part in regions.items():
                holders[part].append(rank)
            self._known[region] = Overlap(regions, dict(holders), holders.get(region, []))
        return self._known[region]
