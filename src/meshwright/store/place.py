"""Where a checkpoint comes to lie: under a temporary name first, and what earlier ones have left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

from meshwright.errors import CheckpointError
from meshwright.store.choice import complete_checkpoints, step_name, verify
from meshwright.store.manifest import sync_directory


def temporary_of(final: Path) -> Path:
    """Where a checkpoint lies until all of it is on the disk."""
    return final.with_name(f".{final.name}.tmp")


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
        shutil.rmtree(path)
    older = [path for step, path in complete_checkpoints(directory) if step < newest_step]
    for path in older[: max(len(older) - (keep - 1), 0)] if keep is not None else []:
        # Renamed first: a deletion that is killed half way must not leave half a checkpoint under a good name.
        half = path.with_name(f".{path.name}.deleted")
        path.rename(half)
        shutil.rmtree(half)
