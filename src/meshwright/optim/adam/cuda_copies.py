"""Copies between CUDA memory and pinned host memory on streams of their own: the only part that needs the device."""

from __future__ import annotations

import torch


class CudaCopies:
    """One stream per direction, as the hardware has one copy engine per direction.

    What a stream has recorded is used again only when the host sees that its copies are over, and the host may be a
    whole forward ahead of the device. Whoever must have the memory back sooner passes ``held``: he keeps the device
    tensors until their own stream waits for the event.

    Any thread may queue copies. A new one begins on the first device: it would set up a context there for nothing.

    Args:
        device: The CUDA device.
    """

    pinned = True
    queued = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host = torch.cuda.Stream(device)
        self._to_device = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """An event on the current stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def to_host(
        self, host: list[torch.Tensor], device: list[torch.Tensor], after: torch.cuda.Event, *, held: bool = False
    ) -> torch.cuda.Event:
        """Copies asynchronously; the device tensors may be freed by their owner at once, unless they are ``held``."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._to_host):
            self._to_host.wait_event(after)
            for target, source in zip(host, device, strict=True):
                target.copy_(source, non_blocking=True)
                if not held:
                    source.record_stream(self._to_host)
        return self._to_host.record_event()

    def to_device(
        self, device: list[torch.Tensor], host: list[torch.Tensor], after: torch.cuda.Event, *, held: bool = False
    ) -> torch.cuda.Event:
        """Copies asynchronously; the host tensors must stay until the event has passed."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._to_device):
            self._to_device.wait_event(after)
            for target, source in zip(device, host, strict=True):
                target.copy_(source, non_blocking=True)
                if not held:
                    target.record_stream(self._to_device)
        return self._to_device.record_event()

    def join(self) -> None:
        """The current stream waits for the stream to the device; gradients have been waited for by the host."""
        torch.cuda.current_stream(self._device).wait_stream(self._to_device)
