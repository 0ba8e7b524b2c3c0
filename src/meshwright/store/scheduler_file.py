"""Save and load a learning-rate scheduler alone, as JSON whatever the file's name: reading it cannot run code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler

from meshwright.errors import CheckpointError, join_names
from meshwright.runtime import broadcast_object, rank, require_distributed, same_on_every_rank
from meshwright.store.entries import from_plain, to_plain
from meshwright.store.tensor_files import make_folder, write_text

_FORMAT = "meshwright.lr_scheduler"


def save_lr_scheduler(scheduler: LRScheduler, file: str | os.PathLike[str]) -> None:
    """Write a scheduler's state, on rank 0; collective.

    Raises:
        CheckpointError: On every rank, when it holds values that are not plain, or the file cannot be written.
    """
    require_distributed("save_lr_scheduler")
    path = Path(file)
    with same_on_every_rank():
        if rank() == 0:
            state = to_plain(scheduler.state_dict(), "The lr_scheduler's state")
            make_folder(path.parent)
            document = {"format": _FORMAT, "kind": type(scheduler).__name__, "state": state}
            write_text(path, json.dumps(document, indent=1) + "\n")


def load_lr_scheduler(scheduler: LRScheduler, file: str | os.PathLike[str]) -> None:
    """Load a file of :func:`save_lr_scheduler`; collective.

    Raises:
        CheckpointError: On every rank, when the file is absent, damaged, or of another kind of scheduler.
    """
    require_distributed("load_lr_scheduler")
    path, found = Path(file), None
    with same_on_every_rank():
        if rank() == 0:
            found = read_scheduler(path)
            check_fit(scheduler, *found, path)
    _, state = broadcast_object(found)
    restore_scheduler(scheduler, state)


def restore_scheduler(scheduler: LRScheduler, state: dict[str, Any]) -> None:
    """Give a scheduler its state, after the optimizer's, with the rates of its groups, was loaded.

    torch's LambdaLR leaves the rates as they were saved until its next step. They are functions of the position, and a
    run that is resumed with another length has other functions, which its first step must follow, too.
    """
    scheduler.load_state_dict(state)
    if type(scheduler) is LambdaLR:  # the rates of other schedulers depend on the rates before
        rates = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=False)
        for group, base, factor in rates:
            _set_rate(group, base * factor(scheduler.last_epoch))
        scheduler._last_lr = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
    elif type(scheduler) is ChainedScheduler:  # one of our schedulers in it has applied its own rate alone
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=False):
            _set_rate(group, rate)


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)  # a captured CUDA graph reads this very tensor
    else:
        group["lr"] = rate


def read_scheduler(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the name of the class and the state in a file of :func:`save_lr_scheduler`.

    Raises:
        CheckpointError: When it is absent, damaged, or holds something else.
    """
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        if document["format"] != _FORMAT:
            raise ValueError("another format")
        kind, state = document["kind"], from_plain(document["state"])
        if not isinstance(kind, str) or not isinstance(state, dict):
            raise ValueError("no name of a class and state")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} holds no learning-rate scheduler",
            expected="what save_lr_scheduler writes",
            got=f"{type(error).__name__}: {error}",
            fix="check the path",
        ) from error
    return kind, state


def check_fit(scheduler: LRScheduler, kind: str, state: dict[str, Any], path: Path) -> None:
    """Refuse a state of another kind of scheduler, or with values of other types than the scheduler's own.

    torch's schedulers take over everything in a state, methods included.

    Raises:
        CheckpointError: Naming what differs.
    """
    if kind != type(scheduler).__name__:
        raise CheckpointError(
            f"{path} is of another learning-rate scheduler",
            expected=type(scheduler).__name__,
            got=kind,
            fix="use that scheduler, or start a new schedule",
        )
    own = scheduler.state_dict()
    wrong = [name for name in state if name not in own or not _alike(own[name], state[name])]
    if wrong:
        raise CheckpointError(
            f"{path} does not fit this learning-rate scheduler",
            expected=f"its own attributes: {join_names(own)}",
            got=f"another {join_names(map(repr, wrong))}",
            fix="check the file; a damaged one must be written again",
        )


def _alike(own: Any, stored: Any) -> bool:
    """Return whether a stored value can replace a scheduler's own: a number a number, a list a list of the same."""
    if own is None:
        return True
    if isinstance(own, bool | int | float | torch.Tensor):
        return isinstance(stored, bool | int | float | torch.Tensor)
    if isinstance(own, list | tuple) and isinstance(stored, list | tuple):
        return all(_alike(own[0], each) for each in stored) if own else True
    return isinstance(stored, type(own)) or isinstance(own, type(stored))
