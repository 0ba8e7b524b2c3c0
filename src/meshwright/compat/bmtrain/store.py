"""Names of BMTrain's ``store`` that the models built on it call, beside ``save`` and ``load``."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from meshwright.comm.transport import Group, members_of
from meshwright.runtime import gather_objects
from meshwright.store.entries import is_reading_entries
from meshwright.store.model_file import whole_state_dict
from meshwright.store.tensor_files import write_file


def _save_to_rank0(model: nn.Module, destination: dict[str, Any] | None = None, prefix: str = "") -> dict[str, Any]:
    """Return a model's whole state dict on the host of rank 0, and an empty one on other ranks; collective.

    ModelCenter's models have it as their ``state_dict``: so ``save``, ``load`` and checkpoints of such a model arrive
    here, too, and get the live tensors that they ask every model for.

    Args:
        model: As for ``save``.
        destination: The dict to add to; None makes one.
        prefix: Prefix of every name.
    """
    if is_reading_entries():
        into = {} if destination is None else {"destination": destination}
        return nn.Module.state_dict(model, **into, prefix=prefix, keep_vars=True)
    whole = whole_state_dict(model)
    found: dict[str, Any] = OrderedDict() if destination is None else destination
    found.update({prefix + name: value for name, value in whole.items()})
    return found


def allgather_objects(obj: Any) -> list[Any]:
    """Gather one picklable object per rank: a list in rank order, equal on all ranks."""
    return gather_objects(obj)


def broadcast_object(obj: Any, comm: Group = None, src: int = 0) -> Any:
    """Return the object of one rank on every rank of a group.

    Args:
        obj: Any picklable object; only that of ``src`` counts.
        comm: A mesh axis, as in ``config["comm"]``, or a process group; None means the world.
        src: The sender's rank in the group.

    Raises:
        ConfigError: When ``src`` is not a rank of the group.
    """
    members = members_of(comm)
    members.check_place("src", src)
    sent = [obj if members.rank == src else None]
    dist.broadcast_object_list(sent, group=members.group, group_src=src)
    return sent[0]


def async_save_to_file(state_dict: dict[str, Any], file_path: str | os.PathLike[str]) -> None:
    """Write a state dict into a file and say so: the function that BMTrain's callers give to a thread of their own.

    ``save(non_blocking=True)`` writes in the background by itself.
    """
    write_file(Path(file_path), state_dict)
    print("finish save state_dict to ", file_path)
