"""A learning-rate scheduler alone in a file: JSON, whatever its name, so that reading it cannot run code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from meshwright.errors import CheckpointError
from meshwright.runtime import gather_objects, rank, require_distributed, same_on_every_rank
from meshwright.store.file_format import make_folder, write_text
from meshwright.store.plain import from_plain, to_plain

_FORMAT = "meshwright.lr_scheduler"


def save_lr_scheduler(scheduler: LRScheduler, file: str | os.PathLike[str]) -> None:
    """Writes a scheduler's state, on rank 0; collective.

    Raises:
        CheckpointError: On every rank, when it holds what is not plain, or the file cannot be written.
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
    """Loads what :func:`save_lr_scheduler` wrote; collective.

    Raises:
        CheckpointError: On every rank, when the file is absent, damaged, or of another kind of scheduler.
    """
    require_distributed("load_lr_scheduler")
    path, document = Path(file), None
    with same_on_every_rank():
        if rank() == 0:
            document = _read(path)
    document = gather_objects(document)[0]
    if document["kind"] != type(scheduler).__name__:
        raise CheckpointError(
            f"{path} is of another learning-rate scheduler",
            expected=type(scheduler).__name__,
            got=document["kind"],
            fix="use that scheduler, or start a new schedule",
        )
    scheduler.load_state_dict(from_plain(document["state"]))


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        if document["format"] != _FORMAT or not isinstance(document["kind"], str) or "state" not in document:
            raise ValueError("another format")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} holds no learning-rate scheduler",
            expected="what save_lr_scheduler writes",
            got=f"{type(error).__name__}: {error}",
            fix="check the path",
        ) from error
    return document
