"""Write snapshots of another number of ranks, or of another strategy, as a checkpoint, which loads into any layout.

[Note: snapshots move to disk] A snapshot holds the shards of one rank as they lie, and where each begins in the whole
tensor. A run that goes on with fewer ranks, or planned anew, cannot take it, but finds all that a checkpoint needs: of
each earlier rank its own snapshot or the neighbour's copy, on any host that is left. Of each the first rank that reads
it whole writes a file of shards; a part that several earlier ranks had is written once. The records are united as a
save unites them. From then on it is a checkpoint as any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch

from meshwright.runtime import gather_objects, rank, same_on_every_rank
from meshwright.runtime.agreement import gather_on_first
from meshwright.store.checkpoints import Claim, commit, make_room, rng_name, temporary_of
from meshwright.store.manifest import (
    RECORD,
    TENSORS,
    FileEntry,
    Record,
    describe,
    record_of,
    step_name,
    storage_errors,
    wait_until_seen,
    write_durably,
    write_manifest,
)
from meshwright.store.optimizer_state import united_records
from meshwright.store.shards import Box, shard_file, write_shards
from meshwright.store.snapshot import ReplicaParts, completed_by
from meshwright.store.snapshot_files import Contents, DamagedSnapshot, read_bytes, read_snapshot

RANDOM = "random."
"""Before the names of generators' states in a snapshot."""


@dataclass(frozen=True)
class FoundSnapshot:
    """One whole file, as far as its header tells."""

    source: int
    """The rank whose state it holds."""
    step: int
    path: Path
    is_copy: bool
    misfit: str
    """In what it differs from this run; empty if in nothing."""
    finder: int
    """The first rank of the host that has it."""
    layout: tuple[int, str] | None
    """Number of ranks and strategy; None if other code wrote it."""


def move_to_checkpoint(
    found: Sequence[FoundSnapshot], hosts: Sequence[Sequence[int]], directory: Path, newer_than: int
) -> Path | None:
    """Write the newest state that all ranks of another layout have left as a checkpoint; collective.

    Args:
        found: The files on all hosts; the same on every rank.
        hosts: Ranks that see the same files.
        directory: Of the checkpoints.
        newer_than: The step of the newest checkpoint there.

    Returns:
        The checkpoint; None where no such state is whole on the hosts that are left.

    Raises:
        CheckpointError: On every rank, when it cannot be written.
    """
    by_state: dict[tuple[int, int, str], list[FoundSnapshot]] = {}
    for each in found:
        if each.misfit and each.layout is not None and each.step > newer_than:
            by_state.setdefault((each.step, *each.layout), []).append(each)
    for (step, size, _), files in sorted(by_state.items(), key=lambda item: item[0], reverse=True):
        readers = _readers(files, size, hosts)
        if readers is not None:
            own = {source: contents for source, contents in readers.items() if contents is not None}
            return _written(own, size, Path(directory), step)
    return None


def _readers(
    files: Sequence[FoundSnapshot], size: int, hosts: Sequence[Sequence[int]]
) -> dict[int, Contents | None] | None:
    """Read every source's file once, whole; None if a source has none. Elsewhere read ones are None."""
    left = {source: sorted((f for f in files if f.source == source), key=lambda f: f.is_copy) for source in range(size)}
    read: dict[int, Contents | None] = {}
    while len(read) < size:
        tried = {source: left[source].pop(0) for source in range(size) if source not in read and left[source]}
        if len(tried) + len(read) < size:
            return None
        own: dict[int, Contents] = {}
        for source, each in tried.items():
            host = next(ranks for ranks in hosts if each.finder in ranks)
            if host[source % len(host)] == rank():
                with contextlib.suppress(DamagedSnapshot):
                    own[source] = read_snapshot(read_bytes(each.path))
        for part in gather_objects(sorted(own)):
            read |= {source: own.get(source) for source in part}
    return read


def _written(own: Mapping[int, Contents], size: int, directory: Path, step: int) -> Path:
    """Write what this rank has read; collective."""
    final = directory / step_name(step)
    claim: Claim | None = None
    try:
        with _told(final):
            if rank() == 0:
                claim = Claim(directory)
                (make_room(final) / TENSORS).mkdir()
        _write(own, size, temporary_of(final))
        with _told(final):
            if rank() == 0:
                commit(final)
    finally:
        if claim is not None:
            shutil.rmtree(temporary_of(final), ignore_errors=True)
            claim.release()
    return final


@contextlib.contextmanager
def _told(final: Path) -> Any:
    with same_on_every_rank(), storage_errors(f"Writing {final} failed", "make room on the disk"):
        yield


def _write(own: Mapping[int, Contents], size: int, folder: Path) -> None:
    about: dict[int, dict[str, Any]] = {}
    for part in gather_objects({source: _about(contents) for source, contents in own.items()}):
        about |= part
    first: dict[tuple[str, tuple[int, ...]], int] = {}
    for source in range(size):
        for name, (start, shape) in about[source]["boxes"].items():
            if 0 not in shape:
                first.setdefault((name, start), source)
    entries: dict[str, FileEntry] = {}
    with _told(folder):
        wait_until_seen(folder / TENSORS)
        for source, contents in own.items():
            boxes: Mapping[str, Box] = about[source]["boxes"]
            wanted = {name: box for name, box in boxes.items() if first.get((name, box[0])) == source}
            names = [rng_name(source)]
            generators = {n.removeprefix(RANDOM): each for n, each in contents.tensors.items() if n.startswith(RANDOM)}
            write_durably(folder / names[0], safetensors.torch.save(generators))
            if wanted:
                names.append(f"{TENSORS}/{shard_file(source)}")
                write_shards(wanted, contents.tensors, folder / names[1])
            entries |= {name: describe(folder / name) for name in names}
    every = list(gather_on_first(entries))
    with _told(folder):
        if rank() == 0:
            write_durably(folder / RECORD, _united([about[source] for source in range(size)]).to_json().encode())
            every.append({RECORD: describe(folder / RECORD)})
            write_manifest(folder, {name: entry for part in every for name, entry in part.items()})


def _about(contents: Contents) -> dict[str, Any]:
    """Return the record of a snapshot, and the part of each tensor that it has."""
    starts: Mapping[str, Sequence[int]] = contents.about["starts"]
    boxes = {
        name: (tuple(starts.get(name, (0,) * each.ndim)), tuple(each.shape))
        for name, each in contents.tensors.items()
        if not name.startswith(RANDOM)
    }
    return {"record": contents.about["record"], "replica": contents.about["replica"], "boxes": boxes}


def _united(every: Sequence[Mapping[str, Any]]) -> Record:
    """Unite the records of all ranks, as a save does."""
    records = [record_of(each["record"], "a snapshot") for each in every]
    if records[0].outer is None:
        distinct = {repr(sorted(each.tensors)): each for each in reversed(records)}
        parts = [(each.tensors, each.model_values, each.optimizer) for each in reversed(distinct.values())]
        return united_records(records[0], parts)
    replicas: dict[str, ReplicaParts] = {}
    for record, each in zip(records, every, strict=True):
        assert record.outer is not None, "all ranks are of one strategy"
        outer = dataclasses.replace(record.outer, replicas=[])
        part = ReplicaParts(each["replica"], record.outer.replicas[0], record.tensors, outer)
        replicas.setdefault(repr(part), part)
    return completed_by(records[0], list(replicas.values()))
