"""Read parts of tensors on disk, as they are or put together from others.

A :class:`StoredTensor` fills any box of itself into a tensor of the caller's. One of safetensors files reads the bytes
of the box straight into that tensor. Several make a new one (:class:`Stack`, :class:`Concatenation`, :class:`Narrowed`,
:class:`Transposed`) that reads what the box needs of each; :class:`Computed` reads its sources whole.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from meshwright.errors import CheckpointError, join_names
from meshwright.runtime.torch_internals import checkpoint as keys

Index = tuple[slice | torch.Tensor, ...]
"""A part of a tensor: per dim a slice of step 1, or positions as an int64 tensor."""

_WINDOW_BYTES = 2**24

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class StoredTensor(ABC):
    """A tensor that is not in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def by_parts(self) -> bool:
        """Return whether a box costs less than the whole."""
        return True

    @property
    def num_bytes(self) -> int:
        """Return the size of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def read_into(self, out: torch.Tensor, start: Sequence[int]) -> None:
        """Fill ``out``, a host tensor of any dtype and strides, with the box of its shape that begins at ``start``."""

    def read(self, index: Index, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read a part into a host tensor: ``out``, or a new one."""
        runs = [_runs(each, size) for each, size in zip(index, self.shape, strict=True)]
        if not self.by_parts and any(len(each) > 1 for each in runs):
            part = self._read_bounds(index, dtype)
            return part if out is None else out.copy_(part)
        if out is None:
            out = torch.empty([sum(length for _, length in each) for each in runs], dtype=dtype)
        self._read_boxes(out, runs, ())
        return out

    def _read_boxes(self, out: torch.Tensor, runs: list[list[tuple[int, int]]], start: tuple[int, ...]) -> None:
        dim = len(start)
        if dim == len(runs):
            self.read_into(out, start)
            return
        at = 0
        for first, length in runs[dim]:
            self._read_boxes(out.narrow(dim, at, length), runs, (*start, first))
            at += length

    def _read_bounds(self, index: Index, dtype: torch.dtype) -> torch.Tensor:
        """Read the smallest box that holds the part, and cut the part out of it."""
        spans = [_span(each, size) for each, size in zip(index, self.shape, strict=True)]
        out = torch.empty([end - first for first, end in spans], dtype=dtype)
        self.read_into(out, [first for first, _ in spans])
        for dim, (each, (first, _)) in enumerate(zip(index, spans, strict=True)):
            if isinstance(each, torch.Tensor):
                out = out.index_select(dim, each.cpu() - first)
        return out


def _runs(index: slice | torch.Tensor, size: int) -> list[tuple[int, int]]:
    """Return the first positions and lengths of the stretches of neighbours."""
    if isinstance(index, slice):
        first, end, step = index.indices(size)
        assert step == 1, "slices of step 1 only"
        return [(first, max(end - first, 0))]
    positions = index.tolist()
    cuts = [0, *(i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1), len(positions)]
    return [(positions[a], b - a) for a, b in pairwise(cuts) if b > a] or [(0, 0)]


def _span(index: slice | torch.Tensor, size: int) -> tuple[int, int]:
    if isinstance(index, slice):
        first, end, _ = index.indices(size)
        return first, max(first, end)
    return (int(index.min()), int(index.max()) + 1) if index.numel() else (0, 0)


# --- Tensors of safetensors files


class SafetensorsFile:
    """An open safetensors file: what its header says, and its bytes.

    The file is not mapped as a whole: mapped pages count as memory of the process, beside the tensor that they are
    copied into. Bytes are read into place, or a window of the file is mapped for as long as it is copied from. The
    system's page cache keeps them, so that each comes from the disk once, however many ranks of a host ask for it.

    Another rank that it is sent to does not parse the header again, and opens the file when it reads from it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        """By name: offset in the file, dtype and shape."""
        self.metadata: dict[str, str] = {}
        self._sizes: tuple[int, int] | None = None  # of the file and its header, where another rank has read that
        self._file: int | None = None
        self._lock = threading.Lock()
        try:
            with safe_open(path, "pt"):  # refuses a header that does not fit the file
                pass
            self._read_header()
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} cannot be read as safetensors",
                expected="a whole file",
                got="no such file" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}",
                fix="copy the file again from its source",
            ) from error

    def _read_header(self) -> None:
        with self.path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        self.metadata = header.pop("__metadata__", {})
        for name, entry in header.items():
            if entry["dtype"] not in _DTYPES:
                raise ValueError(f"{name} is of dtype {entry['dtype']}, which torch does not have")
            begin = 8 + length + entry["data_offsets"][0]
            self.tensors[name] = (begin, _DTYPES[entry["dtype"]], tuple(entry["shape"]))

    def __getstate__(self) -> dict[str, Any]:
        """Return what the header says, for another rank."""
        sizes = self._sizes
        if sizes is None:
            with self.path.open("rb") as stream:
                sizes = os.fstat(stream.fileno()).st_size, int.from_bytes(stream.read(8), "little")
        return {"path": self.path, "tensors": self.tensors, "metadata": self.metadata, "_sizes": sizes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._file, self._lock = None, threading.Lock()

    def read_bytes(self, at: int, out: torch.Tensor) -> None:
        """Fill a contiguous host tensor with the bytes from position ``at`` on."""
        file = self._open()
        into: memoryview = out.detach().reshape(-1).view(torch.uint8).numpy().data
        while into:
            count = os.preadv(file, [into], at)
            if not count:
                raise self._cut(at)
            into, at = into[count:], at + count

    def window(self, at: int, num_bytes: int) -> torch.Tensor:
        """Map a part of the file, until the tensor of bytes that is returned is let go."""
        file = self._open()
        if (size := os.fstat(file).st_size) < at + num_bytes:
            raise self._cut(size)
        begin = at - at % mmap.ALLOCATIONGRANULARITY
        # Private, since torch wants memory that can be written.
        mapped = mmap.mmap(file, at - begin + num_bytes, flags=mmap.MAP_PRIVATE, offset=begin)
        return torch.frombuffer(mapped, dtype=torch.uint8, offset=at - begin)

    def _open(self) -> int:
        with self._lock:
            if self._file is None:
                self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                found = os.fstat(self._file).st_size, int.from_bytes(os.pread(self._file, 8, 0), "little")
                if self._sizes not in (None, found):
                    raise OSError(f"{self.path} is another file here than where its header was read")
            return self._file

    def _cut(self, at: int) -> OSError:
        return OSError(f"{self.path} ends at byte {at}: it was cut while it was read")

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None


@dataclass(frozen=True)
class InFile(StoredTensor):
    """A tensor of a safetensors file."""

    file: SafetensorsFile
    at: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read_into(self, out: torch.Tensor, start: Sequence[int]) -> None:
        """Read bytes that lie together straight into place, and copy others, cast on the way, from a window."""
        if not out.numel():
            return
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        together = out.shape[1:] == self.shape[1:]
        if together and out.dtype == self.dtype and out.is_contiguous():
            self.file.read_bytes(self.at + start[0] * row if self.shape else self.at, out)
        else:
            self._copy(self.at, self.shape or (1,), start or (0,), out if self.shape else out.unsqueeze(0))

    def _copy(self, at: int, shape: tuple[int, ...], start: Sequence[int], out: torch.Tensor) -> None:
        row = math.prod(shape[1:]) * self.dtype.itemsize
        if row > _WINDOW_BYTES:
            for number, part in enumerate(out):
                self._copy(at + (start[0] + number) * row, shape[1:], start[1:], part)
            return
        at += start[0] * row
        for part in out.split(max(1, _WINDOW_BYTES // row)):
            values = self.file.window(at, len(part) * row).view(self.dtype).view(len(part), *shape[1:])
            for dim in range(1, out.ndim):
                values = values.narrow(dim, start[dim], out.shape[dim])
            part.copy_(values)
            at += len(part) * row


@dataclass(frozen=True)
class Pieces(StoredTensor):
    """A tensor whose pieces lie anywhere: written by ranks, each its shard."""

    pieces: tuple[tuple[tuple[int, ...], StoredTensor], ...]
    """Where each begins in the whole, and the piece."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def by_parts(self) -> bool:
        """Return whether its sources can be read by parts."""
        return all(piece.by_parts for _, piece in self.pieces)

    def read_into(self, out: torch.Tensor, start: Sequence[int]) -> None:
        """Read what the box needs of each piece."""
        for offsets, piece in self.pieces:
            part, inside = out, []
            for dim, (offset, size, first) in enumerate(zip(offsets, piece.shape, start, strict=True)):
                begin, end = max(offset, first), min(offset + size, first + out.shape[dim])
                part = part.narrow(dim, min(begin - first, out.shape[dim]), max(end - begin, 0))
                inside.append(begin - offset)
            if part.numel():
                piece.read_into(part, inside)


def join_files(files: Iterable[SafetensorsFile]) -> dict[str, StoredTensor]:
    """Return the tensors of files, whole where ranks have written their shards of them.

    Raises:
        CheckpointError: When parts are absent.
    """
    pieces: dict[str, dict[tuple[int, ...], StoredTensor]] = {}
    for file in files:
        offsets = _offsets(file)
        for name, (at, dtype, shape) in file.tensors.items():
            where = tuple(offsets.get(name, (0,) * len(shape)))
            pieces.setdefault(name, {})[where] = InFile(file, at, shape, dtype)
    tensors: dict[str, StoredTensor] = {}
    for name, parts in pieces.items():
        first = next(iter(parts.values()))
        ends = [[a + b for a, b in zip(at, each.shape, strict=True)] for at, each in parts.items()]
        shape = tuple(max(each) for each in zip(*ends, strict=True))
        whole = Pieces(tuple(parts.items()), shape, first.dtype)
        if sum(each.num_bytes for each in parts.values()) != whole.num_bytes:
            raise CheckpointError(
                f"{name} is not whole", expected=f"files with all parts of {shape}", got=f"{len(parts)} of its parts",
                fix="copy the weights again from their source, to every host",
            )  # fmt: skip
        tensors[name] = first if len(parts) == 1 else whole
    return tensors


def _offsets(file: SafetensorsFile) -> Mapping[str, tuple[int, ...]]:
    if keys.CUSTOM_METADATA_KEY not in file.metadata:
        return {}
    try:
        found = json.loads(file.metadata[keys.CUSTOM_METADATA_KEY])
        offsets = {name: tuple(each[keys.SAVED_OFFSETS_KEY]) for name, each in found.items()}
        wrong = [name for name, (_, _, shape) in file.tensors.items() if len(offsets[name]) != len(shape)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        wrong = [str(error)]
    if wrong:
        raise CheckpointError(
            f"{file.path} is damaged", expected="the place of every shard in its tensor", got=join_names(wrong),
            fix="copy the weights again from their source, to every host",
        )  # fmt: skip
    return offsets


# --- Tensors made of others


@dataclass(frozen=True)
class Stack(StoredTensor):
    """``torch.stack`` of equal ones."""

    parts: tuple[StoredTensor, ...]
    dim: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def by_parts(self) -> bool:
        """Return whether its sources can be read by parts."""
        return all(part.by_parts for part in self.parts)

    def read_into(self, out: torch.Tensor, start: Sequence[int]) -> None:
        """Read from the parts in the box only."""
        rest = [*start[: self.dim], *start[self.dim + 1 :]]
        for number in range(out.shape[self.dim]):
            self.parts[start[self.dim] + number].read_into(out.select(self.dim, number), rest)


def concatenation(parts: Sequence[StoredTensor], dim: int, shape: tuple[int, ...], dtype: torch.dtype) -> Pieces:
    """Return ``torch.cat`` of tensors."""
    pieces, at = [], 0
    for part in parts:
        pieces.append((tuple(at if each == dim else 0 for each in range(len(shape))), part))
        at += part.shape[dim]
    return Pieces(tuple(pieces), shape, dtype)


@dataclass(frozen=True)
class Narrowed(StoredTensor):
    """A stretch of one along a dim."""

    of: StoredTensor
    dim: int
    first: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def by_parts(self) -> bool:
        """Return whether its sources can be read by parts."""
        return self.of.by_parts

    def read_into(self, out: torch.Tensor, start: Sequence[int]) -> None:
        """Read the box from further on."""
        self.of.read_into(out, [at + self.first * (dim == self.dim) for dim, at in enumerate(start)])


@dataclass(frozen=True)
class Transposed(StoredTensor):
    """One with two dims exchanged."""

    of: StoredTensor
    dims: tuple[int, int]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def by_parts(self) -> bool:
        """Return whether its sources can be read by parts."""
        return self.of.by_parts

    def read_into(self, out: torch.Tensor, start: Sequence[int]) -> None:
        """Read the transposed box."""
        swapped = list(start)
        one, other = self.dims
        swapped[one], swapped[other] = start[other], start[one]
        self.of.read_into(out.transpose(one, other), swapped)


@dataclass(frozen=True)
class Computed(StoredTensor):
    """The result of any other function of tensors; its sources are read whole."""

    compute: Callable[[torch.dtype], Any]
    """Compute it from sources that were cast to a dtype."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def by_parts(self) -> bool:
        """Return False."""
        return False

    def read_into(self, out: torch.Tensor, start: Sequence[int]) -> None:
        """Compute the whole, and cut the box out of it."""
        whole = self.compute(out.dtype)
        for dim, first in enumerate(start):
            whole = whole.narrow(dim, first, out.shape[dim])
        out.copy_(whole)
