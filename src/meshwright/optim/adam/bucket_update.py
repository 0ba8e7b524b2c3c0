"""One step of Adam, bucket by bucket: cut parameters, move gradients and weights, apply the rule.

A bucket is a run of elements of local shards, which may begin and end within a parameter: staging buffers are bounded
by its size, however large parameters are. Where states live on another device (see :class:`StagedLink`), the gradients
of the next bucket travel while one is computed.

:class:`~meshwright.optim.OffloadedOptimizer` steps any torch optimizer on the host. It cannot replace this: it needs
room for the gradients of the whole model there and whole parameters in a bucket, where Adam needs two buckets.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshwright.optim.adam.adam_rule import AdamRule, AdamStates, Shards
from meshwright.optim.dtensors import local_tensor, num_replicas, placement_of, reduced
from meshwright.optim.offload_storage import Copies, Event
from meshwright.runtime.torch_internals.optim import foreach_copy_

# Kernels work on vectors of a few elements: cuts at multiples of this leave every element in its vector lane.
_ALIGNMENT = 1024


class Piece(NamedTuple):
    """A range of the elements of one parameter's local shard."""

    parameter: torch.Tensor
    """The optimizer's parameter, plain or DTensor."""
    start: int
    stop: int
    whole: bool
    """Whether the range is the whole shard."""

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return this range of a tensor that is laid out like the shard, flat unless it is whole."""
        return local if self.whole else local.view(-1)[self.start : self.stop]


Bucket = list[Piece]


def cut(parameters: Iterable[torch.Tensor], max_elements: int | None) -> list[Bucket]:
    """Cut the local shards of parameters, in their order, into buckets.

    Args:
        parameters: Plain tensors and DTensors; empty shards are left out.
        max_elements: Most elements of a bucket, rounded up to a multiple of 1024; None for a single bucket. A shard
            that is not contiguous stays whole, however large it is.
    """
    limit = None if max_elements is None else -(-max_elements // _ALIGNMENT) * _ALIGNMENT
    buckets: list[Bucket] = []
    room = 0
    for parameter in parameters:
        local = local_tensor(parameter)
        start, end = 0, local.numel()
        while start < end:
            if not buckets or (limit is not None and room <= 0):
                buckets.append([])
                room = limit or 0
            if limit is None or not local.is_contiguous() or end - start <= room:
                stop = end
            else:
                stop = start + room
            buckets[-1].append(Piece(parameter, start, stop, whole=stop - start == local.numel()))
            # Rounded up: the next piece must not begin between two vectors.
            room -= -(-(stop - start) // _ALIGNMENT) * _ALIGNMENT
            start = stop
    return buckets


# --- Mean and variance of the update's direction over all parameters of all ranks


class DeltaMoments:
    """Mean and variance of the values of all ranks, in fp64; a shard that several ranks hold counts once."""

    def __init__(self) -> None:
        self._sums: list[torch.Tensor] = []  # per piece: sum, sum of squares, count
        self._total: torch.Tensor | None = None

    def restart(self) -> None:
        """Forget the step before."""
        self._sums, self._total = [], None

    def add(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Count the values of a piece of one parameter."""
        wide = values.double()
        count = torch.full((), float(values.numel()), dtype=torch.float64, device=values.device)
        replicas = num_replicas(parameter, placement=placement_of(parameter))
        self._sums.append(torch.stack([wide.sum(), wide.square().sum(), count]) / replicas)

    def reduce(self) -> None:
        """Sum over ranks in one all-reduce of three numbers; every rank calls it, whatever it holds itself."""
        device = self._sums[0].device if self._sums else torch.device("cpu")
        total = torch.zeros(3, dtype=torch.float64, device=device)
        for part in self._sums:
            total += part.to(device)
        self._total = reduced(total, dist.ReduceOp.SUM)

    @property
    def mean(self) -> float:
        """Return the mean of the last step; nan before the first."""
        total, _, count = self._read()
        return total / count if count else float("nan")

    @property
    def variance(self) -> float:
        """Return the population variance of the last step; nan before the first."""
        total, squares, count = self._read()
        return max(squares / count - (total / count) ** 2, 0.0) if count else float("nan")

    def _read(self) -> list[float]:
        return self._total.tolist() if self._total is not None else [0.0, 0.0, 0.0]


# --- Links: how gradients reach the place where the update is computed, and how new weights get back


class Arena:
    """One buffer per device and type, cut anew into tensors for every bucket."""

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._buffers: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def take(self, likes: list[torch.Tensor], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        """Return uninitialised tensors with the sizes and strides of dense ``likes``, over those taken before."""
        total = sum(like.numel() for like in likes)
        flat = self._buffers.get((device, dtype))
        if flat is None or flat.numel() < total:
            self._buffers.pop((device, dtype), None)  # first, so that both do not exist at once
            flat = torch.empty(total, dtype=dtype, device=device, pin_memory=self._pinned)
            self._buffers[device, dtype] = flat
        taken, start = [], 0
        for like in likes:
            taken.append(flat.as_strided(like.size(), like.stride(), start))
            start += like.numel()
        return taken

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())


@dataclass
class _Slot:
    """Host buffers for one bucket in each direction."""

    gradients: Arena
    weights: Arena
    sent: Event | None = field(default=None)  # until then the device still reads ``weights``


@dataclass
class Ticket:
    """The gradients of one bucket on their way."""

    gradients: list[torch.Tensor]
    slot: _Slot | None = None
    start: Any = None
    arrived: Event | None = None


class Link:
    """The way from gradients to an update, bucket by bucket: ``fetch`` one, ``receive`` it, ``send`` its weights.

    ``fetch`` may be called once more before the ``receive`` and ``send`` of the bucket before: they then overlap. Here
    weights and states are on one device: fp32 gradients are used as they are, others are converted.
    """

    remote = False
    """Whether states live on another device than the weights, so that all weights have a master there."""

    def __init__(self) -> None:
        self._scratch = Arena()

    def home(self, local: torch.Tensor) -> torch.device:
        """Return the device of a parameter's states."""
        return local.device

    def fetch(self, gradients: list[torch.Tensor], likes: list[torch.Tensor]) -> Ticket:
        """Begin to move gradients to the home of ``likes``, the states of the bucket."""
        return Ticket(gradients)

    def receive(self, ticket: Ticket, likes: list[torch.Tensor]) -> list[torch.Tensor]:
        """Wait for the gradients and return them in fp32, laid out like ``likes``.

        They may be written to until the next ``receive``, and are the gradients themselves where type and strides fit.
        """
        return as_fp32(ticket.gradients, likes, self._scratch)

    def send(self, ticket: Ticket, weights: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
        """Begin to round masters into the weights, to nearest with ties to even; this ends the bucket."""
        if weights:
            foreach_copy_(weights, masters)

    def drop(self, ticket: Ticket) -> None:
        """Release a bucket whose ``receive`` or ``send`` failed."""

    def join(self) -> None:
        """Let the device's current stream wait for all weights sent."""

    @property
    def staging_bytes(self) -> int:
        """Return the bytes held for moving and converting, on the host and the device."""
        return self._scratch.num_bytes


class StagedLink(Link):
    """A link to states in host memory beside weights on a device.

    It has two slots of staging buffers: while the host updates one bucket, the gradients of the next arrive and the
    weights of the one before leave.

    Args:
        copies: The device's copy queues.
    """

    remote = True

    def __init__(self, copies: Copies) -> None:
        super().__init__()
        self._copies = copies
        self._slots = [_Slot(Arena(copies.pinned), Arena(copies.pinned)) for _ in range(2)]
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)

    def home(self, local: torch.Tensor) -> torch.device:
        """Return the host."""
        return torch.device("cpu")

    def fetch(self, gradients: list[torch.Tensor], likes: list[torch.Tensor]) -> Ticket:
        """Queue the copies; wait for a slot while two buckets are under way."""
        slot = self._free.get()
        start = self._copies.mark()
        host = _taken_by_type(slot.gradients, gradients, likes)
        return Ticket(host, slot, start, self._copies.to_host(host, gradients, start))

    def receive(self, ticket: Ticket, likes: list[torch.Tensor]) -> list[torch.Tensor]:
        """Wait until the copies of the bucket are complete, and return the gradients in fp32."""
        assert ticket.arrived is not None
        ticket.arrived.synchronize()
        return super().receive(ticket, likes)

    def send(self, ticket: Ticket, weights: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
        """Round the masters on the host, and queue the copies."""
        slot = ticket.slot
        assert slot is not None
        if slot.sent is not None:
            slot.sent.synchronize()
        host = _taken_by_type(slot.weights, weights, masters)
        foreach_copy_(host, masters)
        slot.sent = self._copies.to_device(weights, host, ticket.start)
        self._free.put(slot)

    def drop(self, ticket: Ticket) -> None:
        """Free the bucket's slot once its copies are done."""
        assert ticket.slot is not None
        assert ticket.arrived is not None
        ticket.arrived.synchronize()
        self._free.put(ticket.slot)

    def join(self) -> None:
        """Let the device's current stream wait for the weights."""
        self._copies.join()

    @property
    def staging_bytes(self) -> int:
        """Return the bytes of both slots and of the fp32 gradients of one bucket."""
        slots = sum(arena.num_bytes for slot in self._slots for arena in (slot.gradients, slot.weights))
        return slots + super().staging_bytes


def _taken_by_type(arena: Arena, types: list[torch.Tensor], likes: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return host tensors with the types of one list and the layouts of another, in order."""
    taken: dict[int, torch.Tensor] = {}
    for dtype in {tensor.dtype for tensor in types}:
        places = [place for place, tensor in enumerate(types) if tensor.dtype == dtype]
        host = arena.take([likes[place] for place in places], dtype, torch.device("cpu"))
        taken.update(zip(places, host, strict=True))
    return [taken[place] for place in range(len(types))]


def as_fp32(gradients: list[torch.Tensor], likes: list[torch.Tensor], scratch: Arena) -> list[torch.Tensor]:
    """Return the gradients in fp32 with the strides of ``likes``: themselves where they are so already, else copies."""
    result = list(gradients)
    places: dict[torch.device, list[int]] = {}
    for place, (gradient, like) in enumerate(zip(gradients, likes, strict=True)):
        if gradient.dtype != torch.float32 or gradient.stride() != like.stride():
            places.setdefault(gradient.device, []).append(place)
    for device, group in places.items():
        copies = scratch.take([likes[place] for place in group], torch.float32, device)
        foreach_copy_(copies, [gradients[place] for place in group])
        for place, copy in zip(group, copies, strict=True):
            result[place] = copy
    return result


# --- One step of one group of parameters


@dataclass(frozen=True)
class Flight:
    """A bucket in progress, between ``start`` and ``finish``."""

    pieces: Bucket
    exp_avgs: list[torch.Tensor]
    ticket: Ticket


@dataclass(frozen=True)
class BucketUpdate:
    """The update of parameters of one group, type and device."""

    parameters: list[torch.Tensor]
    buckets: list[Bucket]
    rule: AdamRule
    link: Link
    states: AdamStates
    delta: DeltaMoments | None
    _begun: dict[int, tuple[Shards, int]] = field(default_factory=dict)
    """Tensors and step number of each parameter, by its identity."""

    def advance(self, parameter: torch.Tensor) -> None:
        """Make a parameter's states if need be and count the step."""
        shards = self.states.ready(parameter)
        step = int(shards.step) + 1
        shards.step.fill_(step)
        self._begun[id(parameter)] = shards, step

    def run(self, scale: float) -> None:
        """Update all buckets, with the gradients of the next one under way while one is computed."""
        # Parameters with empty shards are in no bucket, but their step counts are those of all ranks.
        for parameter in self.parameters:
            self.advance(parameter)
        before: Flight | None = None
        for bucket in self.buckets:
            flight = self.start(bucket)
            if before is not None:
                self.finish(before, scale)
            before = flight
        if before is not None:
            self.finish(before, scale)
        self.link.join()

    def start(self, bucket: Bucket) -> Flight:
        """Begin to move the gradients of a bucket."""
        exp_avgs = [piece.of(self._begun[id(piece.parameter)][0].exp_avg) for piece in bucket]
        return Flight(bucket, exp_avgs, self.link.fetch([_gradient(piece) for piece in bucket], exp_avgs))

    def finish(self, flight: Flight, scale: float) -> None:
        """Wait for the gradients of a bucket, compute its update, and send the weights back."""
        pieces, exp_avgs = flight.pieces, flight.exp_avgs
        shards = [self._begun[id(piece.parameter)][0] for piece in pieces]
        gradients = self.link.receive(flight.ticket, exp_avgs)
        exp_avg_sqs = [piece.of(shard.exp_avg_sq) for piece, shard in zip(pieces, shards, strict=True)]
        computed, weights, masters = [], [], []
        for piece, shard in zip(pieces, shards, strict=True):
            if shard.master is None:
                computed.append(piece.of(shard.weight))
            else:
                weights.append(piece.of(shard.weight))
                masters.append(piece.of(shard.master))
                computed.append(masters[-1])
        self._compute(pieces, (computed, gradients, exp_avgs, exp_avg_sqs), scale)
        self.link.send(flight.ticket, weights, masters)

    def _compute(self, pieces: Bucket, tensors: tuple[list[torch.Tensor], ...], scale: float) -> None:
        for step, places in self._by_step(pieces).items():
            chosen, gradients, exp_avgs, exp_avg_sqs = (
                column if len(places) == len(pieces) else [column[place] for place in places] for column in tensors
            )
            before = [weight.clone() for weight in chosen] if self.delta is not None else []
            self.rule.update(chosen, gradients, exp_avgs, exp_avg_sqs, step, scale)
            if self.delta is not None:
                for place, old, mean, square in zip(places, before, exp_avgs, exp_avg_sqs, strict=True):
                    self.delta.add(pieces[place].parameter, self.rule.delta(old, mean, square, step))

    def _by_step(self, pieces: Bucket) -> dict[int, list[int]]:
        """Group places in the bucket by step count: parameters that were frozen for a while lag behind the others."""
        places: dict[int, list[int]] = {}
        for place, piece in enumerate(pieces):
            places.setdefault(self._begun[id(piece.parameter)][1], []).append(place)
        return places


def _gradient(piece: Piece) -> torch.Tensor:
    assert piece.parameter.grad is not None
    gradient = local_tensor(piece.parameter.grad)
    # A range can only be cut out of contiguous memory.
    return gradient if piece.whole else piece.of(gradient.contiguous())
