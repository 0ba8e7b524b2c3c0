"""Save and load a directory of checkpoints, each of them complete or absent.

[Note: verified checkpoints] A checkpoint of step 12 is the directory ``step-00000012``: tensors in safetensors shards
with an index (see [Note: shards and their index] in ``store/shards.py``), ``state.json`` for everything else, a file of
random generators for every 64 ranks, and ``manifest.json``.

- **Commit.** All files are written into ``.step-00000012.tmp``, then the manifest, then the directory is renamed
  (:func:`commit`). Each of these waits for the disk before the next begins. A run that is killed at any moment leaves
  a hidden directory, which the next save deletes; a directory with the final name is complete.
- **Checksums.** Every rank hashes the files it wrote while they are still in its machine's memory; rank 0 gathers size
  and SHA-256 of all files into the manifest. The manifest holds a digest of itself and has exactly one valid
  form, so that any changed byte shows. Loading reads and hashes every file before anything is changed; the ranks
  divide the files, so that a rank hashes those that it loads where the layout has not changed. Of several checkpoints
  the newest whole one is loaded, and damaged ones are named.
- **One reader.** Rank 0 alone lists directories and reads manifest, record and index; the others are told. What rank 0
  has seen and another rank does not see yet is waited for, 30 s at most: network file systems show files late.
- **Retention.** After the commit, the oldest are deleted until ``keep`` are left. Each is renamed first, so that a
  deletion that is killed half way leaves no half checkpoint under a good name.
- **One writer.** A lock on the directory keeps two processes from mixing their files (:class:`Claim`).

No file is a pickle, and none is read as one. :mod:`meshwright.store.manifest` reads and writes the record and the
manifest; :mod:`meshwright.store.snapshot` collects the state that goes into them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from meshwright import runtime
from meshwright.errors import CheckpointError, ConfigError
from meshwright.optim.dtensors import local_tensor, wrapped_like
from meshwright.runtime import synchronize_device
from meshwright.runtime.agreement import gather_on_first, receive_bytes, send_bytes
from meshwright.runtime.processes import agreeing_over, background_group
from meshwright.store.entries import CheckpointInfo, TrainingState, generator_tensors, model_entries, set_generators
from meshwright.store.manifest import (
    RECORD,
    TENSORS,
    FileEntry,
    Record,
    complete_checkpoints,
    consistent,
    describe,
    newest_valid,
    nothing_valid,
    read_record,
    step_name,
    storage_errors,
    sync_directory,
    verify,
    wait_until_seen,
    write_durably,
    write_manifest,
)
from meshwright.store.optimizer_state import names_of_others, names_on_rank, stored_names, united
from meshwright.store.shards import INDEX, save_shards, shard_file, writable
from meshwright.store.snapshot import begin, capture, completed, load_means, plan_restore
from meshwright.store.stored_shards import load_shards, open_shards
from meshwright.store.tensor_files import failed_before, run_later, wait_for_saves

_DISK = "make room on the disk, and check that the directory may be written; earlier checkpoints are untouched"
_CALLS = "a CheckpointStore's save, load, newest or wait"
_TRIES = 5  # attempts to load the newest checkpoint while another run deletes old ones
_DELETE = "the new checkpoint is complete; delete the old ones by hand, and check who may write into the directory"


class CheckpointStore:
    """Saves training states into a directory and loads them again, in any layout of ranks.

    A checkpoint is written under a temporary name and renamed when all of it is on the disk, so a run that is killed
    at any moment leaves complete checkpoints only. No file is a pickle, and none is read as one. See [Note: verified
    checkpoints].

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
        self.directory = Path(directory).absolute()  # the working directory may change between two saves
        self.keep = keep
        self._copies = HostCopies()  # non_blocking saves are written from these
        self._claim: Claim | None = None  # on rank 0, while a save is under way

    def save(self, state: TrainingState, *, non_blocking: bool = False) -> Path:
        """Save a training state as ``step-<state.step>``, then delete the oldest checkpoints; collective.

        Tensors that are not sharded are written by one of the ranks that hold them: they must be equal on all.

        Args:
            state: Live objects.
            non_blocking: Return once each rank has copied its shards to host memory, and write them from there while
                training goes on. The copies keep their host memory for later saves. Only one save runs at a time: the
                next one waits for it. If it fails, the next ``save`` warns of that and writes before it returns, even
                if it is ``non_blocking``; the next ``load``, :meth:`wait` or ``shutdown_distributed`` raises the error.

        Returns:
            The new checkpoint's directory, the same on every rank; it appears when the checkpoint is complete.

        Raises:
            CheckpointError: On every rank: the step exists already, something cannot be stored, or writing failed.
                Earlier checkpoints are untouched, and the unfinished one is removed.
            LaunchError: When the ranks are at different steps.
        """
        runtime.wait_for_all_ranks(_CALLS)
        failed = failed_before()
        with runtime.same_on_every_rank():
            state.settle()
        runtime.check_equal("The step to save", str(state.step), fix="call save at the same step on every rank")
        return self._save(state, non_blocking=non_blocking and not failed)

    def _save(self, state: TrainingState, *, non_blocking: bool) -> Path:
        final = self.directory / step_name(state.step)
        # Whatever can fail early fails here: the error of a save in the background shows only at the next call.
        try:
            with runtime.same_on_every_rank(), storage_errors(f"{self.directory} cannot take a checkpoint", _DISK):
                if runtime.rank() == 0:
                    self._claim = Claim(self.directory)
                    warn_of_another_run(self.directory)
                    make_room(final)
            ready = staged(state)
            if non_blocking:
                with runtime.same_on_every_rank():  # a rank may lack the memory
                    ready = self._copies.of(ready)
        except BaseException:
            self._give_up(final)
            raise
        if non_blocking:
            run_later(self._write_later, ready, final, background_group())
        else:
            self._write(ready, final)
        return final

    def _give_up(self, final: Path) -> None:
        """Remove what was written of a checkpoint, on the rank with the claim, and let others save."""
        if self._claim is not None:
            shutil.rmtree(temporary_of(final), ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def wait(self) -> None:
        """Wait until all saves in the background are on the disk; collective.

        Raises:
            CheckpointError: On every rank, when one of them failed.
        """
        runtime.wait_for_all_ranks(_CALLS)
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
            self._give_up(final)
            raise
        self._release()

    def newest(self) -> Path | None:
        """Return the complete checkpoint of the highest step, or None; collective, equal on every rank.

        Its contents are not read; :meth:`load` skips a checkpoint that was damaged after it was written.

        Raises:
            CheckpointError: On every rank, when the directory cannot be read, or a save in the background has failed.
        """
        every = self._complete()
        return every[-1] if every else None

    def _complete(self) -> list[Path]:
        """Return the complete checkpoints, oldest first; collective."""
        self.wait()
        found: list[Path] = []
        with runtime.same_on_every_rank(), storage_errors(f"{self.directory} cannot be read", "check its permissions"):
            # One rank asks the file system, so that all get the same answer.
            if runtime.rank() == 0:
                found = [path for _, path in complete_checkpoints(self.directory)]
        answer: list[Path] = runtime.broadcast_object(found)
        return answer

    def load(self, state: TrainingState, checkpoint: Path | None = None) -> CheckpointInfo:
        """Load a checkpoint into a training state, in place and in whatever layout it has now; collective.

        All files are verified and all entries compared before anything is changed. Parts that are None in ``state``
        are not loaded. Random generators are restored if the job has as many ranks as the one that saved; otherwise
        they stay as the new job seeded them (see ``CheckpointInfo.rng_restored``).

        Args:
            state: Live objects; ``step``, ``samples_seen`` and ``extra`` are filled in too.
            checkpoint: Directory of one checkpoint. None takes the newest that is whole: rank 0 warns of newer ones
                that are damaged, and ``CheckpointInfo.damaged`` names them. If a run that still saves here deletes the
                checkpoint meanwhile, the next newest is loaded.

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
                if newest is None or runtime.broadcast_object(newest.exists()):
                    raise
        return self._load(state, None)

    def _load(self, state: TrainingState, checkpoint: Path | None) -> CheckpointInfo:
        path, damaged = self._chosen(checkpoint)
        begin(state, to_load=True)
        # Check: nothing changes before every rank has found that everything fits.
        stored_record: Record | None = None
        with runtime.same_on_every_rank():
            if runtime.rank() == 0:
                stored_record = read_record(path)
            own = names_on_rank(model_entries(state.model), state.optim)
        record: Record = runtime.broadcast_object(stored_record)
        others = names_of_others(*own, *stored_names(record))
        with runtime.same_on_every_rank(), consistent(path):
            restoration = plan_restore(state, record, others)
            generators = _read_generators(path, record)
        # Fill the tensors in place, each rank its own parts of them.
        stored = open_shards(path / TENSORS)
        load_shards(restoration.targets, path / TENSORS, stored)
        if record.outer is not None and runtime.any_rank(bool(restoration.averaged)):
            load_means(restoration.averaged, len(record.outer.replicas), path / TENSORS, stored)
        # Commit everything that is not a tensor. Generators come last: the calls before may draw from them.
        with runtime.same_on_every_rank(), consistent(path):
            restoration.commit()
            rng_restored = generators is not None and set_generators(generators)
        if restoration.outer is not None:
            restoration.outer.finish()
        return CheckpointInfo(
            path, state.step, state.samples_seen, record.strategy, state.extra, record.world_size, rng_restored, damaged
        )

    def _chosen(self, checkpoint: Path | None) -> tuple[Path, tuple[str, ...]]:
        """Choose a checkpoint that is whole, and describe the damage of newer ones; collective."""
        self.wait()
        candidates = [checkpoint] if checkpoint is not None else self._complete()[::-1]
        path, damaged = newest_valid(candidates)
        if path is None:
            raise runtime.agreed(nothing_valid(self.directory, damaged) if checkpoint is None else damaged[0])
        own_directory(path.parent)
        for problem in damaged if runtime.rank() == 0 else ():
            warnings.warn(f"passed over a damaged checkpoint, and took {path}: {problem}", stacklevel=4)
        return path, tuple(str(problem) for problem in damaged)


def _write_files(ready: Staged, directory: Path) -> None:
    """Write everything of a checkpoint, the manifest last; collective.

    Raises:
        CheckpointError: On every rank, when any of them cannot write.
    """
    rank = runtime.rank()
    save_shards(ready.tensors, directory / TENSORS)
    generators = _of_neighbours(ready.generators)
    with runtime.same_on_every_rank(), storage_errors(f"Writing {directory} failed", _DISK):
        names = [name for name in (f"{TENSORS}/{shard_file(rank)}",) if (directory / name).is_file()]
        if generators:
            write_durably(directory / rng_name(rank), safetensors.torch.save(generators))
            names.append(rng_name(rank))
        if rank == 0:
            write_durably(directory / RECORD, ready.record.to_json().encode())
            sync_directory(directory / TENSORS)
            names += [RECORD, f"{TENSORS}/{INDEX}"]
        # Each rank hashes what it wrote, while that is still in its machine's memory.
        entries = {name: describe(directory / name) for name in names}
    # The manifest comes last: a directory that has one has everything that it names.
    every: dict[str, FileEntry] = {}
    for part in gather_on_first(entries):
        every |= part
    with runtime.same_on_every_rank(), storage_errors(f"Writing {directory} failed", _DISK):
        if rank == 0:
            write_manifest(directory, every)


# --- Random generators: the states of some neighbouring ranks in one file

_RANKS_PER_FILE = 64


def rng_name(rank: int) -> str:
    """Return the name of the file with the generators of a rank, and of those behind it."""
    return f"rng-{rank:05d}.safetensors"


def _of_neighbours(own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Bring the states of some ranks to the first of them; nothing elsewhere. Every rank calls it."""
    rank = runtime.rank()
    first = rank - rank % _RANKS_PER_FILE
    packed = safetensors.torch.save(dict(own))
    if rank != first:
        send_bytes(packed, first)
        return {}
    found: dict[str, torch.Tensor] = {}
    for each in range(first, min(first + _RANKS_PER_FILE, runtime.world_size())):
        states = safetensors.torch.load(packed if each == first else receive_bytes(each))
        found |= {_state_of(each, name): state for name, state in states.items()}
    return found


def _state_of(rank: int, name: str) -> str:
    return f"{rank}.{name}"


def _read_generators(path: Path, record: Record) -> dict[str, torch.Tensor] | None:
    rank, several = runtime.rank(), record.ranks_per_rng_file
    if record.world_size != runtime.world_size():
        return None
    file = path / rng_name(rank - rank % (several or 1))
    wait_until_seen(file)
    with storage_errors(f"{file} cannot be read", "name an older checkpoint to resume from"):
        if several is None:
            return safetensors.torch.load_file(file)
        with safetensors.safe_open(file, "pt") as found:
            prefix = _state_of(rank, "")
            own = [name for name in list(found.keys()) if name.startswith(prefix)]
            return {name.removeprefix(prefix): found.get_tensor(name) for name in own}


# --- Staging: name the tensors of a training state, and copy them to the host if training goes on meanwhile


@dataclass(frozen=True)
class Staged:
    """Everything that one rank writes of a checkpoint."""

    tensors: Mapping[str, torch.Tensor]
    record: Record
    generators: Mapping[str, torch.Tensor]


def staged(state: TrainingState) -> Staged:
    """Name everything in a training state; collective. The tensors are live: the next step changes them.

    Raises:
        CheckpointError: On every rank, when something in it cannot be stored.
    """
    begin(state, to_load=False)
    with runtime.same_on_every_rank():
        snapshot = capture(state, runtime.world_size())
    # Ranks may hold different parts of a model, or replicas of their own. The record describes all of them.
    record = united(snapshot.record) if snapshot.replica is None else completed(snapshot.record, snapshot.replica)
    with runtime.same_on_every_rank():
        tensors = writable(snapshot.tensors)
    return Staged(tensors, dataclasses.replace(record, ranks_per_rng_file=_RANKS_PER_FILE), generator_tensors())


class HostCopies:
    """Copies of a rank's tensors in host memory, in buffers that every save reuses.

    Allocating memory costs more than filling it: the system provides it page by page, and locks pages that a GPU
    copies into.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def of(self, live: Staged) -> Staged:
        """Copy the tensors to the host; the copies are valid until the next call."""
        tensors = {name: self._copy(name, tensor) for name, tensor in live.tensors.items()}
        for device in {local_tensor(tensor).device for tensor in live.tensors.values()}:
            synchronize_device(device)  # copies from a GPU were only queued
        self._buffers = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        return Staged(tensors, live.record, live.generators)

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        local = local_tensor(tensor)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
        buffer.copy_(local, non_blocking=True)
        return wrapped_like(tensor, buffer)


# --- The directory: one writer, a temporary name, the commit, and deletion; all on rank 0

_own: set[Path] = set()  # directories that this process has resumed from or saved into


def own_directory(directory: Path) -> None:
    """Note that this run has loaded a checkpoint of a directory, and may save into it without a warning."""
    _own.add(directory.resolve())


def warn_of_another_run(directory: Path) -> None:
    """Warn at a run's first save into a directory with checkpoints that the run has not loaded."""
    found = complete_checkpoints(directory) if directory.resolve() not in _own else []
    own_directory(directory)
    if found:
        warnings.warn(
            f"{directory} holds checkpoints up to step {found[-1][0]} that this run has not loaded: load takes the "
            "highest step, whoever wrote it, and the oldest are deleted. What to do: load the newest before training, "
            "or give this run a directory of its own",
            stacklevel=4,
        )


def temporary_of(final: Path) -> Path:
    """Return the directory into which a checkpoint is written until all of it is on the disk."""
    return final.with_name(f".{final.name}.tmp")


class Claim:
    """The right of one process to save into a directory: two that write the same step would mix their files.

    It is a lock of the operating system, which ends with the process, however the process ends. Some network file
    systems have no such locks, and nothing keeps other processes out.

    Args:
        directory: Made if it is missing.

    Raises:
        CheckpointError: When another process is saving there.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._descriptor = -1
        if sys.platform != "win32":
            self._descriptor = os.open(directory, os.O_RDONLY)
            self._lock(directory)

    def _lock(self, directory: Path) -> None:
        import fcntl

        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._close()
            raise CheckpointError(
                f"Another process is saving a checkpoint into {directory}",
                expected="one run that saves into a directory",
                got="two at the same time",
                fix="end the other one, or give this one a directory of its own; nothing was written",
            ) from error
        except OSError:  # this file system cannot lock directories
            self._close()

    def release(self) -> None:
        """Let other processes save. Calling it again does nothing."""
        if self._descriptor >= 0 and sys.platform != "win32":
            import fcntl

            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # unlocks descriptors of forked processes, too
            self._close()

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1


def make_room(final: Path) -> Path:
    """Make the temporary directory of a checkpoint.

    A damaged checkpoint of the same step, such as a run that resumed from an earlier one reaches again, is renamed.

    Raises:
        CheckpointError: When there is a checkpoint of this step already.
    """
    if final.exists():
        _move_aside(final)
    temporary = temporary_of(final)
    if temporary.exists():
        shutil.rmtree(temporary)  # left by a save of this step that was killed
    temporary.mkdir(parents=True)
    return temporary


def _move_aside(final: Path) -> None:
    try:
        verify(final)
    except CheckpointError:
        numbers = range(1, 1000)
        names = (final.with_name(f"damaged-{final.name}" + (f"-{n}" if n > 1 else "")) for n in numbers)
        final.rename(next(name for name in names if not name.exists()))
        return
    raise CheckpointError(
        f"{final} exists already",
        expected="a step that has not been saved",
        got=f"a checkpoint of {final.name}",
        fix="move it away, or save into another directory; nothing was overwritten",
    )


def commit(final: Path) -> None:
    """Give a checkpoint its final name; from now on it exists. See [Note: verified checkpoints]."""
    temporary_of(final).rename(final)
    sync_directory(final.parent)


def delete_old(directory: Path, newest_step: int, keep: int | None) -> None:
    """Delete all but the newest ``keep`` checkpoints up to ``newest_step``, and the remains of killed runs."""
    unfinished = [path for path in directory.glob(".step-*.tmp") if path.name < f".{step_name(newest_step)}.tmp"]
    for path in (*directory.glob(".step-*.deleted"), *unfinished):
        _delete(path)
    older = [path for step, path in complete_checkpoints(directory) if step < newest_step]
    for path in older[: max(len(older) - (keep - 1), 0)] if keep is not None else []:
        # Rename first: a deletion that is killed half way must not leave half a checkpoint under a valid name.
        half = path.with_name(f".{path.name}.deleted")
        path.rename(half)
        _delete(half)


def _delete(path: Path) -> None:
    if path.is_symlink():  # the checkpoint was moved to another disk, and stays there
        path.unlink()
    else:
        shutil.rmtree(path)
