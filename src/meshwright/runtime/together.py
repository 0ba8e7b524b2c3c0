"""Calls that all ranks make together: who comes alone says so, before it waits in a collective for ranks elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from torch.distributed.distributed_c10d import _get_default_store

from meshwright.errors import LaunchError
from meshwright.runtime.agreement import named_ranks
from meshwright.runtime.processes import rank, world_size

_PATIENCE_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1


def come_together(what: str) -> None:
    """Waits until every rank has come into a call, and tells which ones stay away for long.

    The ranks meet in their store. In a collective, a call that is made on rank 0 only (as under DDP a model is saved)
    would meet whatever the others do next: gloo aborts the process then, and NCCL waits without a word.

    Args:
        what: The call, as users know it.

    Raises:
        LaunchError: When the others have not come within the time limit of the ranks.
    """
    if world_size() == 1:
        return
    store, key = _get_default_store(), f"meshwright/together/{what}"
    number = store.add(f"{key}/{rank()}", 1)
    store.add(key, 1)
    began_s, pause_s, told = time.monotonic(), _FIRST_PAUSE_S, False
    while store.add(key, 0) < number * world_size():
        waited_s = time.monotonic() - began_s
        limit_s = store.timeout.total_seconds() if told else _PATIENCE_S  # type: ignore[attr-defined]
        if waited_s > limit_s:
            absent = [each for each in range(world_size()) if store.add(f"{key}/{each}", 0) < number]
            _tell(what, absent, waited_s, is_over=told)
            told = True
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.3, _LONGEST_PAUSE_S)


def told_by_all(what: str, text: str, patience_s: float | None = None) -> list[str | None]:
    """What every rank says, in rank order; over the store, so that it does no harm when some are in a collective.

    Args:
        what: The occasion; ranks come to it equally often.
        text: Of this rank.
        patience_s: How long the others are waited for; None waits for all of them.

    Returns:
        None for ranks that have not come in time.
    """
    if world_size() == 1:
        return [text]
    store, key = _get_default_store(), f"meshwright/told/{what}"
    number = store.add(f"{key}/times/{rank()}", 1)
    names = [f"{key}/{number}/{each}" for each in range(world_size())]
    store.set(names[rank()], text)
    began_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
    while not store.check(names) and (patience_s is None or time.monotonic() - began_s < patience_s):
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.3, _LONGEST_PAUSE_S)
    return [store.get(name).decode() if store.check([name]) else None for name in names]


def _tell(what: str, absent: Sequence[int], waited_s: float, *, is_over: bool) -> None:
    fix = "call it on every rank, without `if rank == 0:` around it"
    if is_over:
        raise LaunchError(
            f"{what} was not called on every rank",
            expected=f"all of them within {waited_s:.0f} s",
            got=f"nothing of {named_ranks(absent)}",
            fix=fix,
        )
    here = [each for each in range(world_size()) if each not in absent]
    if absent and rank() == here[0]:
        text = f"rank {rank()} has waited {waited_s:.0f} s in {what} for {named_ranks(absent)}; if it stays so: {fix}"
        print(f"meshwright: {text}", file=sys.stderr, flush=True)
