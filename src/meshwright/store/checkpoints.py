"""A directory of checkpoints: each one complete or absent, verified before it is loaded, the oldest deleted.

directory/step-00000120/   tensors/shard-….safetensors   the model and the optimizer, one file per rank
                           rng-00000.safetensors …       random generators, one file per rank
                           state.json                    everything else
                           manifest.json                 sizes and SHA-256 of all files, written last
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import safetensors.torch
import torch

from meshwright import runtime
from meshwright.errors import CheckpointError, ConfigError
from meshwright.runtime.background import agreeing_over, background_group
from meshwright.store.choice import TENSORS, complete_checkpoints, newest_valid, nothing_valid, step_name
from meshwright.store.generators import set_generators
from meshwright.store.manifest import (
    FileEntry,
    describe,
    storage_errors,
    sync_directory,
    write_durably,
    write_manifest,
)
from meshwright.store.place import (
    Claim,
    commit,
    delete_old,
    make_room,
    own_directory,
    temporary_of,
    warn_of_another_run,
)
from meshwright.store.record import RECORD, Record, consistent, read_record
from meshwright.store.replicas import begin, load_means
from meshwright.store.shards import file_prefix, load_shards, save_shards
from meshwright.store.snapshot import names_held, plan_restore
from meshwright.store.staging import HostCopies, Staged, staged
from meshwright.store.state import CheckpointInfo, TrainingState
from meshwright.store.union import names_of_others
from meshwright.store.writer import failed_before, run_later, wait_for_saves

_DISK = "make room on the disk, and check that the directory may be written; earlier checkpoints are untouched"
_CALLS = "a CheckpointStore's save, load, newest or wait"
_TRIES = 5  # to load the newest, where a run deletes one after the other
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
        self.directory = Path(directory).absolute()  # a program may change where it is between two saves
        self.keep = keep
        self._copies = HostCopies()  # what non_blocking saves are written from
        self._claim: Claim | None = None  # on rank 0, while a save is under way

    def save(self, state: TrainingState, *, non_blocking: bool = False) -> Path:
        """Saves a training state as ``step-<state.step>``, then deletes the oldest; collective.

        Tensors that are not sharded are written by one of the ranks that hold them: they must be equal on all.

        Args:
            state: Live objects.
            non_blocking: Return when each rank has copied its shards to host memory (which takes as much of it, for
                good), and write them from there while training goes on. One save is under way at a time: the next one
                waits for it. When it fails, the next ``save`` warns of that and writes at once, whether or not it
                is ``non_blocking``; the next ``load``, :meth:`wait` or ``shutdown_distributed`` raises it.

        Returns:
            The new checkpoint's directory, the same on every rank; it appears when the checkpoint is complete.

        Raises:
            CheckpointError: On every rank: the step exists already, something cannot be stored, or writing failed.
                Earlier checkpoints are untouched and nothing of the new one stays.
            LaunchError: When the ranks are at different steps.
        """
        runtime.come_together(_CALLS)
        failed = failed_before()
        runtime.check_equal("The step to save", str(state.step), fix="call save at the same step on every rank")
        return self._save(state, non_blocking=non_blocking and not failed)

    def _save(self, state: TrainingState, *, non_blocking: bool) -> Path:
        final = self.directory / step_name(state.step)
        try:
            with runtime.same_on_every_rank(), storage_errors(f"{self.directory} cannot take a checkpoint", _DISK):
                if runtime.rank() == 0:
                    self._claim = Claim(self.directory)
                    warn_of_another_run(self.directory)
                    make_room(final)
        except BaseException:
            self._release()
            raise
        try:
            ready = staged(state)
            if non_blocking:
                with runtime.same_on_every_rank():  # there may be no memory for it
                    ready = self._copies.of(ready)
        except BaseException:
            _forget(final)
            self._release()
            raise
        if non_blocking:
            run_later(self._write_later, ready, final, background_group())
        else:
            self._write(ready, final)
        return final

    def wait(self) -> None:
        """Waits until all saves in the background are on the disk; collective.

        Raises:
            CheckpointError: On every rank, when one of them failed.
        """
        runtime.come_together(_CALLS)
        with runtime.same_on_every_rank():
            wait_for_saves()

    def _write_later(self, ready: Staged, final: Path, group: torch.distributed.ProcessGroup | None) -> None:
        with agreeing_over(group):
            self._write(ready, final)

    def _write(self, ready: Staged, final: Path) -> None:
        try:
            _write_files(ready, temporary_of(final))
            with runtime.same_on_every_rank(), storage_errors(f"Writing {final} failed", _DISK):
                if runtime.rank() == 0:
                    commit(final)
            with (
                runtime.same_on_every_rank(),
                storage_errors(f"Deleting checkpoints older than {final} failed", _DELETE),
            ):
                if runtime.rank() == 0:
                    delete_old(self.directory, ready.record.step, self.keep)
        except BaseException:
            _forget(final)
            raise
        finally:
            self._release()

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def newest(self) -> Path | None:
        """The complete checkpoint of the highest step, None when there is none; collective, equal on every rank.

        What it holds is not read: :meth:`load` passes over one that was damaged after it was written.

        Raises:
            CheckpointError: On every rank, when the directory cannot be read, or a save in the background has failed.
        """
        every = self._complete()
        return every[-1] if every else None

    def _complete(self) -> list[Path]:
        """Complete checkpoints, oldest first; collective."""
        self.wait()
        found: list[Path] = []
        with runtime.same_on_every_rank(), storage_errors(f"{self.directory} cannot be read", "check its permissions"):
            if runtime.rank() == 0:  # asks the file system once, so that all ranks get one answer
                found = [path for _, path in complete_checkpoints(self.directory)]
        answer: list[Path] = runtime.gather_objects(found)[0]
        return answer

    def load(self, state: TrainingState, checkpoint: Path | None = None) -> CheckpointInfo:
        """Loads a checkpoint into a training state, in place and in whatever layout it has now; collective.

        All files are verified and all entries compared before anything is changed. Parts that ``state`` leaves None
        are not loaded. Random generators go on exactly when the job has as many ranks as the one that saved;
        otherwise they are left as the new job seeded them (see ``CheckpointInfo.rng_restored``).

        Args:
            state: Live objects; ``step``, ``samples_seen`` and ``extra`` are filled in too.
            checkpoint: Directory of one checkpoint; None means the newest that is whole: rank 0 warns of damaged ones
                before it, and ``CheckpointInfo.damaged`` names them. One that a run still saving here deletes while it
                is read is left for the next.

        Raises:
            CheckpointError: On every rank: there is none, it is incomplete, damaged, or of another model or optimizer.
        """
        if checkpoint is not None:
            return self._load(state, Path(checkpoint))
        for _ in range(_TRIES - 1):
            newest = self.newest()
            try:
                return self._load(state, None)
            except CheckpointError:
                if newest is None or runtime.gather_objects(newest.exists())[0]:
                    raise
        return self._load(state, None)

    def _load(self, state: TrainingState, checkpoint: Path | None) -> CheckpointInfo:
        path, damaged = self._chosen(checkpoint)
        begin(state, to_load=True)
        with runtime.same_on_every_rank():
            record = read_record(path)
            held = names_held(state)
        others = names_of_others(*held)
        with runtime.same_on_every_rank(), consistent(path):
            restoration = plan_restore(state, record, others)
            generators = _read_generators(path, record)
        load_shards(restoration.targets, path / TENSORS)
        if record.outer is not None and any(runtime.gather_objects(bool(restoration.averaged))):
            load_means(restoration.averaged, len(record.outer.replicas), path / TENSORS)
        with runtime.same_on_every_rank(), consistent(path):
            restoration.commit()
            rng_restored = generators is not None and set_generators(generators)
        if restoration.outer is not None:
            restoration.outer.finish()
        return CheckpointInfo(
            path, state.step, state.samples_seen, record.strategy, state.extra, record.world_size, rng_restored, damaged
        )

    def _chosen(self, checkpoint: Path | None) -> tuple[Path, tuple[str, ...]]:
        """A checkpoint that is whole, and what is wrong with newer ones; collective."""
        self.wait()
        candidates = [checkpoint] if checkpoint is not None else self._complete()[::-1]
        path, damaged = newest_valid(candidates)
        if path is None:
            raise runtime.agreed(nothing_valid(self.directory, damaged) if checkpoint is None else damaged[0])
        own_directory(path.parent)
        for problem in damaged if runtime.rank() == 0 else ():
            warnings.warn(f"passed over a damaged checkpoint, and took {path}: {problem}", stacklevel=4)
        return path, tuple(str(problem) for problem in damaged)


def _forget(final: Path) -> None:
    """Removes what there is of a checkpoint that was not finished."""
    if runtime.rank() == 0:
        shutil.rmtree(temporary_of(final), ignore_errors=True)


def _write_files(ready: Staged, directory: Path) -> None:
    """Writes everything of a checkpoint, the manifest last; collective.

    Raises:
        CheckpointError: On every rank, when any of them cannot write.
    """
    rank = runtime.rank()
    save_shards(ready.tensors, directory / TENSORS)
    with runtime.same_on_every_rank(), storage_errors(f"Writing {directory} failed", _DISK):
        own = {path.name: path for path in (directory / TENSORS).glob(file_prefix(rank) + "*")}
        write_durably(directory / _rng_name(rank), safetensors.torch.save(dict(ready.generators)))
        names = [_rng_name(rank), *(f"{TENSORS}/{name}" for name in own)]
        if rank == 0:
            write_durably(directory / RECORD, ready.record.to_json().encode())
            sync_directory(directory / TENSORS)
            names.append(RECORD)
        # Hashed by who wrote them, while they are still in that machine's memory.
        entries = {name: describe(directory / name) for name in names}
    every: dict[str, FileEntry] = {}
    for part in runtime.gather_objects(entries):
        every |= part
    with runtime.same_on_every_rank(), storage_errors(f"Writing {directory} failed", _DISK):
        if rank == 0:
            write_manifest(directory, every)


def _rng_name(rank: int) -> str:
    return f"rng-{rank:05d}.safetensors"


def _read_generators(path: Path, record: Record) -> dict[str, torch.Tensor] | None:
    if record.world_size != runtime.world_size():
        return None
    file = path / _rng_name(runtime.rank())
    with storage_errors(f"{file} cannot be read", "name an older checkpoint to resume from"):
        return safetensors.torch.load_file(file)
