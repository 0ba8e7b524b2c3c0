"""The manifest of a checkpoint: every file with its size and SHA-256, written last; and files that reach the disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from safetensors import SafetensorError

from meshwright.errors import CheckpointError, join_names

MANIFEST = "manifest.json"
_SCHEMA = 1
_RESTORE = "copy the checkpoint again from its source, or name an older one to resume from"


class FileEntry(NamedTuple):
    """What the manifest knows of a file: its size in bytes and its SHA-256 in lower-case hexadecimal."""

    size: int
    sha256: str


@contextlib.contextmanager
def storage_errors(what: str, fix: str) -> Iterator[None]:
    """Turns what the file system or the file format complains about into a CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(what, got=f"{type(error).__name__}: {error}", fix=fix) from error


def write_durably(path: Path, content: bytes) -> None:
    """Writes a file and waits until the disk has it."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Waits until the disk has the names in a directory, on file systems that can sync directories."""
    with contextlib.suppress(OSError):  # some network file systems, and Windows, refuse
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def describe(path: Path) -> FileEntry:
    """Size and SHA-256 of a file, read once."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileEntry(stream.tell(), digest)


def write_manifest(directory: Path, files: Mapping[str, FileEntry]) -> None:
    """Writes the manifest: the directory is a checkpoint from here on.

    Raises:
        CheckpointError: When the directory holds a file that ``files`` does not: nobody would notice its damage.
    """
    present = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    if present != files.keys():
        raise CheckpointError(
            "The files of a new checkpoint are not those that the ranks wrote",
            expected=join_names(sorted(files)),
            got=join_names(sorted(present)),
            fix="check that all ranks share one file system, and that nothing else writes into the directory",
        )
    write_durably(directory / MANIFEST, _render(files).encode())
    sync_directory(directory)


def _render(files: Mapping[str, FileEntry], *, with_digest: bool = True) -> str:
    entries = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in sorted(files.items())}
    # So that damage to an entry is known from damage to the file it describes.
    digest = {"digest": hashlib.sha256(json.dumps(entries).encode()).hexdigest()} if with_digest else {}
    return json.dumps({"schema": _SCHEMA, **digest, "files": entries}, indent=1) + "\n"


def read_manifest(directory: Path) -> dict[str, FileEntry]:
    """Reads the manifest of a checkpoint.

    Raises:
        CheckpointError: When it is absent, is damaged, is of another schema, or names a file outside of the directory.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{directory} is not a complete checkpoint",
            expected=f"a directory with a {MANIFEST}, which is written last",
            got="none" if directory.is_dir() else "no such directory",
            fix="resume from a directory named step-… that has one; what has none was never finished",
        )
    with storage_errors(f"{path} cannot be read", _RESTORE):
        content = path.read_bytes()
    files = _parsed(content, path)
    for name in files:
        _check_name(directory, name)
    return files


def _parsed(content: bytes, path: Path) -> dict[str, FileEntry]:
    try:
        found: dict[str, Any] = json.loads(content.decode())
        schema = found["schema"]
        files = {name: FileEntry(entry["size"], entry["sha256"]) for name, entry in found["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged", expected="a JSON manifest", got=f"{type(error).__name__}: {error}", fix=_RESTORE
        ) from error
    if schema != _SCHEMA:
        raise CheckpointError(
            f"{path} is of an unknown schema",
            expected=str(_SCHEMA),
            got=repr(schema),
            fix="load it with the version of Meshwright that wrote it",
        )
    # Nothing else hashes the manifest: since it can be written in one way only, any changed byte shows. The first
    # version wrote no digest.
    if content != _render(files, with_digest="digest" in found).encode():
        raise CheckpointError(
            f"{path} was changed after it was written",
            fix=_RESTORE,
            expected="the file as the manifest describes it",
            got="other content",
        )
    return files


def _check_name(directory: Path, name: str) -> None:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or ":" in name:
        raise _outside(directory, name)


def check_link(directory: Path, name: str) -> None:
    """Refuses a file of a checkpoint that is a link to the outside.

    Raises:
        CheckpointError: Naming it.
    """
    if not (directory / name).resolve().is_relative_to(directory.resolve()):
        raise _outside(directory, name)


def _outside(directory: Path, name: str) -> CheckpointError:
    what = f"The manifest of {directory} names a file outside of the checkpoint"
    return CheckpointError(what, got=repr(name), fix=_RESTORE)


def check_present(directory: Path, files: Mapping[str, FileEntry], folders: Iterable[str]) -> None:
    """Refuses a checkpoint with missing files or other sizes, and files in ``folders`` that the manifest lacks.

    Raises:
        CheckpointError: Naming all of them.
    """
    with storage_errors(f"{directory} cannot be read", _RESTORE):
        sizes = {name: path.stat().st_size for name in files if (path := directory / name).is_file()}
        found = {f"{folder}/{path.name}" for folder in folders for path in (directory / folder).glob("*")}
    missing = [name for name in files if name not in sizes]
    resized = [
        f"{name} ({sizes[name]} of {files[name].size} bytes)" for name in sizes if sizes[name] != files[name].size
    ]
    unlisted = sorted(found - files.keys())
    if missing or resized or unlisted:
        raise CheckpointError(
            f"{directory} is damaged",
            expected="exactly the files and sizes of its manifest",
            got=f"missing: {join_names(missing)}; of another size: {join_names(resized)}; "
            f"not in the manifest: {join_names(unlisted)}",
            fix=_RESTORE,
        )


def check_contents(directory: Path, files: Mapping[str, FileEntry], names: Sequence[str]) -> None:
    """Hashes the files ``names`` and refuses those that are not what was written, and links to the outside.

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
