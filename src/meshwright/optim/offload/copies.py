"""Copies between a device and the host: on streams of their own on CUDA, at once where the device is the host."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from meshwright.optim.adam.cuda_copies import CudaCopies


class Event(Protocol):
    """A point in a queue of copies."""

    def synchronize(self) -> None:
        """Lets the host wait for everything queued before this point."""

    def wait(self) -> None:
        """Lets the device's current stream wait for it."""


class Copies(Protocol):
    """Queues of copies that run beside everything else.

    ``held``: the caller keeps the device tensors until the stream they belong to waits for the event.
    """

    queued: bool
    """Whether a copy may still be under way when the call returns."""

    def mark(self) -> Any:
        """The point the device's current stream has reached."""

    def to_host(self, host: list[torch.Tensor], device: list[torch.Tensor], after: Any, *, held: bool = False) -> Event:
        """Queues copies of device tensors that are complete at ``after``; their owner may free them."""

    def to_device(
        self, device: list[torch.Tensor], host: list[torch.Tensor], after: Any, *, held: bool = False
    ) -> Event:
        """Queues copies into device tensors that nobody uses from ``after`` on."""

    def join(self) -> None:
        """Lets the device's current stream wait for all copies to the device."""


class _Done:
    """A copy that is complete."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait(self) -> None:
        """Nothing to wait for."""


class DirectCopies:
    """Within host memory: the same path, without queues."""

    queued = False

    def mark(self) -> None:
        """There are no streams."""

    def to_host(
        self, host: list[torch.Tensor], device: list[torch.Tensor], after: None, *, held: bool = False
    ) -> Event:
        """Copies."""
        torch._foreach_copy_(host, device)
        return _Done()

    def to_device(
        self, device: list[torch.Tensor], host: list[torch.Tensor], after: None, *, held: bool = False
    ) -> Event:
        """Copies."""
        torch._foreach_copy_(device, host)
        return _Done()

    def join(self) -> None:
        """Nothing is under way."""


def copies_for(device: torch.device) -> Copies:
    """The copies between the host and a device."""
    return CudaCopies(device) if device.type == "cuda" else DirectCopies()
