"""Read and write folders of torch's distributed checkpoint (DCP): ``.metadata`` and ``.distcp`` files.

The tensors go through torch's own reader and writer; the reader loads every saved chunk that a part touches. The
metadata is a pickle; it is read with a list of the classes that torch writes, so that it cannot run code.
"""

from __future__ import annotations

import importlib
import os
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from meshwright.errors import CheckpointError, join_names
from meshwright.runtime import rank, world_size
from meshwright.store.manifest import is_first_of_host
from meshwright.store.stored_tensors import StoredTensor

# Imported late below: it brings torch's launcher along.
if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

METADATA = ".metadata"
_PLAIN = {
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
_RECORDS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that makes dtypes, sizes and the records of DCP's metadata only."""

    def find_class(self, module: str, name: str) -> Any:
        found = (
            None if "." in name else getattr(importlib.import_module(module), name, None) if _known(module) else None
        )
        record = module in _RECORDS and isinstance(found, type) and found.__module__ == module
        if (module, name) in _PLAIN or record or (module == "torch" and isinstance(found, torch.dtype)):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _known(module: str) -> bool:
    return module in (*_RECORDS, *(each for each, _ in _PLAIN))


def open_dcp(folder: Path) -> dict[str, StoredTensor]:
    """Read the metadata of a folder, and return its tensors by name.

    Raises:
        CheckpointError: When the metadata is damaged, or names files that are absent.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    try:
        with (folder / METADATA).open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        files = {info.relative_path for info in metadata.storage_data.values()}
    except Exception as error:  # unpickling raises errors of every kind on damaged files
        raise CheckpointError(
            f"{folder / METADATA} cannot be read",
            expected="the metadata that torch.distributed.checkpoint writes",
            got=f"{type(error).__name__}: {error}",
            fix="copy the folder again from its source",
        ) from error
    absent: list[str] = []
    if is_first_of_host():  # the folder may be on a disk of each host
        listed = set(os.listdir(folder))
        absent = [file for file in sorted(files) if file not in listed and not (folder / file).is_file()]
    if absent:
        raise CheckpointError(
            f"{folder} is not whole", expected=f"the files that its {METADATA} names",
            got=f"none of the name {join_names(absent)}", fix="copy the folder again from its source, to every host",
        )  # fmt: skip
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    records = metadata.state_dict_metadata.items()
    return {n: _InDcp(reader, n, record) for n, record in records if isinstance(record, TensorStorageMetadata)}


class _InDcp(StoredTensor):
    """A tensor of a DCP folder."""

    def __init__(self, reader: FileSystemReader, name: str, record: TensorStorageMetadata) -> None:
        self.reader, self.name, self.record = reader, name, record
        self.shape, self.dtype = tuple(record.size), record.properties.dtype

    @property
    def by_parts(self) -> bool:
        """Return False: every read loads whole chunks."""
        return False

    def read_into(self, out: torch.Tensor, start: Sequence[int]) -> None:
        """Let torch's reader fill the box."""
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
        from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        class Planner(DefaultLoadPlanner):
            def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
                part = out
                for dim, (first, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
                    part = part.narrow(dim, first, length)
                return part

            def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
                pass

        if not out.numel():
            return
        box = ChunkStorageMetadata(torch.Size(start), out.shape)
        items = create_read_items_for_chunk_list(self.name, self.record, [box])
        self.reader.read_data(LoadPlan(items), Planner()).wait()


def write_dcp(outlines: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor], folder: Path) -> None:
    """Write whole tensors as torch's distributed checkpoint, which torchtitan and others load; collective.

    The ranks divide the tensors. Each reads its own one after the other, so it never holds more than one.

    Args:
        outlines: All tensors without values, by name; the same on every rank.
        read: Returns the values of one, on the host.
        folder: An empty folder that all ranks share.

    Raises:
        CheckpointError: On every rank, when any of them cannot read or write.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class Planner(DefaultSavePlanner):
        def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
            return read(index.fqn)

    try:
        with warnings.catch_warnings():
            # A world of one needs no process group.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            own = {name: outlines[name] for name in _share(outlines)}
            save(own, storage_writer=FileSystemWriter(folder), planner=Planner())
    except CheckpointException as error:  # a BaseException, which no ``except Exception`` catches
        number, (cause, _) = min(error.failures.items())
        raise CheckpointError(
            f"{folder} cannot be written", got=f"{type(cause).__name__}: {cause} (rank {number})",
            fix="make room, or choose another folder",
        ) from error  # fmt: skip


def _share(outlines: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names that this rank writes: of all bytes, laid end to end, its part."""
    total, at, own = max(1, sum(each.nbytes for each in outlines.values())), 0, []
    for name, each in outlines.items():
        if at * world_size() // total == rank():
            own.append(name)
        at = min(at + each.nbytes, total - 1)
    return own
