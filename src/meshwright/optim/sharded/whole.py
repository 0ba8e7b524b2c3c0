"""Work on whole tensors, asked for by updates: in buckets, owners gather them, work, and send results to the shards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright.optim.sharded.chunk import Chunk
from meshwright.optim.sharded.layout import Kept, Layout
from meshwright.optim.sharded.meeting import Meeting
from meshwright.optim.sharded.owners import Journey, OwnerExchange
from meshwright.optim.sharded.regions import Block

# So many bytes of whole tensors are on one rank at a time, beside what the work itself takes.
_BUCKET_BYTES = 1 << 28
_PLANS_KEPT = 8

Parts = tuple[tuple[Block, Block], ...]


@dataclass
class Whole:
    """A request for work on whole tensors: each is gathered on one rank, worked on there, and the result sent back.

    Tensors are asked for and results handed out one bucket at a time, so no more than that is ever held at once.
    When the request is answered (with None), all results have been handed out. Who owns what is remembered by
    ``parts``, ``form`` and ``cost``: they should be the same, or equal, objects in every step.

    Args:
        send: ``send(i)`` is this rank's shard of what member ``i`` of the chunk sends: laid out like the parameter.
            Called once for each member; never for a chunk without gradients.
        work: ``work(members, wholes)`` makes one result of each whole tensor of ``dtype``, which it only reads.
            ``members`` are their numbers in the chunk; one that is worked on in several parts may come several times.
        receive: ``receive(i, result)`` takes this rank's shard of a result.
        parts: ``parts(layout)`` names the blocks of a tensor that are worked on apart (matrices of a stack), each with
            the block of the result that it becomes; None: all in one.
        form: ``form(layout)`` of a result; None: of the parameter's form.
        cost: ``cost(shape)`` of the work on one part.
        dtype: In which tensors travel both ways.
        replicas: Ranks that hold the same plain parameters, with gradients on all or none of them: they share the work
            instead of doing all of it each.
    """

    send: Callable[[int], torch.Tensor]
    work: Callable[[list[int], list[torch.Tensor]], Sequence[torch.Tensor]]
    receive: Callable[[int, torch.Tensor], None]
    parts: Callable[[Layout], Parts] | None = None
    form: Callable[[Layout], Kept] | None = None
    cost: Callable[[tuple[int, ...]], float] = math.prod
    dtype: torch.dtype = torch.float32
    replicas: dist.ProcessGroup | None = None

    def is_shared(self, chunk: Chunk) -> bool:
        """Whether other ranks take part."""
        return not chunk.is_local or (
            chunk.layout.mesh is None and self.replicas is not None and self.replicas.size() > 1
        )

    def journey(self, layout: Layout) -> Journey:
        """What is asked for one parameter."""
        kept = None if self.form is None else self.form(layout)
        target = layout if kept is None else layout.restricted(kept)
        whole = ((Block.of(layout.shape), Block.of(target.shape)),)
        parts = whole if self.parts is None else self.parts(layout)
        return Journey(layout, target, parts, tuple(self.cost(source.size) for source, _ in parts))

    def done_alone(self, chunk: Chunk) -> None:
        """Does all the work on this rank, which holds all of every tensor."""
        for member, layout in enumerate(chunk.layouts):
            journey = self.journey(layout)
            tensor = self.send(member).to(self.dtype)
            blocks = [tensor[source.inside(Block.of(layout.shape))] for source, _ in journey.parts]
            results = self.work([member] * len(blocks), blocks)
            if len(journey.parts) == 1:
                self.receive(member, results[0])
                continue
            every = torch.empty(journey.target.shape, dtype=self.dtype, device=tensor.device)
            for (_, target), result in zip(journey.parts, results, strict=True):
                every[target.inside(Block.of(every.shape))] = result
            self.receive(member, every)


@dataclass(slots=True)
class _Traveller:
    """One member of a chunk with its request."""

    chunk: Chunk
    request: Whole
    index: int

    @property
    def layout(self) -> Layout:
        return self.chunk.members[self.index].slot.layout

    @property
    def meeting_key(self) -> Any:
        return self.request.replicas if self.layout.mesh is None else self.layout.mesh

    @property
    def key(self) -> tuple[Any, ...]:
        """Of what a plan is made."""
        layout, request = self.layout, self.request
        asked = (request.parts, request.form, request.cost, request.dtype, request.replicas)
        return layout.shape, layout.mesh, layout.placements, *asked

    def shard(self) -> torch.Tensor | None:
        return self.request.send(self.index) if self.chunk.has_gradients else None


class WholeAnswers:
    """Answers requests for work on whole tensors; remembers who owns what."""

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], list[tuple[list[int], OwnerExchange]]] = {}

    def answer(self, asked: Iterable[tuple[Chunk, Whole]]) -> None:
        """Does the work of one round. Collective over the ranks that hold the tensors.

        Members are taken in the order of the parameters: a rank that lacks gradients has other chunks than its peers.
        """
        placed = [
            (member.position, _Traveller(chunk, request, index))
            for chunk, request in asked
            for index, member in enumerate(chunk.members)
        ]
        travellers = [traveller for _, traveller in sorted(placed, key=lambda item: item[0])]
        if not travellers:
            return
        key = tuple(traveller.key for traveller in travellers)
        if key not in self._plans:
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.clear()
            self._plans[key] = list(_planned(travellers))
        for indices, exchange in self._plans[key]:
            _do(exchange, [travellers[index] for index in indices])


def _planned(travellers: Sequence[_Traveller]) -> Iterable[tuple[list[int], OwnerExchange]]:
    """Buckets of travellers that meet on the same ranks, in an order that is the same on all of them."""
    together: dict[Any, list[int]] = defaultdict(list)
    for index, traveller in enumerate(travellers):
        together[traveller.meeting_key, traveller.request.dtype].append(index)
    for (ranks, dtype), indices in together.items():
        is_replicas = isinstance(ranks, dist.ProcessGroup)
        meeting = Meeting.of_replicas(ranks) if is_replicas else Meeting.of_mesh(ranks)
        limit = _BUCKET_BYTES // dtype.itemsize * len(meeting.ranks)
        for bucket in _buckets(indices, [traveller.layout.numel for traveller in travellers], limit):
            journeys = [travellers[index].request.journey(travellers[index].layout) for index in bucket]
            yield bucket, OwnerExchange(journeys, meeting, dtype)


def _buckets(indices: Sequence[int], numels: Sequence[int], limit: int) -> list[list[int]]:
    buckets: list[list[int]] = [[]]
    size = 0
    for index in indices:
        if buckets[-1] and size + numels[index] > limit:
            buckets.append([])
            size = 0
        buckets[-1].append(index)
        size += numels[index]
    return buckets


def _do(exchange: OwnerExchange, travellers: Sequence[_Traveller]) -> None:
    """One bucket: gathers, works, and hands out the results."""
    wholes = exchange.gather([traveller.shard() for traveller in travellers])
    by_request: dict[int, list[int]] = defaultdict(list)
    for part in wholes:
        by_request[id(travellers[exchange.member_of[part]].request)].append(part)
    results: dict[int, torch.Tensor | None] = {}
    for parts in by_request.values():
        owned = [travellers[exchange.member_of[part]] for part in parts]
        if not owned[0].chunk.has_gradients:  # on no rank, or the step fails
            results.update(dict.fromkeys(parts))
            continue
        made = owned[0].request.work([traveller.index for traveller in owned], [wholes[part] for part in parts])
        results.update(zip(parts, made, strict=True))
    wholes.clear()
    for traveller, shard in zip(travellers, exchange.scatter(results), strict=True):
        if traveller.chunk.has_gradients:
            traveller.request.receive(traveller.index, shard)
