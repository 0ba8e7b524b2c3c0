"""How gradients reach the place where the update is computed, and how new weights get back."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a queue of copies."""

    def synchronize(self) -> None:
        """Lets the host wait for everything queued before this point."""


class Copies(Protocol):
    """Copies between a device and the host that run beside everything else."""

    pinned: bool
    """Whether host buffers must be page-locked."""

    def mark(self) -> Any:
        """The point the device's current stream has reached."""

    def to_host(self, host: list[torch.Tensor], device: list[torch.Tensor], after: Any) -> Event:
        """Queues copies of device tensors that are complete at ``after``."""

    def to_device(self, device: list[torch.Tensor], host: list[torch.Tensor], after: Any) -> Event:
        """Queues copies into device tensors that nobody uses from ``after`` on."""

    def join(self) -> None:
        """Lets the device's current stream wait for all copies queued; the host does not wait."""


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
        """Bytes that are held."""
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
        """Where the states of a parameter live."""

    def fetch(self, gradients: list[torch.Tensor], likes: list[torch.Tensor]) -> Ticket:
        """Begins to move gradients to the home of ``likes``, the states of the bucket."""

    def receive(self, ticket: Ticket, likes: list[torch.Tensor]) -> list[torch.Tensor]:
        """Waits for them; fp32 tensors laid out like ``likes``, free to be written to until the next ``receive``."""

    def send(self, ticket: Ticket, weights: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
        """Begins to round masters into the weights; the bucket ends here."""

    def drop(self, ticket: Ticket) -> None:
        """Gives a bucket up whose ``receive`` or ``send`` failed."""

    def join(self) -> None:
        """Lets the device wait for all weights sent."""

    @property
    def staging_bytes(self) -> int:
        """Bytes of host and device memory held for moving and converting."""


class DirectLink:
    """Weights and states on one device: fp32 gradients are taken as they are, others are converted."""

    remote = False

    def __init__(self) -> None:
        self._scratch = Arena()

    def home(self, local: torch.Tensor) -> torch.device:
        """The parameter's own device."""
        return local.device

    def fetch(self, gradients: list[torch.Tensor], likes: list[torch.Tensor]) -> Ticket:
        """Nothing moves."""
        return Ticket(gradients)

    def receive(self, ticket: Ticket, likes: list[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients themselves where type and strides fit, fp32 copies of the others."""
        return as_fp32(ticket.gradients, likes, self._scratch)

    def send(self, ticket: Ticket, weights: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
        """Rounds to nearest, ties to even, as ``copy_`` does."""
        if weights:
            torch._foreach_copy_(weights, masters)

    def drop(self, ticket: Ticket) -> None:
        """Nothing is held for it."""

    def join(self) -> None:
        """Nothing is under way."""

    @property
    def staging_bytes(self) -> int:
        """Bytes of the fp32 gradients of one bucket."""
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
        """The host."""
        return torch.device("cpu")

    def fetch(self, gradients: list[torch.Tensor], likes: list[torch.Tensor]) -> Ticket:
        """Queues the copies; waits for a slot while two buckets are under way."""
        slot = self._free.get()
        start = self._copies.mark()
        host = _taken_by_type(slot.gradients, gradients, likes)
        return Ticket(host, slot, start, self._copies.to_host(host, gradients, start))

    def receive(self, ticket: Ticket, likes: list[torch.Tensor]) -> list[torch.Tensor]:
        """Waits until the copies of the bucket are complete."""
        assert ticket.arrived is not None
        ticket.arrived.synchronize()
        return as_fp32(ticket.gradients, likes, self._scratch)

    def send(self, ticket: Ticket, weights: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
        """Rounds to nearest, ties to even, on the host, and queues the copies."""
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
        """Lets the device's current stream wait for the weights."""
        self._copies.join()

    @property
    def staging_bytes(self) -> int:
        """Bytes of both slots and of the fp32 gradients of one bucket."""
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
    """The gradients in fp32 with the strides of ``likes``: themselves where they are so already, else copies."""
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
