"""A directory of checkpoints: each one complete or absent, verified before it is loaded, the oldest deleted.

directory/step-00000120/   tensors/shard-….safetensors   the model and the optimizer, one file per rank
                           rng-00000.safetensors …       random generators, one file per rank
                           state.json                    everything else
                           manifest.json                 sizes and SHA-256 of all files, written last
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import safetensors.torch
import torch

from meshwright import runtime
from meshwright.errors import CheckpointError, ConfigError, join_names
from meshwright.store.generators import generator_tensors, set_generators
from meshwright.store.manifest import (
    MANIFEST,
    FileEntry,
    check_contents,
    check_present,
    describe,
    read_manifest,
    storage_errors,
    sync_directory,
    write_durably,
    write_manifest,
)
from meshwright.store.record import RECORD, Record, read_record
from meshwright.store.replicas import begin, completed, load_means
from meshwright.store.shards import file_prefix, load_shards, save_shards
from meshwright.store.snapshot import capture, names_held, plan_restore
from meshwright.store.state import CheckpointInfo, TrainingState
from meshwright.store.union import names_of_others, united

_TENSORS = "tensors"  # a folder of its own: DCP reads every safetensors file in it
_STEP = re.compile(r"step-(\d{8,})")
_DISK = "make room on the disk, and check that the directory may be written; earlier checkpoints are untouched"
_DELETE = "the new checkpoint is complete; delete the old ones by hand, and check who may write into the directory"


class CheckpointStore:
    """Saves training states into a directory and loads them again, in any layout of ranks.

    A checkpoint is written under a temporary name and renamed when all of it is on the disk, so a run that is killed
    at any moment leaves complete checkpoints only. No file is a pickle, and none is read as one.

    Args:
        directory: Shared by all ranks; made when the first checkpoint is saved.
        keep: How many checkpoints to keep, at least 1; None keeps all.

    Raises:
        ConfigError: When ``keep`` is below 1.
    """

    def __init__(self, directory: Path, keep: int | None = 3) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(
                "keep is not a number of checkpoints",
                expected="1 or more, or None",
                got=repr(keep),
                fix="use None to keep all",
            )
        self.directory = Path(directory)
        self.keep = keep

    def save(self, state: TrainingState) -> Path:
        """Saves a training state as ``step-<state.step>``, then deletes the oldest; collective.

        Tensors that are not sharded are written by one of the ranks that hold them: they must be equal on all.

        Returns:
            The new checkpoint's directory, the same on every rank.

        Raises:
            CheckpointError: On every rank: the step exists already, something cannot be stored, or writing failed.
                Earlier checkpoints are untouched and nothing of the new one stays.
            LaunchError: When the ranks are at different steps.
        """
        runtime.check_equal("The step to save", str(state.step), fix="call save at the same step on every rank")
        final = self.directory / f"step-{state.step:08d}"
        temporary = self.directory / f".{final.name}.tmp"
        with runtime.same_on_every_rank(), storage_errors(f"{self.directory} cannot take a checkpoint", _DISK):
            _make_room(final, temporary)
        try:
            self._write(state, temporary)
            with runtime.same_on_every_rank(), storage_errors(f"Writing {final} failed", _DISK):
                if runtime.rank() == 0:
                    temporary.rename(final)
                    sync_directory(self.directory)
        except BaseException:
            if runtime.rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        with (
            runtime.same_on_every_rank(),
            storage_errors(f"Deleting older checkpoints than {final} failed", _DELETE),
        ):
            self._delete_old(state.step)
        return final

    def _write(self, state: TrainingState, directory: Path) -> None:
        rank = runtime.rank()
        begin(state, to_load=False)
        with runtime.same_on_every_rank():
            snapshot = capture(state, runtime.world_size())
        record = united(snapshot.record) if snapshot.replica is None else completed(snapshot.record, snapshot.replica)
        save_shards(snapshot.tensors, directory / _TENSORS)
        with runtime.same_on_every_rank(), storage_errors(f"Writing {directory} failed", _DISK):
            own = {path.name: path for path in (directory / _TENSORS).glob(file_prefix(rank) + "*")}
            write_durably(directory / _rng_name(rank), safetensors.torch.save(generator_tensors()))
            names = [_rng_name(rank), *(f"{_TENSORS}/{name}" for name in own)]
            if rank == 0:
                write_durably(directory / RECORD, record.to_json().encode())
                sync_directory(directory / _TENSORS)
                names.append(RECORD)
            # Hashed by who wrote them, while they are still in that machine's memory.
            entries = {name: describe(directory / name) for name in names}
        every: dict[str, FileEntry] = {}
        for part in runtime.gather_objects(entries):
            every |= part
        with runtime.same_on_every_rank(), storage_errors(f"Writing {directory} failed", _DISK):
            if rank == 0:
                write_manifest(directory, every)

    def _delete_old(self, newest_step: int) -> None:
        if runtime.rank() != 0:
            return
        for remains in self.directory.glob(".step-*.deleted"):
            shutil.rmtree(remains)  # a deletion that was killed half way
        older = [path for step, path in self._complete() if step < newest_step]
        for path in older[: max(len(older) - (self.keep - 1), 0)] if self.keep is not None else []:
            # Renamed first: a deletion that is killed half way must not leave half a checkpoint under a good name.
            remains = self.directory / f".{path.name}.deleted"
            path.rename(remains)
            shutil.rmtree(remains)

    def _complete(self) -> list[tuple[int, Path]]:
        """Complete checkpoints, oldest first."""
        found = [
            (int(match[1]), path) for path in self.directory.glob("step-*") if (match := _STEP.fullmatch(path.name))
        ]
        return sorted((step, path) for step, path in found if (path / MANIFEST).is_file())

    def newest(self) -> Path | None:
        """The complete checkpoint of the highest step, None when there is none; collective, equal on every rank.

        Raises:
            CheckpointError: On every rank, when the directory cannot be read.
        """
        found: Path | None = None
        with runtime.same_on_every_rank(), storage_errors(f"{self.directory} cannot be read", "check its permissions"):
            if runtime.rank() == 0:  # asks the file system once, so that all ranks get one answer
                complete = self._complete()
                found = complete[-1][1] if complete else None
        answer: Path | None = runtime.gather_objects(found)[0]
        return answer

    def load(self, state: TrainingState, checkpoint: Path | None = None) -> CheckpointInfo:
        """Loads a checkpoint into a training state, in place and in whatever layout it has now; collective.

        All files are verified and all entries compared before anything is changed. Parts that ``state`` leaves None
        are not loaded. Random generators go on exactly when the job has as many ranks as the one that saved;
        otherwise they are left as the new job seeded them (see ``CheckpointInfo.rng_restored``).

        Args:
            state: Live objects; ``step``, ``samples_seen`` and ``extra`` are filled in too.
            checkpoint: Directory of one checkpoint; None means the newest.

        Raises:
            CheckpointError: On every rank: there is none, it is incomplete, damaged, or of another model or optimizer.
        """
        path = Path(checkpoint) if checkpoint is not None else self.newest()
        with runtime.same_on_every_rank():
            if path is None:
                raise self._nothing_here()
            _verify(path)
        assert path is not None
        begin(state, to_load=True)
        with runtime.same_on_every_rank():
            record = read_record(path)
            held = names_held(state)
        others = names_of_others(*held)
        with runtime.same_on_every_rank():
            restoration = plan_restore(state, record, others)
            generators = _read_generators(path, record)
        load_shards(restoration.targets, path / _TENSORS)
        if record.outer is not None and any(runtime.gather_objects(bool(restoration.averaged))):
            load_means(restoration.averaged, len(record.outer.replicas), path / _TENSORS)
        with runtime.same_on_every_rank():
            restoration.commit()
            rng_restored = generators is not None and set_generators(generators)
        if restoration.outer is not None:
            restoration.outer.finish()
        return CheckpointInfo(
            path, state.step, state.samples_seen, record.strategy, state.extra, record.world_size, rng_restored
        )

    def _nothing_here(self) -> CheckpointError:
        others = sorted(path.name for path in self.directory.glob("*")) if self.directory.is_dir() else []
        return CheckpointError(
            f"There is no checkpoint in {self.directory}",
            expected=f"a directory step-… with a {MANIFEST}",
            got=join_names(others) if self.directory.is_dir() else "no such directory",
            fix="check the directory, or start from the beginning with --resume none",
        )


def _make_room(final: Path, temporary: Path) -> None:
    if runtime.rank() != 0:
        return
    if final.exists():
        raise CheckpointError(
            f"{final} exists already",
            expected="a step that has not been saved",
            got=f"a checkpoint of {final.name}",
            fix="move it away, or save into another directory; nothing was overwritten",
        )
    if temporary.exists():
        shutil.rmtree(temporary)  # left by a save of this step that was killed
    temporary.mkdir(parents=True)


def _verify(path: Path) -> None:
    """Reads every file once, divided between the ranks."""
    files = read_manifest(path)
    if runtime.rank() == 0:  # thousands of ranks asking for thousands of files would stall a shared file system
        check_present(path, files, folders=[_TENSORS])
    check_contents(path, files, sorted(files)[runtime.rank() :: runtime.world_size()])


def _rng_name(rank: int) -> str:
    return f"rng-{rank:05d}.safetensors"


def _read_generators(path: Path, record: Record) -> dict[str, torch.Tensor] | None:
    if record.world_size != runtime.world_size():
        return None
    file = path / _rng_name(runtime.rank())
    with storage_errors(f"{file} cannot be read", "name an older checkpoint to resume from"):
        return safetensors.torch.load_file(file)
