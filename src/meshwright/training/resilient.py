"""Let a training loop of one's own go on after a failure, from snapshots in host memory or a checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from meshwright.errors import ConfigError
from meshwright.runtime import print_rank
from meshwright.store import CheckpointStore, HostSnapshots, TrainingState
from meshwright.store.manifest import step_of
from meshwright.training.accelerated import Accelerated


class resilient:
    """A context in which a loop begins where an earlier attempt of it has stopped; on every rank.

    Entering it restores the newest state that the run has left: a snapshot that all ranks have in their hosts' memory
    (those of another strategy or number of ranks become a checkpoint first), or a checkpoint, in any layout.
    ``run.state`` then says how many steps are done. :meth:`step_done` ends each step. Leaving it saves a last
    checkpoint and removes the snapshots; an error leaves both.

    Whatever starts the program again finds them: ``torchrun --max-restarts 3``, a cluster's scheduler, or the same
    command by hand, all of them on the same hosts for snapshots.

    Args:
        job: The job, of ``accelerate``.
        directory: Of the run, shared by all ranks; checkpoints are in it.
        every: Steps between two snapshots; None takes none.
        checkpoint_every: Steps between two checkpoints; None saves at the end alone.
        keep: Checkpoints to keep.
        max_gb: See :class:`meshwright.store.HostSnapshots`.
        neighbour: The same.

    Attributes:
        state: The training state, with its step and its position in the data.
        source: What the loop has begun with, as text.

    Raises:
        ConfigError: When the job has no optimizer, or a number is below 1.
    """

    def __init__(
        self,
        job: Accelerated,
        directory: str | os.PathLike[str],
        *,
        every: int | None = 1,
        checkpoint_every: int | None = None,
        keep: int | None = 2,
        max_gb: float | None = None,
        neighbour: bool = True,
    ) -> None:
        if job.optim is None or (checkpoint_every is not None and checkpoint_every < 1):
            raise ConfigError(
                "There is nothing to go on with", expected="a job with an optimizer, and checkpoint_every of 1 or more",
                got="optim_func=None" if job.optim is None else f"checkpoint_every={checkpoint_every!r}",
                fix="pass optim_func to accelerate, or correct the number",
            )  # fmt: skip
        self._store, self._checkpoint_every = CheckpointStore(Path(directory) / "checkpoints", keep), checkpoint_every
        self._snapshots = None
        if every is not None:
            self._snapshots = HostSnapshots(Path(directory), every, max_gb=max_gb, neighbour=neighbour)
        strategy = job.strategy.to_json()
        self.state = TrainingState(job.model, job.optim, job.lr_scheduler, strategy=strategy)
        self.source = "the beginning"
        self._saved_step = -1

    def __enter__(self) -> Self:
        newest, strategy = self._store.newest(), self.state.strategy
        self._saved_step = step_of(newest) if newest is not None else -1
        found = None
        if self._snapshots is not None:
            least = max(self._saved_step, 0)
            found = self._snapshots.load(self.state, at_least=least, checkpoints=self._store.directory)
            newest = self._store.newest()  # of other ranks' snapshots, perhaps
        if found is not None:
            self.source = f"the snapshots of step {found.step}"
        elif newest is not None:
            self.source = f"the checkpoint of step {self._store.load(self.state).step}"
        self.state.strategy = strategy
        if self.state.step:
            print_rank(f"meshwright: going on from {self.source}", file=sys.stderr, flush=True)
        return self

    def step_done(self, samples: int = 0) -> None:
        """Count a step, and keep its state where it is time to; on every rank, collective where it saves.

        Args:
            samples: Samples of the step over all ranks, for ``state.samples_seen``.
        """
        self.state.step += 1
        self.state.samples_seen += samples
        if self._checkpoint_every is not None and self.state.step % self._checkpoint_every == 0:
            self._save()
        if self._snapshots is not None:
            self._snapshots.take(self.state)

    def _save(self) -> None:
        if self._saved_step != self.state.step:
            self._store.save(self.state)
            self._saved_step = self.state.step

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._save()
        if self._snapshots is not None:
            self._snapshots.close(remove=error is None)
