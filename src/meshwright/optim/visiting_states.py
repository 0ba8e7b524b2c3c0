"""Update parameters on the device while their optimizer states, which live in host memory, visit it.

[Note: visiting states] A bucket is updated where it lives, on the host, or its states visit the device: they are copied
there on one stream, updated beside gradients that never left, and copied back on another, with a few buckets under way
at once. Between steps nothing tells the two apart: copies of parameters and states are in host memory, and the step
ends when they are complete there.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from meshwright.optim.adam.bucket_update import Piece, cut
from meshwright.optim.dtensors import local_tensor, wrapped_like
from meshwright.optim.offload_storage import Copies, DeviceRoom, Event, HostRoom
from meshwright.optim.sharded.sharded_optimizer import local_gradient
from meshwright.runtime.torch_internals.optim import foreach_copy_

BUCKETS_UNDER_WAY = 3
"""Buckets on the device at once: one arrives, one is updated, one leaves."""
VISITING_BUCKET_BYTES = 2**26
"""Most bytes of fp32 parameters in one of these buckets: links reach their rate with less."""


@dataclass(eq=False)
class _Visitor:
    """A piece of a parameter with what the host has of it, and what has come to the device."""

    piece: Piece
    copy: torch.Tensor
    weight: torch.Tensor | None  # updated in place: the parameter's own memory; None: its fp32 copy comes
    host: dict[str, torch.Tensor]
    here: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def updated(self) -> torch.Tensor:
        """Return the tensor on the device that the optimizer updates."""
        return self.here[_WEIGHT] if self.weight is None else self.weight

    @property
    def ends(self) -> bool:
        """Return whether no piece of the parameter follows."""
        return self.piece.stop == local_tensor(self.copy).numel()


class _Flight(NamedTuple):
    """A bucket on its way to the device."""

    visitors: list[_Visitor]
    room: DeviceRoom
    arrived: Event | None


_WEIGHT = "weight, no state"


class Visits:
    """Updates on the device of parameters whose copies and states live in host memory.

    Parameters are cut into pieces, so that a large one takes no more of the device than others. Where a copy has its
    parameter's type, the parameter is updated itself, and only states come.

    Args:
        inner: The optimizer over the copies.
        copy_of: The copy on the host of each of the model's parameters that is updated so.
        copies: Copies between host and device.
        room: Host memory for states.
        bucket_bytes: Most bytes of fp32 parameters in a bucket.
    """

    def __init__(
        self,
        inner: Optimizer,
        copy_of: Mapping[torch.Tensor, torch.Tensor],
        copies: Copies,
        room: HostRoom,
        bucket_bytes: int,
    ) -> None:
        self.parameters = {copy: parameter for parameter, copy in copy_of.items()}
        """The model's parameter of each copy."""
        self._inner, self._copy_of, self._copies, self._host_room = inner, copy_of, copies, room
        sizes = [local_tensor(parameter).numel() for parameter in copy_of]
        elements = min(bucket_bytes, VISITING_BUCKET_BYTES) // 4
        self._buckets = cut(copy_of, max(1, min(elements, -(-sum(sizes) // BUCKETS_UNDER_WAY))))
        # A rank without a part of a parameter counts its steps, as others do.
        empty = [Piece(parameter, 0, 0, whole=True) for parameter, size in zip(copy_of, sizes, strict=True) if not size]
        self._buckets += [empty] if empty else []
        self._rooms = [DeviceRoom(copies) for _ in range(BUCKETS_UNDER_WAY)]
        self._waiting: deque[list[Piece]] = deque()
        self._flights: deque[_Flight] = deque()
        self._stored: dict[tuple[torch.Tensor, str], torch.Tensor] = {}  # states in their room on the host
        self._begun: set[tuple[torch.Tensor, str]] = set()  # those that are made in this step, piece by piece
        self._last: Event | None = None

    @property
    def device_bytes(self) -> int:
        """Return the bytes that this rank holds on the device for what visits it."""
        return sum(room.num_bytes for room in self._rooms)

    def begin(self) -> None:
        """Begin to copy the first buckets with gradients to the device, beside what it still computes."""
        found = ([piece for piece in bucket if piece.parameter.grad is not None] for bucket in self._buckets)
        self._waiting = deque(filter(None, found))
        self._flights.clear()  # of a step that was skipped
        self._begun.clear()
        for _ in self._rooms:
            self._fetch()

    @torch.no_grad()
    def step(self) -> None:
        """Update all buckets that were begun, and wait until copies and states are complete on the host."""
        groups = self._inner.param_groups
        listed = [group["params"] for group in groups]
        group_of = {copy: place for place, params in enumerate(listed) for copy in params}
        try:
            while self._flights:
                flight = self._flights.popleft()
                chosen: list[list[torch.Tensor]] = [[] for _ in groups]
                if flight.arrived is not None:
                    flight.arrived.wait()
                for visitor in flight.visitors:
                    chosen[group_of[visitor.copy]].append(visitor.updated)
                for group, params in zip(groups, chosen, strict=True):
                    group["params"] = params
                self._send(flight, self._updated(flight.visitors, [groups[group_of[v.copy]] for v in flight.visitors]))
                self._fetch()
        finally:
            for group, params in zip(groups, listed, strict=True):
                group["params"] = params
            if self._last is not None:
                self._last.synchronize()

    def _fetch(self) -> None:
        """Begin to copy the next bucket to the device."""
        if not self._waiting:
            return
        visitors = [self._visitor(piece) for piece in self._waiting.popleft()]
        host = [part for visitor in visitors for part in visitor.host.values()]
        room = self._rooms[0]
        self._rooms.append(self._rooms.pop(0))
        arrived = None
        if host:
            here, after = room.take(host, local_tensor(visitors[0].piece.parameter).device)
            arrived = room.arrived = self._copies.to_device(here, host, after, held=True)
            parts = iter(here)
            for visitor in visitors:
                visitor.here = {key: next(parts) for key in visitor.host}
        self._flights.append(_Flight(visitors, room, arrived))

    def _visitor(self, piece: Piece) -> _Visitor:
        copy = self._copy_of[piece.parameter]
        own, other = local_tensor(piece.parameter.detach()), local_tensor(copy.detach())
        is_alike = own.dtype == other.dtype and own.stride() == other.stride()
        host = {} if is_alike else {_WEIGHT: piece.of(other)}
        for key, value in list(self._inner.state.get(copy, {}).items()):
            if _travels(key, value, copy) and (copy, key) not in self._begun:
                host[key] = piece.of(self._kept(copy, key, value))
        return _Visitor(piece, copy, piece.of(own).detach() if is_alike else None, host)

    def _kept(self, copy: torch.Tensor, key: str, value: torch.Tensor) -> torch.Tensor:
        """Return a state on the host; one that was loaded moves into the room for states."""
        if self._stored.get((copy, key)) is not value:
            self._make(copy, key, value.dtype).copy_(local_tensor(value))
        return local_tensor(self._stored[copy, key])

    def _make(self, copy: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return room for a state on the host, after it was made the optimizer's."""
        before = self._stored.get((copy, key))
        if before is None or before.dtype != dtype:
            like = torch.empty_like(local_tensor(copy), dtype=dtype, device="meta")
            before = self._stored[copy, key] = wrapped_like(copy, self._host_room.take(like))
        self._inner.state[copy][key] = before
        return local_tensor(before)

    def _updated(self, visitors: list[_Visitor], groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Step the optimizer over what has arrived; return the states of each visitor."""
        state = self._inner.state
        weights = [visitor.updated for visitor in visitors]
        try:
            with fused_kernels(self._inner):
                for visitor, weight, group in zip(visitors, weights, groups, strict=True):
                    weight.grad = _gradient(visitor.piece)
                    counters = self._counters(visitor, on_device=bool(group.get("fused") or group.get("capturable")))
                    state[weight] = {**counters, **{k: each for k, each in visitor.here.items() if k != _WEIGHT}}
                self._inner.step()
        finally:
            found = [state.pop(weight, {}) for weight in weights]
        rounded = [(v.piece, weight) for v, weight in zip(visitors, weights, strict=True) if v.weight is None]
        if rounded:
            targets = [piece.of(local_tensor(piece.parameter.detach())) for piece, _ in rounded]
            foreach_copy_(targets, [weight for _, weight in rounded])
        return found

    def _counters(self, visitor: _Visitor, *, on_device: bool) -> dict[str, Any]:
        """Return the states that stay where they are; a later piece of the parameter finds them as they were."""
        found: dict[str, Any] = {}
        for key, value in self._inner.state.get(visitor.copy, {}).items():
            if _travels(key, value, visitor.copy):
                continue
            if isinstance(value, torch.Tensor) and key == "step" and on_device:  # loaded ones are on the host
                value = value.to(visitor.updated.device)
            found[key] = value if visitor.piece.whole or not isinstance(value, torch.Tensor) else value.clone()
        return found

    def _send(self, flight: _Flight, states: list[dict[str, Any]]) -> None:
        """Begin to copy weights and states to the host, those that this step has made included."""
        host, held, fresh_host, fresh = [], [], [], []
        for visitor, state in zip(flight.visitors, states, strict=True):
            piece, copy = visitor.piece, visitor.copy
            host.append(piece.of(local_tensor(copy.detach())))
            held.append(visitor.updated.detach())
            for key, value in state.items():
                if not _travels(key, value, copy):
                    continue
                if key in visitor.here and value is visitor.here[key]:
                    host.append(visitor.host[key])
                    held.append(value)
                else:
                    fresh_host.append(piece.of(self._begin(visitor, key, value)))
                    fresh.append(value)
            if visitor.ends:
                kept = {key: value for key, value in state.items() if not _travels(key, value, copy)}
                self._inner.state[copy].update(kept)
        after = self._copies.mark()
        self._last = flight.room.left = self._copies.to_host(host, held, after, held=True)
        if fresh:
            self._last = flight.room.left = self._copies.to_host(fresh_host, fresh, after)

    def _begin(self, visitor: _Visitor, key: str, value: torch.Tensor) -> torch.Tensor:
        """Return room for a state that a step has made."""
        if (visitor.copy, key) in self._begun:
            return local_tensor(self._stored[visitor.copy, key])
        self._begun.add((visitor.copy, key))
        made = self._make(visitor.copy, key, value.dtype)
        return made if visitor.piece.whole else made.zero_()  # a step that fails leaves other pieces out


def _travels(key: str, value: Any, copy: torch.Tensor) -> bool:
    """Return whether a state is copied; counters are not, which the host may have to read."""
    return isinstance(value, torch.Tensor) and (value.dim() > 0 or (copy.dim() == 0 and key != "step"))


def _gradient(piece: Piece) -> torch.Tensor:
    gradient = local_gradient(piece.parameter)
    assert gradient is not None
    return gradient if piece.whole else piece.of(gradient.contiguous())


# --- Kernels


@contextlib.contextmanager
def fused_kernels(optimizer: Optimizer) -> Iterator[None]:
    """Let groups that do not choose use torch's fused CPU kernels, several times faster than its loop."""
    chosen = [group for group in optimizer.param_groups if _can_fuse(optimizer, group)]
    before = [group["fused"] for group in chosen]
    for group in chosen:
        group["fused"] = True
    try:
        yield
    finally:
        for group, fused in zip(chosen, before, strict=True):
            group["fused"] = fused


def _can_fuse(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    # Not for half-precision states; and torch's fused SGD has no rule for DTensors.
    has_shards = any(isinstance(parameter, DTensor) for parameter in group["params"])
    kinds = (Adam, AdamW) if has_shards else (Adam, AdamW, SGD)
    undecided = group.get("fused") is None and group.get("foreach") is None and "fused" in group
    plain = not group.get("differentiable") and not group.get("capturable")
    wide = all(parameter.dtype in (torch.float32, torch.float64) for parameter in group["params"])
    return type(optimizer) in kinds and undecided and plain and wide
