"""Answer what updates ask about whole tensors: sums by one flat all-reduce per mesh axis, other work by owner ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import ModelError
from meshwright.optim.sharded.chunk import Chunk, TensorList
from meshwright.optim.sharded.owner_exchange import Journey, OwnerExchange
from meshwright.optim.sharded.tensor_layout import Axis, Kept, Layout, Meeting, Region


class Presence:
    """How many of the ranks that share each of some parameters have its gradient: all of them, or none, is right.

    Args:
        axes: The axes that split these parameters.
        layouts: Theirs.
        present: Whether this rank has the gradient of each.
    """

    def __init__(self, axes: tuple[Axis, ...], layouts: list[Layout], present: list[bool]) -> None:
        self.axes = axes
        self._layouts = layouts
        device = axes[0].device_type
        all_alike = len(set(present)) == 1  # then the vector is made on the device, without a copy
        self.counts = (
            torch.full((len(present),), float(present[0]), device=device)
            if all_alike
            else torch.tensor(present, dtype=torch.float32).to(device)
        )
        """Shape ``(number of parameters,)``: this rank's votes, then everybody's."""
        self._copied: torch.cuda.Event | None = None

    @property
    def is_on_host(self) -> bool:
        """Return whether looking at the counts waits for nothing."""
        return self.axes[0].device_type == "cpu"

    def arrive(self, counts: torch.Tensor) -> None:
        """Take the sums over all ranks; on their way to the host meanwhile."""
        self.counts = counts.to("cpu", non_blocking=True)
        if not self.is_on_host:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(counts.device))

    def check(self) -> None:
        """Look at the counts; on a device they have long arrived by the next step.

        Raises:
            ModelError: On every rank that shares the parameter.
        """
        if self._copied is not None:
            self._copied.synchronize()
        ranks = math.prod(axis.size for axis in self.axes)
        for layout, count in zip(self._layouts, self.counts.tolist(), strict=True):
            if count not in (0, ranks):
                raise ModelError(
                    "A sharded parameter has a gradient on some ranks only",
                    expected=f"a gradient on all {ranks} ranks that share it, or on none",
                    got=f"one on {count:.0f}, for a parameter of shape {layout.shape}",
                    fix="run the same forward and backward on every rank; one without data uses its loss times zero",
                )


def votes(chunks: Sequence[Chunk]) -> list[Presence]:
    """This rank's votes on every parameter that axes split, in the order of the parameters.

    The order matters: a rank that lacks a gradient batches its parameters otherwise than its peers.
    """
    seen = {member.position: (member.slot.layout, chunk.has_gradients) for chunk in chunks for member in chunk.members}
    by_axes: dict[tuple[Axis, ...], list[tuple[Layout, bool]]] = defaultdict(list)
    for _, (layout, present) in sorted(seen.items(), key=lambda item: item[0]):
        by_axes[layout.splitting(None)].append((layout, present))
    return [
        Presence(axes, [layout for layout, _ in members], [present for _, present in members])
        for axes, members in by_axes.items()
    ]


# --- Work on whole tensors, asked for by updates: in buckets, owners gather them, work, and send results to the shards.

# So many bytes of whole tensors are on one rank in one bucket, of which three are under way at a time.
_BUCKET_BYTES = 1 << 27
_PLANS_KEPT = 8

Parts = tuple[tuple[Region, Region], ...]


@dataclass
class Whole:
    """A request for work on whole tensors: each is gathered on one rank, worked on there, and the result sent back.

    Tensors are asked for and results handed out bucket by bucket, so no more than a few buckets are held at once.
    When the request is answered (with None), all results have been handed out. Who owns what is remembered by
    ``parts``, ``form`` and ``cost``: they should be the same, or equal, objects in every step.

    Args:
        send: ``send(i)`` is this rank's shard of what member ``i`` of the chunk sends: laid out like the parameter.
            Called once for each member; never for a chunk without gradients.
        work: ``work(members, wholes)`` makes one result of each whole tensor of ``dtype``, which it only reads.
            ``members`` are their numbers in the chunk; one that is worked on in several parts may come several times.
        receive: ``receive(i, result)`` takes this rank's shard of a result, on the parameter's device.
        parts: ``parts(layout)`` names the regions of a tensor that are worked on apart (matrices of a stack), each with
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
        """Return whether other ranks take part."""
        return not chunk.is_local or (
            chunk.layout.mesh is None and self.replicas is not None and self.replicas.size() > 1
        )

    def journey(self, layout: Layout) -> Journey:
        """Return what is asked for one parameter."""
        kept = None if self.form is None else self.form(layout)
        target = layout if kept is None else layout.restricted(kept)
        whole = ((Region.of(layout.shape), Region.of(target.shape)),)
        parts = whole if self.parts is None else self.parts(layout)
        return Journey(layout, target, parts, tuple(self.cost(source.size) for source, _ in parts))

    def done_alone(self, chunk: Chunk) -> None:
        """Do all the work on this rank, which holds all of every tensor."""
        journeys = [self.journey(layout) for layout in chunk.layouts]
        numbers: list[int] = []
        wholes: list[torch.Tensor] = []
        for member, journey in enumerate(journeys):
            tensor = self.send(member).to(self.dtype)
            numbers += [member] * len(journey.parts)
            wholes += [tensor[source.inside(Region.of(tensor.shape))] for source, _ in journey.parts]
        results = iter(self.work(numbers, wholes))
        for member, journey in enumerate(journeys):
            self.receive(member, _joined(journey, [next(results) for _ in journey.parts]))


def _joined(journey: Journey, results: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of the results of its parts."""
    everything = Region.of(journey.target.shape)
    if journey.parts[0][1] == everything:
        return results[0]
    joined = results[0].new_empty(everything.size)
    for (_, target), result in zip(journey.parts, results, strict=True):
        joined[target.inside(everything)] = result
    return joined


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
        """Do the work of one round. Collective over the ranks that hold the tensors.

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
        _do_in_turn(
            [_Bucket(exchange, [travellers[index] for index in indices]) for indices, exchange in self._plans[key]]
        )


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


class _Bucket:
    """Members whose matrices are on the way together."""

    def __init__(self, exchange: OwnerExchange, travellers: Sequence[_Traveller]) -> None:
        self._exchange, self._travellers = exchange, travellers

    def gather(self) -> None:
        self._wholes = self._exchange.gather([traveller.shard() for traveller in self._travellers])

    def work(self) -> None:
        """Do this rank's part, and begin to send the results."""
        wholes, by_request = self._wholes(), defaultdict(list)
        del self._wholes
        for part in wholes:
            by_request[id(self._owned(part).request)].append(part)
        results: dict[int, torch.Tensor | None] = {}
        for parts in by_request.values():
            owned = [self._owned(part) for part in parts]
            if not owned[0].chunk.has_gradients:  # on no rank, or the step fails
                results.update(dict.fromkeys(parts))
                continue
            made = owned[0].request.work([member.index for member in owned], [wholes[part] for part in parts])
            results.update(zip(parts, made, strict=True))
        self._shards = self._exchange.scatter(results)

    def receive(self) -> None:
        for traveller, shard in zip(self._travellers, self._shards(), strict=True):
            if traveller.chunk.has_gradients:
                device = traveller.chunk.members[traveller.index].slot.device  # not where ranks meet, with offload
                traveller.request.receive(traveller.index, shard.to(device))
        del self._shards

    def _owned(self, part: int) -> _Traveller:
        return self._travellers[self._exchange.member_of[part]]


def _do_in_turn(buckets: Sequence[_Bucket]) -> None:
    """Work on one bucket while the next is gathered and the one before is sent back."""
    for turn in range(len(buckets) + 2):
        if turn < len(buckets):
            buckets[turn].gather()
        if 0 < turn <= len(buckets):
            buckets[turn - 1].work()
        if turn > 1:
            buckets[turn - 2].receive()


# --- Whole-tensor sums: every parameter asks in the same round, one flat all-reduce per mesh axis answers them all.
#
# An update is a generator. It yields the sums that it needs, as partial sums over this rank's shards, and is sent the
# whole sums back; so LAMB, which asks once, costs one all-reduce per step and axis for any number of parameters. What
# sums cannot give, it asks of owners (:class:`~meshwright.optim.sharded.whole.Whole`) in the same way.


@dataclass
class Sum:
    """A request for sums over whole tensors, one per parameter of a chunk.

    Args:
        partial: The sums over this rank's shards: a vector with one number per parameter, or a TensorList.
        over: The parameter's dims that are summed over; None for all. Only axes that split one of these are reduced.
        largest: The largest value is wanted instead of the sum.
    """

    partial: Any
    over: tuple[int, ...] | None = None
    largest: bool = False


Request = Sum | Whole
Update = Generator[Sequence[Request], list[Any], None]
"""Yields requests, is sent their answers in the same form (None for work on whole tensors, whose results are handed
out); has moved the weights when it ends."""


@dataclass
class _Running:
    """An update that waits for answers."""

    chunk: Chunk
    update: Update
    asked: Sequence[Request]


def drive(updates: Iterable[tuple[Chunk, Update]], whole_answers: WholeAnswers) -> list[Presence]:
    """Run all updates to their end, in lock-step where they need other ranks; collective over the axes that shard.

    Chunks that no axis splits run through at once, one after the other, so that what they work on stays in the cache.

    Returns:
        Counts of gradients that have to be looked at once they have arrived from the device.

    Raises:
        ModelError: When a parameter has a gradient on some of the ranks that share it and none on others. Weights are
            as they were then.
    """
    together: list[_Running] = []
    for chunk, update in updates:
        asked = next(update, None)
        while asked is not None and not _needs_others(chunk, asked):
            _do_alone(chunk, asked)
            asked = _sent(update, asked)
        if asked is not None:
            together.append(_Running(chunk, update, asked))
    presences = votes([running.chunk for running in together if not running.chunk.is_local])
    _answer_sums(together, presences)
    for presence in presences:
        if presence.is_on_host:
            presence.check()
    while together:
        _answer_wholes(together, whole_answers)
        together = [
            _Running(running.chunk, running.update, asked)
            for running in together
            if (asked := _sent(running.update, running.asked)) is not None
        ]
        _answer_sums(together, [])
    return [presence for presence in presences if not presence.is_on_host]


def _sent(update: Update, asked: Sequence[Request]) -> Sequence[Request] | None:
    """Return what an update asks next when it is sent the answers."""
    try:
        return update.send([request.partial if isinstance(request, Sum) else None for request in asked])
    except StopIteration:
        return None


def _needs_others(chunk: Chunk, asked: Sequence[Request]) -> bool:
    return not chunk.is_local or any(isinstance(request, Whole) and request.is_shared(chunk) for request in asked)


def _do_alone(chunk: Chunk, asked: Sequence[Request]) -> None:
    for request in asked:
        if isinstance(request, Whole):
            request.done_alone(chunk)


def _answer_wholes(together: Sequence[_Running], answers: WholeAnswers) -> None:
    """Have all work on whole tensors done; by this rank alone where it has all of them."""
    shared: list[tuple[Chunk, Whole]] = []
    for running in together:
        for request in running.asked:
            if isinstance(request, Whole) and request.is_shared(running.chunk):
                shared.append((running.chunk, request))
            elif isinstance(request, Whole):
                request.done_alone(running.chunk)
    answers.answer(shared)


@dataclass
class _Values:
    """The tensors of one request on their way through the all-reduces."""

    tensors: list[torch.Tensor]
    axes: tuple[Axis, ...]
    request: Sum | None = field(default=None)

    @classmethod
    def of(cls, chunk: Chunk, request: Sum) -> _Values:
        partial = request.partial
        tensors = partial.tensors if isinstance(partial, TensorList) else [partial]
        axes = chunk.layout.splitting(request.over)
        if chunk.has_gradients or not axes:
            return cls(tensors, axes, request)
        device = axes[0].device_type
        return cls([torch.zeros(tensor.shape, device=device) for tensor in tensors], axes)

    def put_back(self) -> None:
        if self.request is not None:
            is_list = isinstance(self.request.partial, TensorList)
            self.request.partial = TensorList(self.tensors) if is_list else self.tensors[0]


def _answer_sums(together: Sequence[_Running], presences: Sequence[Presence]) -> None:
    """Replace every partial sum by the whole one."""
    counts = [_Values([presence.counts], presence.axes) for presence in presences]
    for largest in (False, True):
        asked = [
            _Values.of(running.chunk, request)
            for running in together
            for request in running.asked
            if isinstance(request, Sum) and request.largest == largest
        ]
        values = [*(counts if not largest else []), *asked]
        for axis in dict.fromkeys(axis for value in values for axis in value.axes):
            _reduce([value for value in values if axis in value.axes], axis, largest)
        for value in asked:
            value.put_back()
    for presence, count in zip(presences, counts, strict=True):
        presence.arrive(count.tensors[0])


def _reduce(values: list[_Values], axis: Axis, largest: bool) -> None:
    tensors = [tensor for value in values for tensor in value.tensors]
    flat = _flat(tensors, axis.device_type)
    dist.all_reduce(flat, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=axis.group)
    parts = iter(flat.split([tensor.numel() for tensor in tensors]))
    for value in values:
        value.tensors = [next(parts).view(tensor.shape).to(tensor.device) for tensor in value.tensors]


def _flat(tensors: list[torch.Tensor], device_type: str) -> torch.Tensor:
    """All values in one fp32 tensor on the device where ranks meet: shards in host memory visit it for the sum."""
    parts = [tensor.reshape(-1).float() for tensor in tensors]
    if len({part.device for part in parts}) > 1:
        parts = [part.to(device_type) for part in parts]
    flat = torch.cat(parts)
    return flat if flat.device.type == device_type else flat.to(device_type)
