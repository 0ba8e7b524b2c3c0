"""BMTrain's ``config``: the world that ``init_distributed`` has set up, under the keys that model code reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

from meshwright.errors import ConfigError, did_you_mean
from meshwright.runtime import (
    pipe_size,
    process_grid,
    rank,
    replica_index,
    settings,
    stage_index,
    tensor_rank,
    tensor_size,
    world_mesh,
    world_size,
    zero_mesh,
)

_PLACES: dict[str, tuple[Callable[[], int], Callable[[], int]]] = {
    "pipe": (lambda: rank() % (world_size() // pipe_size()), stage_index),
    "zero": (lambda: 0, rank),
    "tp": (replica_index, tensor_rank),
    "tp_zero": (tensor_rank, replica_index),
}
"""By kind of group: the number of this rank's group, and its place in the group."""


class Topology:
    """This rank's groups and its places in them. Seed: BMTrain."""

    def get_group_id(self, group_name: str) -> int:
        """Return the number of this rank's group of a kind: ``"pipe"``, ``"zero"``, ``"tp"`` or ``"tp_zero"``.

        Raises:
            ConfigError: For another kind.
        """
        return _place(group_name)[0]()

    def get_group_rank(self, group_name: str) -> int:
        """Return this rank's place in its group of a kind; in ``"pipe"``, its stage.

        Raises:
            ConfigError: For another kind.
        """
        return _place(group_name)[1]()


def _place(kind: str) -> tuple[Callable[[], int], Callable[[], int]]:
    if kind not in _PLACES:
        raise ConfigError(
            f"There is no such kind of group{did_you_mean(kind, _PLACES)}",
            expected=f"one of {', '.join(_PLACES)}",
            got=repr(kind),
            fix="see process_grid() for the whole mesh",
        )
    return _PLACES[kind]


_TOPOLOGY = Topology()
_VALUES: dict[str, Callable[[], Any]] = {
    "initialized": dist.is_initialized,
    "rank": rank,
    "world_size": world_size,
    "local_rank": lambda: int(os.environ.get("LOCAL_RANK", "0")),
    "local_size": lambda: settings().local_world_size,
    "zero_level": lambda: settings().zero_level,
    "comm": world_mesh,
    "topology": lambda: _TOPOLOGY,
    "zero_size": world_size,
    "zero_rank": rank,
    "zero_comm": world_mesh,
    "pipe_size": pipe_size,
    "pipe_rank": stage_index,
    "pipe_comm": lambda: process_grid()["pipeline"],
    "micros": lambda: settings().num_micro_batches or pipe_size(),
    "tp_size": tensor_size,
    "tp_rank": tensor_rank,
    "tp_comm": lambda: process_grid()["tensor"],
    "tp_zero_size": lambda: world_size() // tensor_size(),
    "tp_zero_rank": replica_index,
    "tp_zero_comm": zero_mesh,
}


class UnknownKeyError(ConfigError, KeyError):
    """ConfigError that ``in`` and ``get`` of a mapping catch."""

    __str__ = Exception.__str__  # KeyError's own would quote the text


class _Config(Mapping[str, Any]):
    """View of the current state. ``…_comm`` are mesh axes, which :mod:`meshwright.comm` takes as groups."""

    def __getitem__(self, key: str) -> Any:
        if key not in _VALUES:
            raise UnknownKeyError(
                "config has no such key",
                expected=f"one of {', '.join(_VALUES)}",
                got=repr(key),
                fix="leave it out: streams, events and switches of BMTrain's engine have no counterpart",
            )
        return _VALUES[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(_VALUES)

    def __len__(self) -> int:
        return len(_VALUES)


config = _Config()
"""Read-only mapping, as in ``config["tp_size"]``. BMTrain's streams and NCCL communicators have no counterpart."""
