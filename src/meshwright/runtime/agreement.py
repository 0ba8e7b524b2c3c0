"""Agreement between ranks: an error on one of them is raised on all, so that nobody waits for the dead."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from meshwright.errors import LaunchError, MeshwrightError
from meshwright.runtime.processes import rank, world_size


@contextlib.contextmanager
def same_on_every_rank() -> Iterator[None]:
    """Runs a block on every rank and, when it failed on any of them, raises the first rank's error on all.

    The block itself must not communicate: a rank that failed would be missing from the collective. Costs one small
    gather. Errors raised here carry ``agreed = True``, so that a program may print them once.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    failed = [(index, found) for index, found in enumerate(gather_objects(_portable(error))) if found is not None]
    if not failed:
        return
    first_rank, first_error = failed[0]
    if first_rank == rank():
        assert error is not None
        first_error = error  # with its own traceback
    elif world_size() > len(failed):
        first_error.add_note(f"(raised on rank {first_rank})")
    first_error.agreed = True
    raise first_error


def _portable(error: Exception | None) -> Exception | None:
    """The error itself when it survives a journey to another rank, else its text."""
    try:
        return pickle.loads(pickle.dumps(error)) if error is not None else None
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def gather_objects(value: Any) -> list[Any]:
    """Gathers one picklable object per rank; a list in rank order, equal on all ranks."""
    if world_size() == 1:
        return [value]
    every: list[Any] = [None] * world_size()
    dist.all_gather_object(every, value)
    return every


def check_equal(what: str, value: str, fix: str) -> None:
    """Raises on every rank unless all ranks hold the same ``value``.

    Raises:
        LaunchError: Naming the first rank that differs from rank 0.
    """
    every = gather_objects(value)
    for index, other in enumerate(every):
        if other != every[0]:
            raise _agreed(
                LaunchError(
                    f"{what} differs between ranks",
                    expected=f"{every[0]} (rank 0)",
                    got=f"{other} (rank {index})",
                    fix=fix,
                )
            )


def _agreed(error: MeshwrightError) -> MeshwrightError:
    error.agreed = True  # type: ignore[attr-defined]
    return error
