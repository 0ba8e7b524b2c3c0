"""Where a checkpoint comes to lie: under a temporary name first, and what earlier ones have left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import warnings
from pathlib import Path

from meshwright.errors import CheckpointError
from meshwright.store.choice import complete_checkpoints, step_name, verify
from meshwright.store.manifest import sync_directory

_own: set[Path] = set()  # directories whose checkpoints this process has gone on from, or has written


def own_directory(directory: Path) -> None:
    """Notes that this run goes on from what is in a directory: what it saves there belongs to the same run."""
    _own.add(directory.resolve())


def warn_of_another_run(directory: Path) -> None:
    """At a run's first save: warns of checkpoints in the directory that it has not gone on from. For one rank only."""
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
    """Where a checkpoint lies until all of it is on the disk."""
    return final.with_name(f".{final.name}.tmp")


class Claim:
    """One process at a time saves into a directory: two that write the same step would mix their files.

    A lock of the operating system, which ends with the process however that ends. Where the file system has none, as
    some that are shared over a network, nobody is kept out.

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
        except OSError:  # locks of directories are not known here
            self._close()

    def release(self) -> None:
        """Lets others save; harmless when done before."""
        if self._descriptor >= 0 and sys.platform != "win32":
            import fcntl

            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also of what a forked process has inherited
            self._close()

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1


def make_room(final: Path) -> Path:
    """Makes the temporary directory of a checkpoint. For one rank only.

    A damaged checkpoint of the same step, which a run resumed from an earlier one meets again, is renamed.

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
    """Gives a checkpoint its name: it exists from here on. For one rank only."""
    temporary_of(final).rename(final)
    sync_directory(final.parent)


def delete_old(directory: Path, newest_step: int, keep: int | None) -> None:
    """Deletes all but the newest ``keep`` checkpoints up to ``newest_step``, and remains. For one rank only."""
    remains = [*directory.glob(".step-*.deleted")]  # a deletion that was killed half way
    remains += [path for path in directory.glob(".step-*.tmp") if path.name < f".{step_name(newest_step)}.tmp"]
    for path in remains:
        _delete(path)
    older = [path for step, path in complete_checkpoints(directory) if step < newest_step]
    for path in older[: max(len(older) - (keep - 1), 0)] if keep is not None else []:
        # Renamed first: a deletion that is killed half way must not leave half a checkpoint under a good name.
        half = path.with_name(f".{path.name}.deleted")
        path.rename(half)
        _delete(half)


def _delete(path: Path) -> None:
    if path.is_symlink():  # what was moved to another disk stays there
        path.unlink()
    else:
        shutil.rmtree(path)
