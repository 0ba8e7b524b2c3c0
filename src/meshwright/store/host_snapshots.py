"""Keep the newest training states of every rank in memory that its host keeps, so that a failure costs seconds.

[Note: snapshots in host memory] Every few steps each rank copies all that it needs to go on (weights, optimizer,
scaler, schedule, position in the data, random generators) into a file of its host's memory, which outlives the process.
There are two such files for each rank: one keeps the newest step that all ranks have, while the other is written. A
second copy lies at a neighbour, a rank of another host, or on one host in another rank's folder: a lost host, or a
flipped bit, then loses nothing. A thread beside training makes sums and neighbours' copies, and agrees with the other
ranks on which step all of them have.

After a failure all ranks go back to the newest step that every rank has, its own or the neighbour's copy, and to no
mixture of two. Snapshots fit the same strategy, number of ranks and code only, for each holds the shards of one rank as
they lie. For fewer ranks, or another strategy, they become a checkpoint on disk first; see [Note: snapshots move to
disk] in ``store/snapshot_moves.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import CheckpointError, ConfigError, LaunchError, join_names, readable_bytes
from meshwright.optim import OuterOptimizer
from meshwright.optim.dtensors import local_tensor
from meshwright.runtime import (
    any_rank,
    before_leaving,
    broadcast_object,
    first_text,
    gather_objects,
    own_versions,
    rank,
    same_on_every_rank,
    smallest,
    synchronize,
    world_size,
)
from meshwright.runtime.agreement import receive_bytes, send_bytes
from meshwright.runtime.processes import agreeing_over, make_group
from meshwright.store.checkpoints import own_directory
from meshwright.store.entries import TrainingState, generator_tensors, set_generators
from meshwright.store.manifest import record_of, tensor_records
from meshwright.store.snapshot import Restoration, begin, capture, completed_alone, plan_restore
from meshwright.store.snapshot_files import (
    Contents,
    CopiesBesideTraining,
    DamagedSnapshot,
    LateCopies,
    Parts,
    Remembered,
    SnapshotFile,
    read_about,
    read_bytes,
    read_snapshot,
)
from meshwright.store.snapshot_moves import RANDOM, FoundSnapshot, move_to_checkpoint

_TOKEN = ".snapshots"  # in the run's directory: the name of its snapshots
_FOLDER = "meshwright-snapshots-"
_ABANDONED_S = 24 * 3600.0
_TWO = ("a", "b")
# A step begins in Python: data, hooks, launches. It would wait for a thread that has the interpreter, which therefore
# begins a little later: by so much of the time between two snapshots.
_LATER_SHARE, _LATEST_S = 0.03, 0.005


@dataclass(frozen=True)
class SnapshotInfo:
    """Origin of a training state that was restored from host memory."""

    step: int
    copies_of: tuple[int, ...]
    """Ranks whose own snapshot was lost or damaged, and that were restored from the neighbour's copy."""


class HostSnapshots:
    """Snapshots of a training state in host memory; see [Note: snapshots in host memory].

    Call :meth:`load` before the first step and :meth:`take` after every step, on every rank.

    Args:
        directory: The run's, shared by all ranks; it names the snapshots. Made if it is missing.
        every: Steps between two snapshots.
        max_gb: Most memory of this host that the snapshots of one rank may take, copies for its neighbour included, in
            GB (10^9 bytes); None: what there is. Where more is needed, none is taken, and that is told.
        neighbour: Whether a neighbour keeps a second copy.
        folder: Where files lie; None: ``/dev/shm``, or the folder of temporary files where there is none.
        beside: Whether copies are made beside training until the optimizer's next ``step``, where that is possible; see
            [Note: copies beside training] in ``store/snapshot_files.py``. Nothing but ``step`` may change weights then.

    Raises:
        ConfigError: When ``every`` is below 1, or ``max_gb`` not above 0.
    """

    def __init__(
        self,
        directory: Path,
        every: int = 1,
        *,
        max_gb: float | None = None,
        neighbour: bool = True,
        folder: Path | None = None,
        beside: bool = False,
    ) -> None:
        if every < 1 or (max_gb is not None and max_gb <= 0):
            raise ConfigError(
                "These are no snapshots", expected="every of 1 or more, and max_gb above 0 or None",
                got=f"every={every!r}, max_gb={max_gb!r}", fix="correct them, or leave snapshots out",
            )  # fmt: skip
        self.directory, self.every = Path(directory).absolute(), every
        self._max_bytes = None if max_gb is None else round(max_gb * 1e9)
        self._wants_neighbour = neighbour
        self._memory = folder or _host_memory()
        self._folder: Path | None = None  # None: not open, or off
        self._is_open = False
        self._code = ""
        self._hosts: list[list[int]] = []  # ranks that see the same files
        self._group: dist.ProcessGroup | None = None  # of all ranks, for the thread
        self._beside = CopiesBesideTraining(self.wait) if beside else None
        self._files: dict[Path, SnapshotFile] = {}
        self._steps: dict[Path, int] = {}
        self._parts, self._records = Remembered(Parts), Remembered(tensor_records)
        self._common = -1  # the newest step that all ranks have
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._taken_s = time.monotonic()
        self._has_looked = False  # at what earlier attempts have left
        self._told: set[str] = set()
        self.have_moved = False
        """Whether :meth:`load` has written snapshots of another layout as a checkpoint."""

    # --- Taking

    def is_due(self, step: int) -> bool:
        """Return whether a snapshot of this step is taken."""
        return step % self.every == 0

    def take(self, state: TrainingState) -> None:
        """Take a snapshot if it is time to; on every rank, after the step. What goes wrong is told, and costs no step.

        Raises:
            CheckpointError: When something in the state cannot be stored.
        """
        if not self.is_due(state.step):
            return
        self._open()
        if self._folder is None:
            return
        self.wait()
        if not self._has_looked:
            self._drop_others(-1, self._listed(state))
        live, tensors, about = self._captured(state)
        file: SnapshotFile | None = self._next_file(rank(), rank())
        late: LateCopies | None = None
        needed = sum(tensor.nbytes for tensor in tensors.values()) * self.num_copies
        if self._max_bytes is not None and needed > self._max_bytes:
            limit = readable_bytes(self._max_bytes)
            self._tell("limit", f"no snapshots: they need {readable_bytes(needed)}, and max_gb allows {limit}")
            file = None
        else:
            try:
                assert file is not None
                if self._beside is None:
                    file.copy(tensors)
                else:
                    late = self._beside.copy(file, tensors, self._beside.candidates(state.optim, live))
            except OSError as error:
                self._no_room(state.step, error)
                file = None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="meshwright-snapshot")
        since_s, self._taken_s = time.monotonic() - self._taken_s, time.monotonic()
        self._thread.submit(time.sleep, min(_LATER_SHARE * since_s, _LATEST_S))
        self._pending = self._thread.submit(self._finish, file, late, about, rank(), world_size())

    @property
    def num_copies(self) -> int:
        """Number of states of one rank that its host keeps, those for a neighbour included."""
        return 2 * (2 if self._wants_neighbour and world_size() > 1 else 1)

    def _captured(
        self, state: TrainingState
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
        """Name everything that this rank needs to go on alone: live tensors, its parts with generators, all else."""
        begin(state, to_load=False)
        found = capture(state, world_size(), alone=True, records=self._records)
        replica, replicas = 0, 1
        if isinstance(state.optim, OuterOptimizer):
            replica, replicas = state.optim.replicas.rank, state.optim.replicas.size
        record = completed_alone(found, replicas)
        parts = self._parts(found.tensors)
        parts.local.update({RANDOM + name: tensor for name, tensor in generator_tensors().items()})
        about = {"rank": rank(), "step": state.step, **self._identity(state), "replica": replica}
        return parts.live, parts.local, about | {"starts": parts.starts, "record": record}

    def _identity(self, state: TrainingState) -> dict[str, Any]:
        return {"ranks": world_size(), "strategy": state.strategy, "code": self._code}

    def _finish(
        self, file: SnapshotFile | None, late: LateCopies | None, about: dict[str, Any], own: int, size: int
    ) -> None:
        """Complete a snapshot, and bring it to the neighbour; beside training."""
        try:
            changed = late.make() if late is not None else set()
            if changed and self._beside is not None:
                what = f"{join_names(sorted(changed))} changed before the next update"
                self._tell("changed", f"no snapshot of step {about['step']}: {what}; the one before it stays")
                self._beside.changing |= changed
                file = None
            if file is not None:
                file.finish(about)
                self._steps[file.path] = about["step"]
        except OSError as error:
            self._no_room(about["step"], error)
            file = None
        if self._wants_neighbour and len(self._hosts) > 1:
            self._exchange(file, about["step"], own)
        elif self._wants_neighbour and size > 1 and file is not None:
            self._store_copy(file.whole(), own, (own + 1) % size, about["step"])
        # Without the others, this rank's older state stays: it may be the newest that all have.
        with contextlib.suppress(RuntimeError, LaunchError), agreeing_over(self._group):
            (self._common,) = smallest([about["step"] if file is not None else self._common])

    def _store_copy(self, whole: Any, source: int, holder: int, step: int) -> None:
        copy = self._next_file(holder, source)
        try:
            copy.take_over(whole)
        except OSError as error:
            self._no_room(step, error)
        else:
            self._steps[copy.path] = step

    def _no_room(self, step: int, error: OSError) -> None:
        why = error.strerror or str(error)
        self._tell("room", f"no snapshot of step {step} in {self._memory} ({why}); the one before it stays")

    def _exchange(self, file: SnapshotFile | None, step: int, own: int) -> None:
        """Send this rank's snapshot to its neighbour on the next host, and keep those that come."""
        to, every = self._neighbour_of(own), range(sum(map(len, self._hosts)))
        sources = [each for each in every if self._neighbour_of(each) == own]
        whole = torch.frombuffer(file.whole(), dtype=torch.uint8) if file is not None else None
        try:
            size = torch.tensor([0 if whole is None else whole.numel()])
            sent: list[Any] = [dist.isend(size, to, self._group)]
            if whole is not None:
                sent.append(dist.isend(whole, to, self._group))
            for source in sources:
                length = torch.zeros(1, dtype=torch.int64)
                dist.recv(length, source, self._group)
                if int(length):
                    arrived = torch.empty(int(length), dtype=torch.uint8)
                    dist.recv(arrived, source, self._group)
                    self._store_copy(arrived.numpy().data, source, own, step)
            for each in sent:
                each.wait()
        except (RuntimeError, ValueError) as error:  # a neighbour has died while it sent
            why = str(error).splitlines()[0]
            self._tell("neighbour", f"no copy of step {step} at a neighbour ({why}); the one before it stays")

    def _neighbour_of(self, own: int) -> int:
        """Return the rank of the next host that keeps a rank's copies."""
        place = next(number for number, ranks in enumerate(self._hosts) if own in ranks)
        there = self._hosts[(place + 1) % len(self._hosts)]
        return there[self._hosts[place].index(own) % len(there)]

    def _next_file(self, holder: int, source: int) -> SnapshotFile:
        """Return the one of two files of a rank's state that does not hold the step that all ranks have."""
        assert self._folder is not None
        place = self._folder / f"rank-{holder:05d}"
        paths = [place / f"of-{source:05d}-{letter}" for letter in _TWO]
        steps = {path: self._steps.get(path, -1) for path in paths}
        path = min(paths, key=lambda each: (steps[each] == self._common, steps[each]))
        self._steps.pop(path, None)
        if path not in self._files:
            place.mkdir(mode=0o700, exist_ok=True)
        return self._files.setdefault(path, SnapshotFile(path))

    def forget(self, state: TrainingState) -> None:
        """Drop all snapshots, for a run that goes back to an earlier step; collective."""
        self._open()
        if self._folder is not None:
            self.wait()
            self._drop_others(-1, self._listed(state))

    def wait(self) -> None:
        """Wait until the last snapshot is complete, and has arrived at the neighbour."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _tell(self, kind: str, text: str) -> None:
        """Tell each kind of trouble once, from the rank that has it."""
        if kind not in self._told:
            self._told.add(kind)
            print(f"meshwright: rank {rank()}: {text}", file=sys.stderr, flush=True)

    # --- Opening and closing

    def _open(self) -> None:
        """Find the run's folder, who shares it, and which files are there; collective, once."""
        if self._is_open:
            return
        self._is_open = True
        self._code = own_versions()
        token = ""
        with same_on_every_rank():
            if rank() == 0:
                token = _token_of(self.directory)
        token, meeting = broadcast_object((token, uuid.uuid4().hex))
        folder, problem = self._memory / f"{_FOLDER}{token}", ""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                raise PermissionError(f"{folder} belongs to somebody else")
            (folder / f"here-{rank()}").write_text(meeting)
        except OSError as error:
            problem = f"no snapshots: {folder} cannot be written ({error.strerror or error})"
        if found := first_text(problem):
            self._say(found)
            return
        _remove_abandoned(self._memory, folder)
        synchronize()
        here = [path for path in folder.glob("here-*") if path.read_text() == meeting]
        seen = sorted(int(path.name.removeprefix("here-")) for path in here)
        self._hosts = sorted({tuple(each): each for each in gather_objects(seen)}.values())
        synchronize()
        (folder / f"here-{rank()}").unlink(missing_ok=True)
        if world_size() > 1:
            self._group = make_group(backend="gloo")
        self._folder = folder
        _open_snapshots.append(self)

    def _say(self, text: str) -> None:
        if rank() == 0:
            print(f"meshwright: {text}", file=sys.stderr, flush=True)

    def close(self, *, remove: bool = True) -> None:
        """Complete the last snapshot and, at the end of a run, remove all of them; on every rank."""
        with contextlib.suppress(OSError, RuntimeError):
            self.wait()
        if self in _open_snapshots:
            _open_snapshots.remove(self)
        if self._beside is not None:
            self._beside.end()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        for file in self._files.values():
            if remove:
                file.remove()
        folder, self._folder, self._files = self._folder, None, {}
        if folder is not None and remove:
            shutil.rmtree(folder / f"rank-{rank():05d}", ignore_errors=True)
            with contextlib.suppress(OSError):
                folder.rmdir()  # the last rank of the host
        self._is_open = self._has_looked = False

    # --- Loading

    def load(self, state: TrainingState, *, at_least: int = 0, checkpoints: Path | None = None) -> SnapshotInfo | None:
        """Restore the newest state that all ranks have, unless it is older than a step; collective.

        Everything is verified and compared before anything is changed. Newer snapshots, which not every rank has, are
        dropped.

        Args:
            state: Live objects, in the layout that the snapshots were taken in.
            at_least: The step of a checkpoint on disk, which is taken instead of an older snapshot.
            checkpoints: Where snapshots of another strategy or number of ranks are written as a checkpoint, to be
                loaded then; None: they are dropped.

        Returns:
            Where it comes from; None when no snapshot fits, which is told if there are any.
        """
        self._open()
        if self._folder is None:
            return None
        self.wait()
        found = self._listed(state)
        by_step: dict[int, set[int]] = {}
        for each in found:
            if not each.misfit:
                by_step.setdefault(each.step, set()).add(each.source)
        common = [step for step, sources in by_step.items() if len(sources) == world_size() and step >= at_least]
        for step in sorted(common, reverse=True):
            contents, is_copy = self._contents(step, found)
            if any_rank(contents is None):
                self._say(f"the snapshots of step {step} are not whole on every rank: an older state is taken")
                continue
            assert contents is not None
            if problem := first_text(self._restored(state, contents)):
                self._say(f"the snapshots of step {step} are of another model: {problem}")
                break
            self._drop_others(step, found)
            if checkpoints is not None:
                own_directory(checkpoints)
            return SnapshotInfo(step, tuple(r for r, each in enumerate(gather_objects(is_copy)) if each))
        odd = sorted({each.misfit for each in found if each.misfit})
        moved = self._moved(found, at_least, checkpoints) if odd and checkpoints is not None else None
        self.have_moved = moved is not None
        if moved is not None:
            self._say(f"the snapshots in host memory become {moved}: {odd[0]}")
        elif odd:
            self._say(f"the snapshots in host memory are not taken: {odd[0]}")
        self._drop_others(-1, found)
        return None

    def _moved(self, found: Sequence[FoundSnapshot], at_least: int, checkpoints: Path) -> Path | None:
        """Write snapshots of another layout as a checkpoint; where the disk refuses, an older state is taken."""
        try:
            return move_to_checkpoint(found, self._hosts, checkpoints, at_least)
        except CheckpointError as error:
            self._say(f"the snapshots in host memory cannot become a checkpoint: {error}")
            return None

    def _listed(self, state: TrainingState) -> list[FoundSnapshot]:
        """List the files of all hosts, each looked through by its first rank; collective."""
        assert self._folder is not None
        own: list[FoundSnapshot] = []
        if rank() == self._own_host()[0]:
            wanted = self._identity(state)
            for path in sorted(self._folder.glob("rank-*/of-*")):
                with contextlib.suppress(DamagedSnapshot):
                    about = read_about(read_bytes(path))
                    is_copy = rank_of_folder(path) != about["rank"]
                    misfit, layout = _difference(wanted, about), None
                    if about.get("code") == wanted["code"]:
                        layout = about["ranks"], hashlib.sha256(about["strategy"].encode()).hexdigest()
                    own.append(FoundSnapshot(about["rank"], about["step"], path, is_copy, misfit, rank(), layout))
        return [each for part in gather_objects(own) for each in part]

    def _own_host(self) -> list[int]:
        return next(ranks for ranks in self._hosts if rank() in ranks)

    def _contents(self, step: int, found: Sequence[FoundSnapshot]) -> tuple[Contents | None, bool]:
        """Read this rank's state of a step: its own, a copy on this host, or one that another host sends; collective.

        Returns:
            The state, None if there is no whole one; and whether it is a copy.
        """
        fitting = [each for each in found if each.step == step and not each.misfit]
        contents, is_copy = None, False
        for each in sorted(fitting, key=lambda each: each.is_copy):
            if contents is None and each.source == rank() and each.finder == self._own_host()[0]:
                with contextlib.suppress(DamagedSnapshot):
                    contents, is_copy = read_snapshot(read_bytes(each.path)), each.is_copy
        lacking = [number for number, lacks in enumerate(gather_objects(contents is None)) if lacks]
        for number in lacking:
            for each in fitting:
                if each.source == number:
                    arrived = self._sent(each, number)
                    if number == rank() and contents is None and arrived:
                        with contextlib.suppress(DamagedSnapshot):
                            contents, is_copy = read_snapshot(arrived), True
        return contents, is_copy

    def _sent(self, each: FoundSnapshot, to: int) -> bytearray | None:
        """Bring a file from the host that has it to a rank of another one; every rank calls it."""
        if each.finder == next(ranks for ranks in self._hosts if to in ranks)[0]:
            return None  # it has looked at this one
        if rank() == each.finder:
            content = b"\0"
            with contextlib.suppress(DamagedSnapshot):
                content = bytes(read_bytes(each.path))
            send_bytes(content, to)
        return bytearray(receive_bytes(each.finder)) if rank() == to else None

    def _restored(self, state: TrainingState, contents: Contents) -> str:
        """Check a rank's own state on all ranks, and restore it; collective.

        Returns:
            What is wrong on this rank; nothing has changed then on any.
        """
        begin(state, to_load=True)
        problem, restoration = "", None
        try:
            restoration = plan_restore(state, record_of(contents.about["record"], "a snapshot"))
            problem = _misfit(restoration, contents)
        except (CheckpointError, ValueError, KeyError, TypeError) as error:
            problem = str(error).splitlines()[0]
        if any_rank(bool(problem)):
            return problem
        assert restoration is not None
        with torch.no_grad():
            for name, target in restoration.targets.items():
                local_tensor(target.detach()).copy_(contents.tensors[name])
        restoration.commit()
        if restoration.outer is not None:
            restoration.outer.finish()
        random = {n.removeprefix(RANDOM): t.clone() for n, t in contents.tensors.items() if n.startswith(RANDOM)}
        set_generators(random)
        return ""

    def _drop_others(self, step: int, found: Sequence[FoundSnapshot]) -> None:
        """Remove what is newer than the step that all ranks go on from, and what does not fit; collective.

        It would later stand beside snapshots of another attempt.
        """
        assert self._folder is not None
        self._has_looked, self._common = True, step
        own = [each for each in found if each.finder == self._own_host()[0]]
        stays = [each for each in own if each.step <= step and not each.misfit]
        for each in own if rank() == self._own_host()[0] else ():
            if each not in stays:
                with contextlib.suppress(OSError):
                    if each.misfit:  # no process has it open
                        each.path.unlink(missing_ok=True)
                    else:
                        SnapshotFile(each.path).clear()
        if rank() == self._own_host()[0]:
            for folder in self._folder.glob("rank-*"):
                if rank_of_folder(folder / "of") >= world_size():
                    shutil.rmtree(folder, ignore_errors=True)
        self._steps = {each.path: each.step for each in stays}
        synchronize()


def _misfit(restoration: Restoration, contents: Contents) -> str:
    """Return the first tensor whose shard lies otherwise than in the snapshot; empty if there is none."""
    for name, target in restoration.targets.items():
        local, stored = local_tensor(target.detach()), contents.tensors.get(name)
        if stored is None or (stored.shape, stored.dtype) != (local.shape, local.dtype):
            return f"{name} is {tuple(local.shape)} of {local.dtype} here"
    return "" if not restoration.averaged else "it has another number of replicas"


def _difference(wanted: dict[str, Any], about: dict[str, Any]) -> str:
    """Return in what a snapshot differs from this run; empty if in nothing."""
    if about.get("ranks") != wanted["ranks"]:
        return f"they are of {about.get('ranks')} ranks, and there are {wanted['ranks']}"
    if about.get("strategy") != wanted["strategy"]:
        return "they are of another strategy"
    return "" if about.get("code") == wanted["code"] else f"they were written by {about.get('code')}"


def rank_of_folder(path: Path) -> int:
    """Return the rank in whose folder a file lies."""
    return int(path.parent.name.removeprefix("rank-"))


def _host_memory() -> Path:
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def _token_of(directory: Path) -> str:
    """Return the name of a run's snapshots; a directory that was made anew has another one."""
    path = directory / _TOKEN
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = path.read_text() if path.is_file() else ""
        if not (found.isalnum() and len(found) == 32):
            found = uuid.uuid4().hex
            path.write_text(found)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written", expected="a directory of the run in which this user may write",
            got=error.strerror or str(error), fix="name another directory, or leave snapshots out",
        ) from error  # fmt: skip
    return found


def _remove_abandoned(memory: Path, own: Path) -> None:
    """Remove snapshots that nobody has written to for a day: their runs were given up."""
    for each in memory.glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):
            newest = max((path.stat().st_mtime for path in _files_of(each)), default=each.stat().st_mtime)
            if each != own and each.stat().st_uid == os.getuid() and time.time() - newest > _ABANDONED_S:
                shutil.rmtree(each, ignore_errors=True)


def _files_of(folder: Path) -> Iterator[Path]:
    return folder.glob("rank-*/*")


_open_snapshots: list[HostSnapshots] = []


@before_leaving
def _complete() -> None:
    for each in _open_snapshots:
        with contextlib.suppress(OSError, RuntimeError):
            each.wait()
