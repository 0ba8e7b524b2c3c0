"""Describe a checkpoint on disk: the manifest of its files, the record of its contents, and which one is whole.

See [Note: verified checkpoints] in :mod:`meshwright.store.checkpoints` for how these make a checkpoint safe.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError

from meshwright import runtime
from meshwright.errors import CheckpointError, MeshwrightError, join_names
from meshwright.store.entries import dtype_name, from_plain

MANIFEST = "manifest.json"
_MANIFEST_SCHEMA = 1
_RESTORE = "copy the checkpoint again from its source, or name an older one to resume from"


class FileEntry(NamedTuple):
    """The manifest's entry for a file: its size in bytes, and its SHA-256 in lower-case hexadecimal."""

    size: int
    sha256: str


@contextlib.contextmanager
def storage_errors(what: str, fix: str) -> Iterator[None]:
    """Turn errors of the file system and the file format into a CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(what, got=f"{type(error).__name__}: {error}", fix=fix) from error


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the disk has the entries of a directory, on file systems that can sync directories."""
    with contextlib.suppress(OSError):  # some network file systems, and Windows, refuse
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_PATIENCE_S = 30.0
_PAUSE_S = 0.05


def wait_until_seen(*paths: Path) -> list[Path]:
    """Wait a little for what other ranks have written, which network file systems may show late to other hosts.

    Returns:
        Those that are not there after that. A single process does not wait.
    """
    end = time.monotonic() + (_PATIENCE_S if runtime.world_size() > 1 else 0.0)
    while (unseen := [path for path in paths if not path.exists()]) and time.monotonic() < end:
        time.sleep(_PAUSE_S)
        for folder in {path.parent for path in unseen}:
            with contextlib.suppress(OSError):  # opening a directory makes a client ask the server anew
                os.scandir(folder).close()
    return unseen


def describe(path: Path) -> FileEntry:
    """Return the size and SHA-256 of a file, read once."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileEntry(stream.tell(), digest)


def write_manifest(directory: Path, files: Mapping[str, FileEntry]) -> None:
    """Write the manifest: the directory is a complete checkpoint from here on.

    Raises:
        CheckpointError: When the directory lacks a file of ``files``, even after a while, or holds another one: its
            damage would not be noticed.
    """
    wait_until_seen(*(directory / name for name in files.keys() - _names_below(directory)))
    present = _names_below(directory)
    if present != files.keys():
        raise CheckpointError(
            "The files of a new checkpoint are not those that the ranks wrote",
            expected=join_names(sorted(files)),
            got=f"{join_names(sorted(present))}; not seen on rank {runtime.rank()}: "
            f"{join_names(sorted(files.keys() - present))}",
            fix="check that all ranks share one file system, and that nothing else writes into the directory",
        )
    write_durably(directory / MANIFEST, _render(files).encode())
    sync_directory(directory)


def _names_below(directory: Path) -> set[str]:
    """List everything in a directory that is no directory, without asking for each file on its own."""
    folders = ((PurePosixPath(os.path.relpath(folder, directory)), names) for folder, _, names in os.walk(directory))
    return {str(folder / name) for folder, names in folders for name in names}


def _render(files: Mapping[str, FileEntry], *, with_digest: bool = True) -> str:
    entries = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in sorted(files.items())}
    # The digest tells damage to an entry from damage to the file that the entry describes.
    digest = {"digest": hashlib.sha256(json.dumps(entries).encode()).hexdigest()} if with_digest else {}
    return json.dumps({"schema": _MANIFEST_SCHEMA, **digest, "files": entries}, indent=1) + "\n"


def read_manifest(directory: Path) -> dict[str, FileEntry]:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: When it is absent, damaged, of another schema, or names a file outside of the directory.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{directory} is not a complete checkpoint",
            expected=f"a directory with a {MANIFEST}, which is written last",
            got="none" if directory.is_dir() else "no such directory",
            fix="resume from a directory named step-… that has one; one without it was never finished",
        )
    with storage_errors(f"{path} cannot be read", _RESTORE):
        content = path.read_bytes()
    files = _parsed_manifest(content, path)
    for name in files:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\\" in name or ":" in name:
            raise _outside(directory, name)
    return files


def _parsed_manifest(content: bytes, path: Path) -> dict[str, FileEntry]:
    try:
        found: dict[str, Any] = json.loads(content.decode())
        schema = found["schema"]
        files = {name: FileEntry(entry["size"], entry["sha256"]) for name, entry in found["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged", expected="a JSON manifest", got=f"{type(error).__name__}: {error}", fix=_RESTORE
        ) from error
    if schema != _MANIFEST_SCHEMA:
        raise CheckpointError(
            f"{path} is of an unknown schema",
            expected=str(_MANIFEST_SCHEMA),
            got=repr(schema),
            fix="load it with the version of Meshwright that wrote it",
        )
    # No other file has a hash of the manifest. It can be written in one way only, so any changed byte shows. The first
    # version wrote no digest.
    if content != _render(files, with_digest="digest" in found).encode():
        raise CheckpointError(
            f"{path} was changed after it was written",
            fix=_RESTORE,
            expected="the file as the manifest describes it",
            got="other content",
        )
    return files


def check_link(directory: Path, name: str) -> None:
    """Refuse a file of a checkpoint that is a link to the outside.

    Raises:
        CheckpointError: Naming the file.
    """
    if not (directory / name).resolve().is_relative_to(directory.resolve()):
        raise _outside(directory, name)


def _outside(directory: Path, name: str) -> CheckpointError:
    what = f"The manifest of {directory} names a file outside of the checkpoint"
    return CheckpointError(what, got=repr(name), fix=_RESTORE)


def check_present(
    directory: Path, files: Mapping[str, FileEntry], names: Sequence[str] | None = None, *, listing: bool = True
) -> None:
    """Refuse a checkpoint with missing files or other sizes, or with tensor files that the manifest lacks.

    Args:
        directory: The checkpoint.
        files: The files of its manifest.
        names: The files whose sizes are asked for; None: all.
        listing: Whether to look for all files in the directory.

    Raises:
        CheckpointError: Naming all of them.
    """
    asked = frozenset(files if names is None else names)
    with storage_errors(f"{directory} cannot be read", _RESTORE):
        sizes = {name: path.stat().st_size for name in sorted(asked) if (path := directory / name).is_file()}
        found = _names_below(directory) if listing else set(sizes)
    wanted = files if listing else sorted(asked)
    missing = [name for name in wanted if name not in (sizes if name in asked else found)]
    resized = [
        f"{name} ({sizes[name]} of {files[name].size} bytes)" for name in sizes if sizes[name] != files[name].size
    ]
    unlisted = sorted(name for name in found - files.keys() if name.startswith(f"{TENSORS}/"))
    if missing or resized or unlisted:
        raise CheckpointError(
            f"{directory} is damaged",
            expected="exactly the files and sizes of its manifest",
            got=f"missing: {join_names(missing)}; of another size: {join_names(resized)}; "
            f"not in the manifest: {join_names(unlisted)}",
            fix=_RESTORE,
        )


def is_first_of_host() -> bool:
    """Return whether this rank looks at directories for all ranks of its host, which may have a disk of its own."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def check_contents(directory: Path, files: Mapping[str, FileEntry], names: Sequence[str]) -> None:
    """Hash the files ``names``, and refuse those that are not as they were written, and links to the outside.

    Raises:
        CheckpointError: Naming all of them.
    """
    with storage_errors(f"{directory} cannot be read", _RESTORE):
        for name in names:
            check_link(directory, name)
        changed = [name for name in names if describe(directory / name) != files[name]]
    if changed:
        raise CheckpointError(
            f"{directory} is damaged",
            expected="files with the SHA-256 in its manifest",
            got=f"changed: {join_names(changed)}",
            fix=_RESTORE,
        )


# --- The record, state.json: everything of a checkpoint that is not a tensor, and the list of all tensors

RECORD = "state.json"
_RECORD_SCHEMA = 1


class TensorRecord(NamedTuple):
    """Global shape and type of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class GroupRecord:
    """A parameter group: parameters by model name, and their hyperparameters in JSON types."""

    parameters: list[str]
    values: dict[str, Any]

    def of(self, names: Container[str]) -> GroupRecord:
        """Return the group with only these of its parameters."""
        return GroupRecord([name for name in self.parameters if name in names], self.values)


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer without its tensors."""

    kind: str
    groups: list[GroupRecord]
    tensor_keys: dict[str, list[str]]
    """Per parameter name, the states that are stored as tensors."""
    values: dict[str, dict[str, Any]]
    """Per parameter name, the states that are not tensors, in JSON types."""


@dataclass(frozen=True)
class ReplicaRecord:
    """State of its own that one of several replicas has."""

    optimizer: OptimizerRecord
    """The inner optimizer."""
    scaler: Any
    flags: dict[str, Any]
    tensors: dict[str, TensorRecord]
    """By stored name."""


@dataclass(frozen=True)
class OuterRecord:
    """The common state of replicas that synchronise every few steps."""

    num_updates: int
    flags: dict[str, Any]
    optimizer: OptimizerRecord
    """The outer optimizer; its parameters are the global weights."""
    replicas: list[ReplicaRecord]


@dataclass(frozen=True)
class SpikeRecord:
    """The losses that later ones are compared with to find spikes."""

    losses: list[float]
    in_a_row: int


@dataclass(frozen=True)
class Record:
    """The contents of ``state.json``."""

    step: int
    samples_seen: int
    world_size: int
    strategy: str
    extra: Any
    tensors: dict[str, TensorRecord]
    model_values: dict[str, Any]
    optimizer: OptimizerRecord | None
    lr_scheduler: Any
    scaler: Any
    outer: OuterRecord | None = None
    average: dict[str, int] | None = None
    """Counts of the moving average of the weights, whose tensors are ``average.NAME``."""
    spikes: SpikeRecord | None = None
    ranks_per_rng_file: int | None = None
    """None: each rank's random generators are in a file of its own, as the first version wrote them."""

    def to_json(self, indent: int | None = 1) -> str:
        """Return JSON text, with the versions that wrote it; without indentation it takes a tenth of the time."""
        versions = {"torch": str(torch.__version__), "meshwright": _own_version()}
        # ``vars`` rather than ``asdict``, which copies every value first: a snapshot writes this at every step.
        return json.dumps({"schema": _RECORD_SCHEMA, **versions, **vars(self)}, indent=indent, default=vars) + "\n"


@functools.cache
def _own_version() -> str:
    try:
        return importlib.metadata.version("meshwright")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


Describe = Callable[[Mapping[str, torch.Tensor]], dict[str, TensorRecord]]
""":func:`tensor_records`, or the same with a memory."""


def tensor_records(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorRecord]:
    """Return the global shapes and types of tensors."""
    return {name: TensorRecord(tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items()}


_RECORD = TypeAdapter(Record)


def record_of(text: str | bytes, where: str) -> Record:
    """Return the record of its JSON text.

    Raises:
        CheckpointError: When it is of another schema.
        Exception: ValueError, KeyError, TypeError, AttributeError or RecursionError, when it is no record.
    """
    found: dict[str, Any] = json.loads(text)
    schema = found.pop("schema")
    if schema != _RECORD_SCHEMA:
        raise CheckpointError(
            f"{where} is of an unknown schema",
            expected=str(_RECORD_SCHEMA),
            got=repr(schema),
            fix="load it with the version of Meshwright that wrote it",
        )
    record = _RECORD.validate_python(found)
    for value in (record.extra, record.model_values, record.lr_scheduler, record.scaler):
        from_plain(value)  # finds values that cannot be decoded before anything is loaded
    return record


def read_record(directory: Path) -> Record:
    """Read the record of a checkpoint whose files are already verified.

    Raises:
        CheckpointError: When it is of another schema or not what its schema says.
    """
    path = directory / RECORD
    try:
        check_link(directory, RECORD)
        if not path.is_file():
            raise ValueError("no file")  # a pipe, or a device, could be read without end
        return record_of(path.read_bytes(), str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read",
            expected=f"JSON of schema {_RECORD_SCHEMA}",
            got=f"{type(error).__name__}: {error}",
            fix=_RESTORE,
        ) from error


@contextlib.contextmanager
def consistent(directory: Path) -> Iterator[None]:
    """Turn errors from a record whose parts contradict each other into a CheckpointError.

    Only a record of foreign make can be like that: by then it is verified, and its types are checked.
    """
    try:
        yield
    except MeshwrightError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, MemoryError) as error:
        raise CheckpointError(
            f"{directory / RECORD} contradicts itself or the run that it is loaded into",
            expected="the record that Meshwright has written with these tensors",
            got=f"{type(error).__name__}: {error}",
            fix=_RESTORE,
        ) from error


# --- Which checkpoint of a directory to use: the newest that is whole

TENSORS = "tensors"  # a folder of its own: DCP reads every safetensors file in it
_SHARD = ".safetensors"
_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint by its name."""
    return int(checkpoint.name.rpartition("-")[2])


def complete_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Return steps and directories of all complete checkpoints, oldest first; their contents are not read."""
    found = [(int(match[1]), path) for path in directory.glob("step-*") if (match := _STEP.fullmatch(path.name))]
    return sorted((step, path) for step, path in found if (path / MANIFEST).is_file())


def verify(path: Path) -> Record:
    """Read every file of a checkpoint once and compare it with the manifest.

    Returns:
        The checkpoint's record.

    Raises:
        CheckpointError: Naming every file that is missing, damaged or not of this checkpoint.
    """
    files = read_manifest(path)
    check_present(path, files)
    check_contents(path, files, sorted(files))
    return read_record(path)


def _verify_together(path: Path) -> None:
    """Make the checks of :func:`verify`, each file on one rank; collective.

    Rank 0 reads the manifest and lists the directory: thousands of ranks that did would stall a shared file system. The
    others believe it, and wait for files that they do not see yet.
    """
    files: dict[str, FileEntry] = {}
    with runtime.same_on_every_rank():
        if runtime.rank() == 0:
            files = read_manifest(path)
            check_present(path, files, _share(files))
    files = runtime.broadcast_object(files)
    own = _share(files)
    with runtime.same_on_every_rank():
        wait_until_seen(path / MANIFEST, *(path / name for name in own))
        check_present(path, files, own, listing=False)
        check_contents(path, files, own)
        if runtime.rank() == 0:
            read_record(path)


def _share(files: Iterable[str]) -> list[str]:
    """Return the files that this rank reads and hashes: where the layout has not changed, those that it loads."""
    own = sorted(name for name in files if not name.endswith(_SHARD) and runtime.rank() == 0)
    for is_tensor in (False, True):
        alike = sorted(n for n in files if n.endswith(_SHARD) and n.startswith(f"{TENSORS}/") == is_tensor)
        own += [n for i, n in enumerate(alike) if i * runtime.world_size() // len(alike) == runtime.rank()]
    return own


def damage_of(path: Path) -> list[CheckpointError]:
    """Return everything that is wrong with a checkpoint; :func:`verify` stops at the first kind of damage."""
    try:
        files = read_manifest(path)
    except CheckpointError as error:
        return [error]
    whole = [n for n in sorted(files) if (path / n).is_file() and (path / n).stat().st_size == files[n].size]
    found: list[CheckpointError] = []
    for check in (
        lambda: check_present(path, files),
        lambda: check_contents(path, files, whole),
        lambda: read_record(path),
    ):
        try:
            check()
        except CheckpointError as error:
            found.append(error)
    return found


def newest_valid(candidates: Sequence[Path]) -> tuple[Path | None, list[CheckpointError]]:
    """Return the first checkpoint that is whole, and why those before it are not; collective, equal on every rank."""
    damaged: list[CheckpointError] = []
    for path in candidates:
        try:
            _verify_together(path)
        except CheckpointError as error:
            damaged.append(error)
        else:
            return path, damaged
    return None, damaged


def nothing_valid(directory: Path, damaged: Sequence[CheckpointError]) -> CheckpointError:
    """Return the error when a directory holds no checkpoint, or damaged ones only."""
    if damaged:
        return CheckpointError(
            f"Every checkpoint in {directory} is damaged",
            expected="one that is whole",
            got=" | ".join(str(error) for error in damaged),
            fix="copy one again from its source, or start from the beginning",
        )
    others = sorted(path.name for path in directory.glob("*")) if directory.is_dir() else []
    return CheckpointError(
        f"There is no checkpoint in {directory}",
        expected=f"a directory step-… with a {MANIFEST}",
        got=join_names(others) if directory.is_dir() else "no such directory",
        fix="check the directory, or start from the beginning: meshwright train does so with --resume auto",
    )
