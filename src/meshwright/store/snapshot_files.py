"""Write one rank's training state into a file of the host's memory, and read it back if it is whole.

[Note: snapshot files] A file is a header, the bytes of all tensors, and a text with everything else. It is mapped, so
that taking a snapshot is one copy; its pages are reserved first, for a process that writes into a mapping for which
there is no memory is ended without a word. The header is cleared before the first byte changes and written after the
last: a file whose process has died in between has none. It holds a sum over the bytes of the tensors, in which any
flipped bit shows, and a SHA-256 of the text and of the header itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.runtime.agreement import bit_sum
from meshwright.store.entries import dtype_name, dtype_named

_MAGIC = b"MWSNAP01"
_HEADER = struct.Struct(
    "<8sQQq32s"
)  # magic, bytes of the tensors and of the text, sum of the first, digest of all else
_DATA = 4096  # where the tensors begin
_ALIGNED = 64
_TEXT_ROOM = 2**16  # the text grows a little from step to step

Layout = dict[str, tuple[str, tuple[int, ...], int]]
"""By name: dtype, shape and offset of a tensor."""


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def layout_of(tensors: Mapping[str, torch.Tensor]) -> tuple[Layout, int]:
    """Return where each of some plain tensors lies in a file, and their bytes in all."""
    layout: Layout = {}
    offset = 0
    for name, tensor in tensors.items():
        layout[name] = dtype_name(tensor.dtype), tuple(tensor.shape), offset
        offset = _aligned(offset + tensor.nbytes)
    return layout, offset


def _views(buffer: Any, layout: Layout) -> dict[str, torch.Tensor]:
    """Return the tensors that lie in a buffer, without a copy."""
    views = {}
    for name, (type_name, shape, offset) in layout.items():
        dtype = dtype_named(type_name)
        size = dtype.itemsize * torch.Size(shape).numel()
        flat = _bytes_of(buffer, _DATA + offset, size)
        views[name] = flat.view(dtype).view(shape)
    return views


def _bytes_of(buffer: Any, start: int, size: int) -> torch.Tensor:
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=start)


class DamagedSnapshot(Exception):
    """A file is no whole snapshot."""


@dataclass(frozen=True)
class Contents:
    """A snapshot that was read."""

    tensors: dict[str, torch.Tensor]
    """Views of the file's bytes."""
    about: dict[str, Any]
    """Everything else, in JSON types."""


class SnapshotFile:
    """A file that one process writes, again and again; see [Note: snapshot files].

    Args:
        path: In memory that the host keeps; made with the first snapshot.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        self._layout: Layout = {}
        self._data_bytes = 0
        self._targets: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy plain tensors into the file, which holds no snapshot until :meth:`finish`.

        Raises:
            OSError: When the host has no room for it.
        """
        self.clear()
        layout, data_bytes = layout_of(tensors)
        if layout != self._layout or self._map is None:
            self._reserve(_DATA + data_bytes + _TEXT_ROOM)
            self._layout, self._data_bytes, self._targets = layout, data_bytes, _views(self._map, layout)
        for name, tensor in tensors.items():
            self._targets[name].copy_(tensor.detach())

    def finish(self, about: Mapping[str, Any]) -> None:
        """Write everything else, and the header.

        Raises:
            OSError: When the host has no room for it.
        """
        text = json.dumps({**about, "tensors": self._layout}).encode()
        end = _DATA + self._data_bytes + len(text)
        assert self._map is not None, "tensors were copied"
        if end > len(self._map):
            self._reserve(end + _TEXT_ROOM)
            self._targets = _views(self._map, self._layout)
        self._map[_DATA + self._data_bytes : end] = text
        total = _sum_of(self._map, self._data_bytes)
        numbers = struct.pack("<QQq", self._data_bytes, len(text), total)
        digest = hashlib.sha256(numbers + text).digest()
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, self._data_bytes, len(text), total, digest)
        os.utime(self.path)  # writing into a mapping does not say when

    def take_over(self, whole: Any) -> None:
        """Replace the file by the bytes of another one, whose header comes last.

        Raises:
            OSError: When the host has no room for it.
        """
        self.clear()
        if self._map is None or len(self._map) < len(whole):
            self._reserve(len(whole))
        assert self._map is not None
        self._map[_HEADER.size : len(whole)] = whole[_HEADER.size :]
        self._map[: _HEADER.size] = whole[: _HEADER.size]
        os.utime(self.path)

    def whole(self) -> memoryview:
        """Return the bytes of the finished snapshot."""
        assert self._map is not None, "there is a snapshot"
        _, data_bytes, text_bytes, _, _ = _HEADER.unpack(self._map[: _HEADER.size])
        return memoryview(self._map)[: _DATA + data_bytes + text_bytes]

    def clear(self) -> None:
        """Let the file hold no snapshot."""
        if self._map is not None:
            self._map[: _HEADER.size] = bytes(_HEADER.size)
        elif self.path.exists():
            with self.path.open("r+b") as file:
                file.write(bytes(_HEADER.size))

    def _reserve(self, size: int) -> None:
        """Map the file with so many bytes, all of which the host has set aside."""
        self._targets, self._layout, self._map = {}, {} if self._map is None else self._layout, None
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, max(size, os.fstat(descriptor).st_size))
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        """Delete the file."""
        self._targets, self._map = {}, None
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def _sum_of(buffer: Any, data_bytes: int) -> int:
    return int(bit_sum(_bytes_of(buffer, _DATA, data_bytes))) if data_bytes else 0


def read_bytes(path: Path) -> Any:
    """Return the bytes of a file as a private mapping.

    Raises:
        DamagedSnapshot: When there are none.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise DamagedSnapshot(str(error)) from None


def read_about(buffer: Any) -> dict[str, Any]:
    """Return everything but the tensors, which are not looked at.

    Raises:
        DamagedSnapshot: When it is not whole.
    """
    if len(buffer) < _HEADER.size:
        raise DamagedSnapshot("it is cut off")
    magic, data_bytes, text_bytes, total, digest = _HEADER.unpack(bytes(buffer[: _HEADER.size]))
    if magic != _MAGIC:
        raise DamagedSnapshot("it was not finished")
    text = bytes(buffer[_DATA + data_bytes : _DATA + data_bytes + text_bytes])
    if hashlib.sha256(struct.pack("<QQq", data_bytes, text_bytes, total) + text).digest() != digest:
        raise DamagedSnapshot("its text is not what was written")
    return dict(json.loads(text))


def read_snapshot(buffer: Any) -> Contents:
    """Read and verify a whole snapshot.

    Raises:
        DamagedSnapshot: When any bit of it has changed.
    """
    about = read_about(buffer)
    _, data_bytes, _, total, _ = _HEADER.unpack(bytes(buffer[: _HEADER.size]))
    if _sum_of(buffer, data_bytes) != total:
        raise DamagedSnapshot("its tensors are not what was written")
    layout = {name: (dtype, tuple(shape), offset) for name, (dtype, shape, offset) in about.pop("tensors").items()}
    return Contents(_views(buffer, layout), about)
