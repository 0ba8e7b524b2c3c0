"""Read any part of the tensors in a folder of shards; see [Note: shards and their index] in ``store/shards.py``."""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch.autograd.graph import increment_version

from meshwright.errors import CheckpointError
from meshwright.optim.dtensors import local_tensor
from meshwright.runtime import broadcast_object, rank, same_on_every_rank
from meshwright.store.entries import dtype_name, dtype_named
from meshwright.store.manifest import storage_errors, wait_until_seen
from meshwright.store.shards import INDEX, SCHEMA, Box, Entry, Layout, own_box
from meshwright.store.stored_tensors import InFile, Pieces, SafetensorsFile, StoredTensor, join_files

_MOST_OPEN = 64  # files of one folder; a file of which more is read is opened again


@dataclass(frozen=True)
class ListedParts:
    """The parts of one tensor of a folder without index."""

    parts: tuple[tuple[str, Box], ...]

    def parts_in(self, shape: Sequence[int], start: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[str, Box]]:
        """Yield the parts that a box touches, each with the name of its file."""
        for name, (at, size) in self.parts:
            spans = zip(start, sizes, at, size, strict=True)
            if all(first < begin + own and begin < first + length for first, length, begin, own in spans):
                yield name, (at, size)


@dataclass(frozen=True)
class FolderIndex:
    """An index as it was read, or made from the headers of all files."""

    layouts: Sequence[Layout | ListedParts]
    tensors: Mapping[str, Entry]

    @classmethod
    def read(cls, folder: Path) -> FolderIndex:
        """Read the index of a folder, or the headers of all its files where there is none.

        Raises:
            CheckpointError: When it is damaged, or of another schema.
        """
        path = folder / INDEX
        if not path.is_file():
            return _index_of_headers(folder)
        try:
            found: dict[str, Any] = json.loads(path.read_bytes())
            if (schema := found.pop("schema")) != SCHEMA:
                raise CheckpointError(
                    f"{path} is of an unknown schema", expected=str(SCHEMA), got=repr(schema),
                    fix="load it with the version of Meshwright that wrote it",
                )  # fmt: skip
            layouts, tensors = _LAYOUTS.validate_python(found["layouts"]), _ENTRIES.validate_python(found["tensors"])
            _check(layouts, tensors)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise CheckpointError(
                f"{path} cannot be read",
                expected=f"JSON of schema {SCHEMA}",
                got=f"{type(error).__name__}: {error}",
                fix="copy the checkpoint again from its source, or name an older one to resume from",
            ) from error
        return cls(layouts, tensors)

    def open(self, folder: Path) -> tuple[dict[str, StoredTensor], OpenFiles]:
        """Return the tensors, and their files, each of which is opened when a part in it is read."""
        layouts = [each for each in self.layouts if isinstance(each, Layout)]
        files = OpenFiles(folder, len({number for layout in layouts for number in layout.files}))
        return {
            name: _Indexed(name, shape, dtype_named(dtype), self.layouts[number], files)
            for name, (dtype, shape, number) in self.tensors.items()
        }, files


_LAYOUTS = TypeAdapter(list[Layout])
_ENTRIES = TypeAdapter(dict[str, Entry])
_MOST_CUTS = 32


def _check(layouts: Sequence[Layout], tensors: Mapping[str, Entry]) -> None:
    """Refuse what contradicts itself: only an index of foreign make can."""
    for layout in layouts:
        counts = [parts for _, parts in layout.cuts]
        sound = len(counts) <= _MOST_CUTS and min(counts, default=1) >= 1 and min(layout.files, default=-1) >= 0
        if not sound or math.prod(counts) != len(layout.files):
            raise ValueError("a layout of other parts than files")
    for name, (dtype, shape, number) in tensors.items():
        dtype_named(dtype)
        found = layouts[number] if 0 <= number < len(layouts) else None
        if found is None or min(shape, default=0) < 0 or any(not 0 <= dim < len(shape) for dim, _ in found.cuts):
            raise ValueError(f"{name} has no layout of its shape")


def _index_of_headers(folder: Path) -> FolderIndex:
    files = [SafetensorsFile(path) for path in sorted(folder.glob("*.safetensors"))]
    layouts: list[ListedParts] = []
    tensors: dict[str, Entry] = {}
    for name, stored in join_files(files).items():
        pieces = stored.pieces if isinstance(stored, Pieces) else (((0,) * len(stored.shape), stored),)
        parts = [(piece.file.path.name, (at, piece.shape)) for at, piece in pieces if isinstance(piece, InFile)]
        tensors[name] = Entry(dtype_name(stored.dtype), stored.shape, len(layouts))
        layouts.append(ListedParts(tuple(parts)))
    return FolderIndex(layouts, tensors)


class OpenFiles:
    """Files of a folder, opened when they are first read; no more than some at a time."""

    def __init__(self, folder: Path, count: int) -> None:
        self.count = count
        """Number of files that the index names."""
        self._folder = folder
        self._headers: dict[str, SafetensorsFile] = {}
        self._used: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def piece(self, file: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> InFile:
        """Return a part that a file holds.

        Raises:
            CheckpointError: When the file cannot be read, or holds something else.
        """
        with self._lock:
            if file not in self._headers:
                if self._folder.is_dir():  # else a run that goes on saving has deleted the checkpoint
                    wait_until_seen(self._folder / file)
                self._headers[file] = SafetensorsFile(self._folder / file)
            self._used[file] = None
            self._used.move_to_end(file)
            if len(self._used) > _MOST_OPEN:
                self._headers[self._used.popitem(last=False)[0]].close()
            header = self._headers[file]
        at, *form = header.tensors.get(name, (0, None, None))
        if form != [dtype, shape]:
            raise CheckpointError(
                f"{header.path} is not the file that the index describes",
                expected=f"{name} of {dtype} and shape {shape}",
                got="no such tensor" if form == [None, None] else f"{form[0]} of shape {form[1]}",
                fix="copy the checkpoint again from its source, or name an older one to resume from",
            )
        return InFile(header, at, shape, dtype)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for header in self._headers.values():
                header.close()


class _Indexed(StoredTensor):
    """A tensor of a folder with an index."""

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout | ListedParts, files: OpenFiles
    ) -> None:
        self.name, self.shape, self.dtype, self.layout, self.files = name, shape, dtype, layout, files

    def read_into(self, out: torch.Tensor, start: Sequence[int]) -> None:
        """Read what the box needs of each part."""
        if not out.numel():
            return
        found = self.layout.parts_in(self.shape, start, out.shape)
        pieces = [(at, self.files.piece(file, self.name, shape, self.dtype)) for file, (at, shape) in found]
        Pieces(tuple(pieces), self.shape, self.dtype).read_into(out, start)


# --- Loading; collective


def open_shards(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder, of which rank 0 alone reads the index; collective.

    Raises:
        CheckpointError: On every rank, when the index cannot be read.
    """
    index: FolderIndex | None = None
    with same_on_every_rank():
        if rank() == 0:
            index = FolderIndex.read(folder)
    shared: FolderIndex = broadcast_object(index)
    return shared.open(folder)[0]


def load_shards(
    targets: Mapping[str, torch.Tensor], folder: Path, stored: Mapping[str, StoredTensor] | None = None
) -> None:
    """Fill tensors in place from a folder that :func:`save_shards` wrote in any layout; collective.

    Each rank opens the files that hold parts of its own shards.

    Args:
        targets: This rank's; the names may differ between ranks.
        folder: Of the shards.
        stored: Its tensors, if they are open already.

    Raises:
        CheckpointError: On every rank, when the folder lacks a tensor or has it in another shape; nothing has changed
            then. Or when any rank cannot read; targets may then be partly filled.
    """
    stored = open_shards(folder) if stored is None else stored
    with same_on_every_rank():
        for name, target in targets.items():
            if name not in stored or stored[name].shape != tuple(target.shape):
                raise CheckpointError(
                    f"{folder} does not hold what is to be loaded; nothing was loaded",
                    expected=f"{name} of shape {tuple(target.shape)}",
                    got="no such tensor" if name not in stored else f"shape {stored[name].shape}",
                    fix="copy the checkpoint again from its source, or name an older one to resume from",
                )
    fix = "the model is partly loaded: build it anew before going on; then check the disk"
    with same_on_every_rank(), storage_errors(f"Reading tensors from {folder} failed (rank {rank()})", fix):
        for name, target in targets.items():
            _fill(target.detach(), stored[name])


@torch.no_grad()
def _fill(target: torch.Tensor, stored: StoredTensor) -> None:
    start, _ = own_box(target)
    local = local_tensor(target)
    if local.device.type == "cpu":
        stored.read_into(local, start)
        increment_version(local)  # bytes are read into it behind torch's back
        return
    host = torch.empty(local.shape, dtype=local.dtype)
    stored.read_into(host, start)
    local.copy_(host)
