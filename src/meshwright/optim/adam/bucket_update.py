"""Update Adam bucket by bucket: cut parameters, move gradients and weights, apply the rule."""

from __future__ import annotations

import queue
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from meshwright.optim.adam.adam_rule import AdamRule, AdamStates, Shards
from meshwright.optim.dtensors import local_tensor, num_replicas, placement_of, reduced

# Kernels work on vectors of a few elements: cutting at multiples of this leaves every element in the lane it had.
_ALIGNMENT = 1024


class Piece(NamedTuple):
    """A range of the elements of one parameter's local shard."""

    parameter: torch.Tensor
    """As the optimizer knows it: plain or DTensor."""
    start: int
    stop: int
    whole: bool
    """Whether it is the whole shard."""

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the piece's part of a tensor that is laid out like the shard; in the tensor's own shape when whole."""
        return local if self.whole else local.view(-1)[self.start : self.stop]


Bucket = list[Piece]


def cut(parameters: Iterable[torch.Tensor], max_elements: int | None) -> list[Bucket]:
    """Cut the local shards of parameters, in their order, into buckets.

    Args:
        parameters: Plain tensors and DTensors; empty shards are left out.
        max_elements: Most elements of a bucket, rounded up to a multiple of 1024; None for one bucket of everything.
            A shard that is not contiguous stays whole, however large it is.
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


# --- Mean and variance of the update's direction over all parameters of all ranks.


class DeltaMoments:
    """Sums of values and of their squares in fp64; a shard that several ranks hold counts once."""

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
        """Sum over ranks: one all-reduce of three numbers, on every rank, whatever it holds itself."""
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


# --- How gradients reach the place where the update is computed, and how new weights get back.


class Event(Protocol):
    """A point in a queue of copies."""

    def synchronize(self) -> None:
        """Let the host wait for everything queued before this point."""


class Copies(Protocol):
    """Copies between a device and the host that run beside everything else."""

    pinned: bool
    """Whether host buffers must be page-locked."""

    def mark(self) -> Any:
        """Return the point the device's current stream has reached."""

    def to_host(self, host: list[torch.Tensor], device: list[torch.Tensor], after: Any) -> Event:
        """Queue copies of device tensors that are complete at ``after``."""

    def to_device(self, device: list[torch.Tensor], host: list[torch.Tensor], after: Any) -> Event:
        """Queue copies into device tensors that nobody uses from ``after`` on."""

    def join(self) -> None:
        """Let the device's current stream wait for all copies queued; the host does not wait."""


class Arena:
    """One buffer per type, cut anew into tensors for every bucket."""

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._buffers: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def take(self, likes: list[torch.Tensor], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        """Uninitialised tensors with the sizes and strides of dense ``likes``; they overwrite those taken before."""
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
        """Return the bytes that are held."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())


@dataclass
class Ticket:
    """The gradients of one bucket on their way."""

    gradients: list[torch.Tensor]
    slot: _Slot | None = None
    start: Any = None
    arrived: Event | None = None


class Link(Protocol):
    """The way from gradients to an update, bucket by bucket: ``fetch`` one, ``receive`` it, ``send`` its weights.

    ``fetch`` may be called once more before the ``receive`` and ``send`` of the bucket before: they then overlap.
    """

    remote: bool
    """Whether states live on another device than the weights: then all weights have a master there."""

    def home(self, local: torch.Tensor) -> torch.device:
        """Return where the states of a parameter live."""

    def fetch(self, gradients: list[torch.Tensor], likes: list[torch.Tensor]) -> Ticket:
        """Begin to move gradients to the home of ``likes``, the states of the bucket."""

    def receive(self, ticket: Ticket, likes: list[torch.Tensor]) -> list[torch.Tensor]:
        """Wait for them; fp32 tensors laid out like ``likes``, free to be written to until the next ``receive``."""

    def send(self, ticket: Ticket, weights: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
        """Begin to round masters into the weights; the bucket ends here."""

    def drop(self, ticket: Ticket) -> None:
        """Give a bucket up whose ``receive`` or ``send`` failed."""

    def join(self) -> None:
        """Let the device wait for all weights sent."""

    @property
    def staging_bytes(self) -> int:
        """Return the bytes of host and device memory held for moving and converting."""


class DirectLink:
    """Weights and states on one device: fp32 gradients are taken as they are, others are converted."""

    remote = False

    def __init__(self) -> None:
        self._scratch = Arena()

    def home(self, local: torch.Tensor) -> torch.device:
        """Return the parameter's own device."""
        return local.device

    def fetch(self, gradients: list[torch.Tensor], likes: list[torch.Tensor]) -> Ticket:
        """Nothing moves."""
        return Ticket(gradients)

    def receive(self, ticket: Ticket, likes: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients themselves where type and strides fit, fp32 copies of the others."""
        return as_fp32(ticket.gradients, likes, self._scratch)

    def send(self, ticket: Ticket, weights: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
        """Round to nearest, ties to even, as ``copy_`` does."""
        if weights:
            torch._foreach_copy_(weights, masters)

    def drop(self, ticket: Ticket) -> None:
        """Nothing is held for it."""

    def join(self) -> None:
        """Nothing is under way."""

    @property
    def staging_bytes(self) -> int:
        """Return the bytes of the fp32 gradients of one bucket."""
        return self._scratch.num_bytes


@dataclass
class _Slot:
    """Host buffers for one bucket in each direction."""

    gradients: Arena
    weights: Arena
    sent: Event | None = field(default=None)  # until then the device still reads ``weights``


class StagedLink:
    """States in host memory beside weights on a device.

    Two slots of staging buffers: while the host updates one bucket, the gradients of the next arrive and the weights
    of the one before leave.

    Args:
        copies: The device's copy queues.
    """

    remote = True

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._slots = [_Slot(Arena(copies.pinned), Arena(copies.pinned)) for _ in range(2)]
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)
        self._scratch = Arena()

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
        """Wait until the copies of the bucket are complete."""
        assert ticket.arrived is not None
        ticket.arrived.synchronize()
        return as_fp32(ticket.gradients, likes, self._scratch)

    def send(self, ticket: Ticket, weights: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
        """Round to nearest, ties to even, on the host, and queue the copies."""
        slot = ticket.slot
        assert slot is not None
        if slot.sent is not None:
            slot.sent.synchronize()
        host = _taken_by_type(slot.weights, weights, masters)
        torch._foreach_copy_(host, masters)
        slot.sent = self._copies.to_device(weights, host, ticket.start)
        self._free.put(slot)

    def drop(self, ticket: Ticket) -> None:
        """Its slot is free again once its copies are done."""
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
        arenas = [arena for slot in self._slots for arena in (slot.gradients, slot.weights)]
        return sum(arena.num_bytes for arena in [*arenas, self._scratch])


def _taken_by_type(arena: Arena, types: list[torch.Tensor], likes: list[torch.Tensor]) -> list[torch.Tensor]:
    """Host tensors with the types of one list and the layouts of another, in order."""
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
        torch._foreach_copy_(copies, [gradients[place] for place in group])
        for place, copy in zip(group, copies, strict=True):
            result[place] = copy
    return result


# --- One step of one group of parameters, bucket by bucket.


@dataclass(frozen=True)
class Flight:
    """A bucket whose gradients are on their way."""

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
    """By identity of the parameter: its tensors, and the number of this step."""

    def advance_all(self) -> None:
        """Begin the step of every parameter; of those with empty shards too, whose step count is everybody's."""
        for parameter in self.parameters:
            self.advance(parameter)

    def advance(self, parameter: torch.Tensor) -> None:
        """Make a parameter's states if need be and counts the step."""
        shards = self.states.ready(parameter)
        step = int(shards.step) + 1
        shards.step.fill_(step)
        self._begun[id(parameter)] = shards, step

    def run(self, scale: float) -> None:
        """Update all buckets: the gradients of the next one travel while one is computed."""
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
        """Send the gradients of a bucket on their way."""
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
        """Places in the bucket by step count: parameters that were frozen for a while are behind the others."""
        places: dict[int, list[int]] = {}
        for place, piece in enumerate(pieces):
            places.setdefault(self._begun[id(piece.parameter)][1], []).append(place)
        return places


def _gradient(piece: Piece) -> torch.Tensor:
    assert piece.parameter.grad is not None
    gradient = local_tensor(piece.parameter.grad)
    # A range can only be cut out of contiguous memory.
    return gradient if piece.whole else piece.of(gradient.contiguous())
