"""Run the updates of sharded optimizers, and answer what they ask about whole tensors.

[Note: sharded statistics] LAMB's norms, Adafactor's row means or Muon's orthogonalisation are of whole parameters,
and each rank has shards. An update is written once, as the mathematics of one tensor, and does not know how that is
sharded. It is a generator (:data:`Update`) over a chunk of parameters, which

1. yields requests: a :class:`Sum` with the partial sums over this rank's shards, or :class:`Whole` for work that sums
   cannot do;
2. is sent the answers, and yields the next requests, or moves the weights and ends.

:func:`run_updates` runs the updates of all parameters in lock-step, so that one round of requests costs one flat
all-reduce per mesh axis for any number of parameters, on any meshes and with any placements. Work on whole tensors
is divided among the ranks that have shards of them: each tensor travels to one owner, and the result back, in one
all-to-all each way (:mod:`meshwright.optim.sharded.owner_exchange`). The first round also checks that all ranks that
share a parameter have its gradient (:class:`Presence`). Parameters that no axis splits need no other rank and are
updated at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import ModelError
from meshwright.optim.sharded.chunk import Chunk, TensorList, runs
from meshwright.optim.sharded.owner_exchange import OwnerExchange, OwnerWork
from meshwright.optim.sharded.tensor_layout import Axis, Kept, Layout, Region, ShardGroup


class Presence:
    """Count of the ranks that have the gradient of each parameter; must be all that share it, or none.

    Args:
        axes: The axes that split these parameters.
        layouts: Layouts of the parameters.
        present: Whether this rank has the gradient of each.
    """

    def __init__(self, axes: tuple[Axis, ...], layouts: list[Layout], present: list[bool]) -> None:
        self.axes = axes
        self._layouts = layouts
        device = axes[0].device_type
        all_alike = len(set(present)) == 1  # the vector can then be made on the device, without a copy
        self.counts = (
            torch.full((len(present),), float(present[0]), device=device)
            if all_alike
            else torch.tensor(present, dtype=torch.float32).to(device, non_blocking=True)
        )
        """Shape ``(number of parameters,)``: 1 or 0 of this rank, then the sums over ranks."""
        self._copied: torch.cuda.Event | None = None

    @property
    def is_on_host(self) -> bool:
        """Return whether the counts can be read without waiting for a device."""
        return self.axes[0].device_type == "cpu"

    def arrive(self, counts: torch.Tensor) -> None:
        """Take the sums over all ranks, and begin to copy them to the host."""
        self.counts = counts.to("cpu", non_blocking=True)
        if not self.is_on_host:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(counts.device))

    def check(self) -> None:
        """Check the counts; those from a device have long arrived by the next step.

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


def presences_of(chunks: Sequence[Chunk]) -> list[Presence]:
    """Return, for all parameters that axes split, whether this rank has a gradient.

    They are in the order of the parameters, for a rank that lacks a gradient puts its parameters into other chunks than
    its peers.
    """
    seen = {member.position: (member.slot.layout, chunk.has_gradients) for chunk in chunks for member in chunk.members}
    by_axes: dict[tuple[Axis, ...], list[tuple[Layout, bool]]] = defaultdict(list)
    for _, (layout, present) in sorted(seen.items(), key=lambda item: item[0]):
        by_axes[layout.splitting(None)].append((layout, present))
    return [
        Presence(axes, [layout for layout, _ in members], [present for _, present in members])
        for axes, members in by_axes.items()
    ]


# --- Work on whole tensors: bucket by bucket, owners gather them, work, and send results back to the shards

# Bytes of whole tensors on one rank in one bucket; three buckets are under way at a time.
_BUCKET_BYTES = 1 << 27
_MAX_PLANS = 8

Parts = tuple[tuple[Region, Region], ...]


@dataclass
class Whole:
    """Request for work on whole tensors: each is gathered on one rank and worked on there, and the result sent back.

    Shards are read and results delivered bucket by bucket, so no more than a few buckets exist at once. When the
    request is answered (with None), all results have been delivered. Owners are remembered by ``parts``, ``form`` and
    ``cost``: these should be the same, or equal, objects in every step.

    Args:
        send: ``send(i)`` returns this rank's shard of the tensor of member ``i`` of the chunk, laid out like the
            parameter. Called once for each member; never for a chunk without gradients.
        work: ``work(members, wholes)`` makes one result of each whole tensor of ``dtype``, which it only reads.
            ``members`` are their numbers in the chunk; a tensor with several parts may come several times.
        receive: ``receive(i, result)`` takes this rank's shard of a result, on the parameter's device.
        parts: ``parts(layout)`` names the regions of a tensor that are separate work (matrices of a stack), each with
            the block of the result that it becomes; None: the whole tensor.
        form: ``form(layout)`` of a result; None: the parameter's form.
        cost: ``cost(shape)`` of the work on one part.
        dtype: Type in which tensors travel both ways.
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

    def owner_work(self, layout: Layout) -> OwnerWork:
        """Return the work on one parameter."""
        form = None if self.form is None else self.form(layout)
        target = layout if form is None else layout.restricted(form)
        whole = ((Region.of(layout.shape), Region.of(target.shape)),)
        parts = whole if self.parts is None else self.parts(layout)
        return OwnerWork(layout, target, parts, tuple(self.cost(source.size) for source, _ in parts))

    def done_alone(self, chunk: Chunk) -> None:
        """Do all the work on this rank, which has every tensor whole."""
        works = [self.owner_work(layout) for layout in chunk.layouts]
        numbers: list[int] = []
        wholes: list[torch.Tensor] = []
        for member, work in enumerate(works):
            tensor = self.send(member).to(self.dtype)
            numbers += [member] * len(work.parts)
            wholes += [tensor[source.inside(Region.of(tensor.shape))] for source, _ in work.parts]
        results = iter(self.work(numbers, wholes))
        for member, work in enumerate(works):
            self.receive(member, _joined(work, [next(results) for _ in work.parts]))


def _joined(work: OwnerWork, results: Sequence[torch.Tensor]) -> torch.Tensor:
    everything = Region.of(work.target.shape)
    if work.parts[0][1] == everything:
        return results[0]
    joined = results[0].new_empty(everything.size)
    for (_, target), result in zip(work.parts, results, strict=True):
        joined[target.inside(everything)] = result
    return joined


@dataclass(slots=True)
class _Item:
    """One member of a chunk with its request."""

    chunk: Chunk
    request: Whole
    index: int

    @property
    def layout(self) -> Layout:
        return self.chunk.members[self.index].slot.layout

    @property
    def ranks_key(self) -> Any:
        return self.request.replicas if self.layout.mesh is None else self.layout.mesh

    @property
    def key(self) -> tuple[Any, ...]:
        """Return the values that a plan depends on."""
        layout, request = self.layout, self.request
        asked = (request.parts, request.form, request.cost, request.dtype, request.replicas)
        return layout.shape, layout.mesh, layout.placements, *asked

    def shard(self) -> torch.Tensor | None:
        return self.request.send(self.index) if self.chunk.has_gradients else None


class WholeAnswers:
    """Answers to requests for work on whole tensors, with the plans of earlier rounds."""

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], list[tuple[list[int], OwnerExchange]]] = {}

    def answer(self, asked: Iterable[tuple[Chunk, Whole]]) -> None:
        """Do the work of one round. Collective over the ranks that hold the tensors.

        Members are taken in the order of the parameters: a rank that lacks gradients has other chunks than its peers.
        """
        placed = [
            (member.position, _Item(chunk, request, index))
            for chunk, request in asked
            for index, member in enumerate(chunk.members)
        ]
        items = [item for _, item in sorted(placed, key=lambda item: item[0])]
        if not items:
            return
        key = tuple(item.key for item in items)
        if key not in self._plans:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = list(_planned(items))
        _pipeline([_Bucket(exchange, [items[index] for index in indices]) for indices, exchange in self._plans[key]])


def _planned(items: Sequence[_Item]) -> Iterable[tuple[list[int], OwnerExchange]]:
    """Yield buckets of items that the same ranks have shards of, in an order that is equal on all of these."""
    by_ranks: dict[Any, list[int]] = defaultdict(list)
    for index, item in enumerate(items):
        by_ranks[item.ranks_key, item.request.dtype].append(index)
    for (ranks, dtype), indices in by_ranks.items():
        is_replicas = isinstance(ranks, dist.ProcessGroup)
        group = ShardGroup.of_replicas(ranks) if is_replicas else ShardGroup.of_mesh(ranks)
        limit = _BUCKET_BYTES // dtype.itemsize * len(group.ranks)
        for bucket in runs(indices, lambda index: items[index].layout.numel, limit):
            works = [items[index].request.owner_work(items[index].layout) for index in bucket]
            yield bucket, OwnerExchange(works, group, dtype)


class _Bucket:
    """Members whose tensors travel in one exchange."""

    def __init__(self, exchange: OwnerExchange, items: Sequence[_Item]) -> None:
        self._exchange, self._travellers = exchange, items

    def gather(self) -> None:
        self._wholes = self._exchange.gather([item.shard() for item in self._travellers])

    def work(self) -> None:
        """Do this rank's part, and begin to send the results."""
        wholes, by_request = self._wholes(), defaultdict(list)
        del self._wholes
        for part in wholes:
            by_request[id(self._owned(part).request)].append(part)
        results: dict[int, torch.Tensor | None] = {}
        for parts in by_request.values():
            owned = [self._owned(part) for part in parts]
            if not owned[0].chunk.has_gradients:  # on no rank, else the step has failed already
                results.update(dict.fromkeys(parts))
                continue
            made = owned[0].request.work([member.index for member in owned], [wholes[part] for part in parts])
            results.update(zip(parts, made, strict=True))
        self._shards = self._exchange.scatter(results)

    def receive(self) -> None:
        for item, shard in zip(self._travellers, self._shards(), strict=True):
            if item.chunk.has_gradients:
                device = item.chunk.members[item.index].slot.device  # with offload not the device of the exchange
                item.request.receive(item.index, shard.to(device))
        del self._shards

    def _owned(self, part: int) -> _Item:
        return self._travellers[self._exchange.member_of[part]]


def _pipeline(buckets: Sequence[_Bucket]) -> None:
    """Work on one bucket while the next is gathered and the last one is sent back."""
    for turn in range(len(buckets) + 2):
        if turn < len(buckets):
            buckets[turn].gather()
        if 0 < turn <= len(buckets):
            buckets[turn - 1].work()
        if turn > 1:
            buckets[turn - 2].receive()


# --- Sums over whole tensors: one flat all-reduce per mesh axis and round


@dataclass
class Sum:
    """Request for sums over whole tensors, one per parameter of a chunk.

    Args:
        partial: The sums over this rank's shards: a vector with one number per parameter, or a TensorList.
        over: The parameter's dims that are summed over; None for all. Only axes that split one of these are reduced.
        largest: Whether the maximum is asked for instead of the sum.
    """

    partial: Any
    over: tuple[int, ...] | None = None
    largest: bool = False


Request = Sum | Whole
Update = Generator[Sequence[Request], list[Any], None]
"""A generator that yields requests, is sent their answers in the same form (None for a :class:`Whole`, whose results
were delivered), and has moved the weights when it ends."""


@dataclass
class _Running:
    """An update that waits for answers."""

    chunk: Chunk
    update: Update
    asked: Sequence[Request]


def run_updates(updates: Iterable[tuple[Chunk, Update]], whole_answers: WholeAnswers) -> list[Presence]:
    """Run all updates to their end, in lock-step where they need other ranks; collective over the axes that shard.

    Chunks that no axis splits run through at once, one after the other, so that their tensors stay in the cache.
    See [Note: sharded statistics].

    Returns:
        Counts of gradients that have to be checked once they have arrived from the device.

    Raises:
        ModelError: When a parameter has a gradient on some of the ranks that share it and none on others. Weights are
            unchanged then.
    """
    waiting: list[_Running] = []
    for chunk, update in updates:
        asked = next(update, None)
        while asked is not None and not _needs_others(chunk, asked):
            _do_alone(chunk, asked)
            asked = _sent(update, asked)
        if asked is not None:
            waiting.append(_Running(chunk, update, asked))
    presences = presences_of([running.chunk for running in waiting if not running.chunk.is_local])
    _answer_sums(waiting, presences)
    for presence in presences:
        if presence.is_on_host:
            presence.check()
    while waiting:
        _answer_wholes(waiting, whole_answers)
        waiting = [
            _Running(running.chunk, running.update, asked)
            for running in waiting
            if (asked := _sent(running.update, running.asked)) is not None
        ]
        _answer_sums(waiting, [])
    return [presence for presence in presences if not presence.is_on_host]


def _sent(update: Update, asked: Sequence[Request]) -> Sequence[Request] | None:
    """Send an update its answers, and return its next requests; None when it has ended."""
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


def _answer_wholes(waiting: Sequence[_Running], answers: WholeAnswers) -> None:
    """Have all work on whole tensors done, by this rank alone where it has them whole."""
    shared: list[tuple[Chunk, Whole]] = []
    for running in waiting:
        for request in running.asked:
            if isinstance(request, Whole) and request.is_shared(running.chunk):
                shared.append((running.chunk, request))
            elif isinstance(request, Whole):
                request.done_alone(running.chunk)
    answers.answer(shared)


@dataclass
class _Values:
    """The tensors of one request during the all-reduces."""

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


def _answer_sums(waiting: Sequence[_Running], presences: Sequence[Presence]) -> None:
    """Replace every partial sum by the sum over ranks."""
    counts = [_Values([presence.counts], presence.axes) for presence in presences]
    for largest in (False, True):
        asked = [
            _Values.of(running.chunk, request)
            for running in waiting
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
    """Join all values into one fp32 tensor on the mesh's device; sums of shards in host memory are copied to it."""
    parts = [tensor.reshape(-1).float() for tensor in tensors]
    if len({part.device for part in parts}) > 1:
        parts = [part.to(device_type) for part in parts]
    flat = torch.cat(parts)
    return flat if flat.device.type == device_type else flat.to(device_type)
