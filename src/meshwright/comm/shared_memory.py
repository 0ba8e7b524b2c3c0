"""Host memory that the ranks of one machine share: what one writes there need not be sent to the others."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

ALIGNMENT = 64
"""Bytes of a cache line; parts of the memory begin at a multiple of it."""

_FOLDER = Path("/dev/shm")
_NAME_BYTES = 16
_MIB = 2**20
_SHARE = 2  # of free memory at most 1 / _SHARE is taken: workers of data loaders need the folder, too


class SharedMemory:
    """Memory that every rank of a group sees and may write; zeros at first.

    Args:
        memory: The mapped file.
        num_ranks: Ranks that share it.
    """

    def __init__(self, memory: mmap.mmap, num_ranks: int) -> None:
        self._memory, self.num_ranks = memoryview(memory), num_ranks
        _held.add(self)

    def part(self, start: int, num_bytes: int) -> memoryview:
        """Return ``num_bytes`` from ``start``; a tensor made of them (``torch.frombuffer``) keeps the memory alive."""
        return self._memory[start : start + num_bytes]

    @property
    def own_bytes(self) -> int:
        """This rank's share of the memory."""
        return len(self._memory) // self.num_ranks


_held: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


def held_bytes() -> int:
    """Return this rank's share of all shared memory, which no count of tensors sees."""
    return sum(memory.own_bytes for memory in _held)


def shared_memory(group: dist.ProcessGroup, num_bytes: int) -> SharedMemory | None:
    """Allocate memory that the ranks of a group share. Collective.

    The file behind it has lost its name when this returns, so nothing is left behind when ranks die.

    Args:
        group: One that carries CPU tensors.
        num_bytes: The same on all ranks, above 0.

    Returns:
        The memory; None, on all ranks, where these are not on one host (or in containers that share no memory), or
        where it has no room, which a warning says.
    """
    name = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
    with contextlib.ExitStack() as made:
        if dist.get_rank(group) == 0:
            name = made.enter_context(_file(num_bytes))
        dist.broadcast(name, group=group, group_src=0)
        memory = _opened(bytes(name.tolist()).hex(), num_bytes) if name.any() else None
        seen = torch.tensor(memory is not None)
        dist.all_reduce(seen, op=dist.ReduceOp.MIN, group=group)
    if memory is None and dist.get_rank(group) == 0:
        # Only now that no rank waits: warnings may be errors.
        _warn_if_full(num_bytes)
    return SharedMemory(memory, group.size()) if memory is not None and seen else None


@contextlib.contextmanager
def _file(num_bytes: int) -> Iterator[torch.Tensor]:
    """Create a file in memory for ranks to open; yield its name, or zeros where there can be none."""
    name = secrets.token_bytes(_NAME_BYTES)
    path = _path(name.hex())
    try:
        try:
            _fill(path, num_bytes)
        except (OSError, AttributeError):  # a system may have no such folder, or no such call
            name = bytes(_NAME_BYTES)
        yield torch.tensor(list(name), dtype=torch.uint8)
    finally:
        path.unlink(missing_ok=True)


def _fill(path: Path, num_bytes: int) -> None:
    """Allocate all pages at once: a process that writes where none are left is ended (SIGBUS), without an error."""
    if num_bytes * _SHARE > _free_bytes():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    finally:
        os.close(descriptor)


def _free_bytes() -> int:
    room = os.statvfs(_FOLDER)
    return room.f_bavail * room.f_frsize


def _warn_if_full(num_bytes: int) -> None:
    """Warn that memory was too short; other reasons, such as several hosts, are the rule and not worth a warning."""
    with contextlib.suppress(OSError, AttributeError):
        needed, free = num_bytes * _SHARE, _free_bytes()
        if needed > free:
            warnings.warn(
                f"{_FOLDER} has {free / _MIB:.1f} MiB free; with {needed / _MIB:.1f} (half of which is taken) ranks of "
                "this host would exchange through it. They go on by gloo, whose steps take longer. What to do: give it "
                "more room (docker run --shm-size=4g; in Kubernetes an emptyDir of medium Memory)",
                stacklevel=4,
            )


def _opened(name: str, num_bytes: int) -> mmap.mmap | None:
    try:
        descriptor = os.open(_path(name), os.O_RDWR)
    except OSError:
        return None
    try:
        return mmap.mmap(descriptor, num_bytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


def _path(name: str) -> Path:
    return _FOLDER / f"meshwright-{name}"


def aligned(num_bytes: int) -> int:
    """Return the next multiple of ``ALIGNMENT``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
