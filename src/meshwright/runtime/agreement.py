"""Agreement between ranks: an error on one of them is raised on all, so that nobody waits for the dead."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from meshwright.errors import LaunchError, MeshwrightError, join_names
from meshwright.runtime.background import agreement_group
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
    _raise_first(gather_objects(_portable(error)), error)


def gather_from(build: Callable[[], Any]) -> list[Any]:
    """Gathers what ``build()`` returns on every rank; when it failed on any of them, raises the first rank's error.

    Costs one gather for both. ``build`` must not communicate: see :func:`same_on_every_rank`.

    Returns:
        One value per rank, in rank order, equal on all ranks.
    """
    error: Exception | None = None
    value: Any = None
    try:
        value = build()
    except Exception as caught:
        error = caught
    every = gather_objects((value, _portable(error)))
    _raise_first([found for _, found in every], error)
    return [each for each, _ in every]


def _raise_first(errors: list[Any], mine: Exception | None) -> None:
    """Raises the first of the ranks' errors (None: that rank had none), with its own traceback where it is ``mine``."""
    failed = [(index, found) for index, found in enumerate(errors) if found is not None]
    if not failed:
        return
    first_rank, first_error = failed[0]
    if first_rank == rank():
        assert mine is not None
        first_error = mine
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
    group = agreement_group()
    if group is not None:
        _check_alive(group)
    dist.all_gather_object(every, value, group=group)
    return every


def _check_alive(group: dist.ProcessGroup) -> None:
    """Refuses to go on beside training when that has ended: what ranks write without each other is no checkpoint."""
    try:
        dist.get_rank(group)
    except ValueError as error:
        raise LaunchError(
            "The ranks have left each other before a save in the background was done",
            expected="a process group until it is on the disk",
            got=str(error),
            fix="end with meshwright.shutdown_distributed(), which waits for it, in place of "
            "torch.distributed.destroy_process_group(), or wait for the save before that",
        ) from error


def check_equal(what: str, value: str, fix: str) -> None:
    """Raises on every rank unless all ranks hold the same ``value``.

    Raises:
        LaunchError: Naming the ranks that differ from rank 0 as the first of them does.
    """
    check_all_equal((what, value, fix))


def check_all_equal(*claims: tuple[str, str, str]) -> None:
    """Several checks as :func:`check_equal` makes them, for one gather.

    Args:
        claims: What, value and fix of each, in the order in which they are to be told.
    """
    every = gather_objects([value for _, value, _ in claims])
    for (what, _, fix), values in zip(claims, zip(*every, strict=True), strict=True):
        other = next((value for value in values if value != values[0]), None)
        if other is not None:
            raise agreed(
                LaunchError(
                    f"{what} differs between ranks",
                    expected=f"{values[0]} ({_holders(values, values[0])})",
                    got=f"{other} ({_holders(values, other)})",
                    fix=fix,
                )
            )


def _holders(values: Sequence[str], value: str) -> str:
    return named_ranks([rank for rank, each in enumerate(values) if each == value])


def named_ranks(ranks: Sequence[int]) -> str:
    """As in "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {join_names(map(str, ranks))}"


def agreed(error: MeshwrightError) -> MeshwrightError:
    """Marks an error that every rank raises alike, so that a program may print it once."""
    error.agreed = True  # type: ignore[attr-defined]
    return error
