"""Files written in the background, one at a time; none is lost at the end of the program."""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError
from meshwright.runtime import before_leaving, rank, same_on_every_rank
from meshwright.store.file_format import write_file

_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="meshwright-save")  # the interpreter waits for it
_pending: list[Future[None]] = []


def write_later(path: Path, state_dict: dict[str, Any]) -> None:
    """Starts writing a state dict nobody else changes."""
    run_later(write_file, path.absolute(), state_dict)  # the program may be elsewhere by then


def run_later(function: Callable[..., None], *arguments: Any) -> None:
    """Starts a write; writes are done one after the other, in the order of the calls."""
    _pending.append(_thread.submit(function, *arguments))


def wait_for_saves() -> None:
    """Waits until all background saves of this process are on disk.

    Raises:
        CheckpointError: When one of them failed; each failure is raised once.
    """
    while _pending:
        _pending.pop(0).result()


def failed_before(stacklevel: int = 3) -> bool:
    """Waits for all background saves, and warns on rank 0 of the first that failed; whether one did. Collective.

    For who saves anew: what failed before must not keep the state of now from being written, at once.
    """
    found: CheckpointError | None = None
    while True:
        try:
            with same_on_every_rank():
                wait_for_saves()
        except CheckpointError as error:
            found = found or error
        else:
            break
    if found is not None and rank() == 0:
        text = f"a save in the background failed, and this one is written at once: {found}"
        warnings.warn(text, stacklevel=stacklevel)
    return found is not None


@atexit.register
def _tell_failure() -> None:
    for failure in (future.exception() for future in _pending):
        if failure is not None:
            print(f"meshwright: a background save failed: {failure}", file=sys.stderr, flush=True)


@before_leaving
def _finish() -> None:
    with same_on_every_rank():
        wait_for_saves()
