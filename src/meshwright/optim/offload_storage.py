"""Storage of offloaded tensors: page-locked host memory with asynchronous copies, and memory-mapped files on disk."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from meshwright.errors import ConfigError
from meshwright.optim.dtensors import is_dense
from meshwright.runtime import rank
from meshwright.runtime.torch_internals.optim import foreach_copy_


class CudaCopies:
    """Copies on one CUDA stream per direction, as the hardware has one copy engine per direction.

    The allocator reuses the memory of a tensor recorded on a stream only when the host sees that its copies are over,
    and the host may be a whole forward ahead of the device. Callers that need the memory back sooner pass ``held`` and
    keep the device tensors until the stream these belong to waits for the event.

    Any thread may queue copies: each call sets the device, as a new thread would otherwise set up a context on the
    first one.

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
        """Return an event on the current stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def to_host(
        self, host: list[torch.Tensor], device: list[torch.Tensor], after: torch.cuda.Event, *, held: bool = False
    ) -> torch.cuda.Event:
        """Copy asynchronously; the device tensors may be freed by their owner at once, unless they are ``held``."""
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
        """Copy asynchronously; the host tensors must stay until the event has passed."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._to_device):
            self._to_device.wait_event(after)
            for target, source in zip(device, host, strict=True):
                target.copy_(source, non_blocking=True)
                if not held:
                    target.record_stream(self._to_device)
        return self._to_device.record_event()

    def join(self) -> None:
        """Let the current stream wait for the stream to the device; the host has waited for all gradients."""
        torch.cuda.current_stream(self._device).wait_stream(self._to_device)


class Event(Protocol):
    """A point in a queue of copies."""

    def synchronize(self) -> None:
        """Let the host wait for everything queued before this point."""

    def wait(self) -> None:
        """Let the device's current stream wait for everything queued before this point."""


class Copies(Protocol):
    """Copies between a device and the host that run beside everything else.

    ``held``: the caller keeps the device tensors until the stream they belong to waits for the event.
    """

    pinned: bool
    """Whether host buffers must be page-locked."""
    queued: bool
    """Whether a copy may still be under way when the call returns."""

    def mark(self) -> Any:
        """Return the point the device's current stream has reached."""

    def to_host(self, host: list[torch.Tensor], device: list[torch.Tensor], after: Any, *, held: bool = False) -> Event:
        """Queue copies of device tensors that are complete at ``after``; their owner may free them."""

    def to_device(
        self, device: list[torch.Tensor], host: list[torch.Tensor], after: Any, *, held: bool = False
    ) -> Event:
        """Queue copies into device tensors that nobody uses from ``after`` on."""

    def join(self) -> None:
        """Let the device's current stream wait for all copies to the device."""


class _Done:
    """A copy that is complete."""

    def synchronize(self) -> None:
        """Return at once."""

    def wait(self) -> None:
        """Return at once."""


class DirectCopies:
    """Copies within host memory: the same path, without queues."""

    pinned = False
    queued = False

    def mark(self) -> None:
        """Return nothing, as there are no streams."""

    def to_host(self, host: list[torch.Tensor], device: list[torch.Tensor], after: Any, *, held: bool = False) -> Event:
        """Copy at once."""
        foreach_copy_(host, device)
        return _Done()

    def to_device(
        self, device: list[torch.Tensor], host: list[torch.Tensor], after: Any, *, held: bool = False
    ) -> Event:
        """Copy at once."""
        foreach_copy_(device, host)
        return _Done()

    def join(self) -> None:
        """Return at once."""


def copies_for(device: torch.device) -> Copies:
    """Make the copies between the host and a device."""
    return CudaCopies(device) if device.type == "cuda" else DirectCopies()


# --- Tensors in host memory that stay, and are copied from and to a device

_ALIGNMENT = 64  # bytes, for vector kernels
_LARGEST_BLOCK = 2**30  # bytes that may be taken ahead of need


class HostRoom:
    """Host memory for many tensors that live as long as the run.

    torch rounds every page-locked block up to a power of two, which would be up to twice the memory for a tensor of its
    own. Blocks here have such sizes, grow with what they hold already, and are shared by tensors.

    Args:
        pin: Whether it is page-locked; tensors have memory of their own otherwise.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._blocks: list[tuple[torch.Tensor, int]] = []  # with the bytes that are taken
        self._num_bytes = 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised tensor with the size, type and strides of ``like``."""
        if not self._pin or like.numel() == 0:
            return torch.empty_like(like, device="cpu")
        needed = -(-like.nbytes // _ALIGNMENT) * _ALIGNMENT
        place = next((at for at, (block, taken) in enumerate(self._blocks) if block.numel() - taken >= needed), None)
        if place is None:
            size = 1 << (max(needed, min(self._num_bytes, _LARGEST_BLOCK)) - 1).bit_length()
            self._blocks.append((torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True), 0))
            self._num_bytes += size
            place = len(self._blocks) - 1
        block, start = self._blocks[place]
        self._blocks[place] = block, start + needed
        flat = block[start : start + like.nbytes].view(like.dtype)
        return flat.as_strided(like.size(), like.stride()) if is_dense(like) else flat.view(like.shape)


class DeviceRoom:
    """Memory on a device for tensors that come from the host and go back, cut anew for each set of them.

    Args:
        copies: Copies between host and device.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._flat: torch.Tensor | None = None
        self.arrived: Event | None = None
        """The last copies into it."""
        self.left: Event | None = None
        """The last copies out of it, after which others may come; None where something else may still use it."""

    def take(self, likes: Sequence[torch.Tensor], device: torch.device) -> tuple[list[torch.Tensor], Any]:
        """Return uninitialised tensors like dense ones, and the point after which they may be written to."""
        starts, end = _aligned(likes)
        after, self.left = self.left, None
        if self._flat is None or self._flat.numel() < end:
            # The old memory may be handed out for other work of the current stream as soon as it is let go.
            for event in (self.arrived, after):
                if event is not None:
                    event.wait()
            self._flat = after = None
            self._flat = torch.empty(end, dtype=torch.uint8, device=device)
        flat = self._flat
        taken = [
            flat[start : start + like.nbytes].view(like.dtype).as_strided(like.size(), like.stride())
            for start, like in zip(starts, likes, strict=True)
        ]
        return taken, self._copies.mark() if after is None else after

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are held."""
        return 0 if self._flat is None else self._flat.numel()


def _aligned(likes: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return where tensors begin that lie one behind the other, and where the last one ends."""
    starts, end = [], 0
    for like in likes:
        starts.append(end)
        end += -(-like.nbytes // _ALIGNMENT) * _ALIGNMENT
    return starts, end


# --- Tensors in memory-mapped files: the operating system moves pages, and we advise it which come next

_CHUNK = 2**24  # bytes written at a time where a file system cannot reserve


class DiskFile:
    """A file of fixed size whose bytes are tensors.

    Its blocks are reserved at once, so that a full disk is an error then and not a fault in the middle of an update.
    Without ``keep`` the file is unlinked at once, too: the system frees it when the process ends, however it ends. No
    process ever reads a file that it did not make.

    Raises:
        ConfigError: When the folder cannot be written to or the disk is full.
    """

    def __init__(self, folder: Path, num_bytes: int, *, keep: bool) -> None:
        try:
            self._descriptor, path = tempfile.mkstemp(".bin", f"rank{rank()}-", folder)
        except OSError as error:
            raise _unusable(folder, num_bytes, error) from error
        weakref.finalize(self, os.close, self._descriptor)
        try:
            _reserve(self._descriptor, num_bytes)
            self._map = mmap.mmap(self._descriptor, num_bytes)
        except (OSError, OverflowError) as error:
            os.unlink(path)
            raise _unusable(folder, num_bytes, error) from error
        if not keep:
            os.unlink(path)

    @classmethod
    def like(
        cls, folder: Path, likes: Sequence[torch.Tensor], *, keep: bool
    ) -> tuple[DiskFile | None, list[torch.Tensor]]:
        """Make a file and one tensor of zeros in it for each of ``likes``; no file where all of them are empty."""
        starts, end = _aligned(likes)
        file = cls(folder, end, keep=keep) if end else None
        return file, [
            torch.empty_like(like, device="cpu") if file is None else file._tensor(start, like)
            for start, like in zip(starts, likes, strict=True)
        ]

    def _tensor(self, start: int, like: torch.Tensor) -> torch.Tensor:
        if like.numel() == 0:
            return torch.empty_like(like, device="cpu")
        flat = torch.frombuffer(self._map, dtype=like.dtype, count=like.numel(), offset=start)
        return flat.as_strided(like.size(), like.stride()) if is_dense(like) else flat.view(like.shape)

    def read_ahead(self) -> None:
        """Ask for all pages without waiting for them."""
        _advise(self._descriptor, "POSIX_FADV_WILLNEED")

    def write_behind(self) -> None:
        """Write all changes and release the memory; later reads come from the file."""
        os.fdatasync(self._descriptor)
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)  # safe on a shared map, whose pages are the file's
        _advise(self._descriptor, "POSIX_FADV_DONTNEED")


def _reserve(descriptor: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
        return
    for start in range(0, num_bytes, _CHUNK):
        os.pwrite(descriptor, bytes(min(_CHUNK, num_bytes - start)), start)


def _advise(descriptor: int, name: str) -> None:
    if hasattr(os, name):  # not on macOS, and nothing depends on it
        os.posix_fadvise(descriptor, 0, 0, getattr(os, name))


def _unusable(folder: Path, num_bytes: int, error: BaseException) -> ConfigError:
    return ConfigError(
        "The folder for offloaded optimizer states cannot hold them",
        expected=f"a writable folder with {num_bytes} bytes free for this rank's next file",
        got=f"{error} in {folder}",
        fix="give a folder on another disk, make room, or lower the fraction optimizer of offload",
    )


class Disk:
    """A folder for one process's files, and a thread that reads ahead and writes behind.

    Args:
        folder: Made if it does not exist; should be local to each node and fast.
        keep: Whether files stay when the process ends, for inspection.

    Raises:
        ConfigError: When the folder cannot be written to.
    """

    def __init__(self, folder: Path, *, keep: bool = False) -> None:
        self._folder, self._keep = folder, keep
        self._thread = ThreadPoolExecutor(1, "meshwright-disk")
        weakref.finalize(self, self._thread.shutdown, wait=False)
        self._writing: dict[DiskFile, Future[None]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(folder, 0, error) from error
        self.make([torch.empty(1)])  # an error should come now rather than in the first step

    def make(self, likes: Sequence[torch.Tensor]) -> tuple[DiskFile | None, list[torch.Tensor]]:
        """Make a file with one tensor for each of ``likes``; see :meth:`DiskFile.like`."""
        return DiskFile.like(self._folder, likes, keep=self._keep)

    def read_ahead(self, files: Sequence[DiskFile]) -> None:
        """Begin to read the files of the next update."""
        for file in files:
            self._thread.submit(file.read_ahead)

    def write_behind(self, files: Sequence[DiskFile]) -> None:
        """Begin to write the files of an update.

        Raises:
            OSError: When an earlier write of one of these files failed.
        """
        for file in files:
            if (before := self._writing.get(file)) is not None:
                before.result()
            self._writing[file] = self._thread.submit(file.write_behind)

    def settle(self) -> None:
        """Wait for all writes.

        Raises:
            OSError: When a write failed.
        """
        for future in self._writing.values():
            future.result()
