"""BMTrain's ``config``: the world that ``init_distributed`` has set up, under the keys that model code reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
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

_KINDS = ("pipe", "zero", "tp", "tp_zero")


@dataclass(frozen=True)
class Topology:
    """This rank's groups and its places in them. Seed: BMTrain.

    Of each kind of group, ``…_idx`` is the number of this rank's group and ``…_id`` its place there, but for the
    pipeline: there ``pipe_idx`` is the number of the group, and ``stage_id`` the place.
    """

    rank: int
    stages: int
    pipe_idx: int
    stage_id: int
    tp_idx: int
    tp_id: int
    zero_idx: int
    zero_id: int
    tp_zero_idx: int
    tp_zero_id: int
    pp_zero_idx: int
    pp_zero_id: int
    pp_tp_zero_idx: int
    pp_tp_zero_id: int

    def get_group_id(self, group_name: str) -> int:
        """Return the number of this rank's group of a kind: ``"pipe"``, ``"zero"``, ``"tp"`` or ``"tp_zero"``.

        Raises:
            ConfigError: For another kind.
        """
        _check_kind(group_name)
        return int(getattr(self, f"{group_name}_idx"))

    def get_group_rank(self, group_name: str) -> int:
        """Return this rank's place in its group of a kind; in ``"pipe"``, its stage.

        Raises:
            ConfigError: For another kind.
        """
        _check_kind(group_name)
        return self.stage_id if group_name == "pipe" else int(getattr(self, f"{group_name}_id"))


def _check_kind(kind: str) -> None:
    if kind not in _KINDS:
        raise ConfigError(
            f"There is no such kind of group{did_you_mean(kind, _KINDS)}",
            expected=f"one of {', '.join(_KINDS)}",
            got=repr(kind),
            fix="see process_grid() for the whole mesh",
        )


def _topology() -> Topology:
    in_stage = rank() % (world_size() // pipe_size())
    return Topology(
        rank=rank(),
        stages=pipe_size(),
        pipe_idx=in_stage,
        stage_id=stage_index(),
        tp_idx=replica_index(),
        tp_id=tensor_rank(),
        zero_idx=0,
        zero_id=rank(),
        tp_zero_idx=tensor_rank(),
        tp_zero_id=replica_index(),
        pp_zero_idx=stage_index(),
        pp_zero_id=in_stage,
        pp_tp_zero_idx=stage_index() * tensor_size() + tensor_rank(),
        pp_tp_zero_id=in_stage // tensor_size(),
    )


def _current_stream() -> Any:
    # Of any device: the CPU's has the same methods, and nothing to wait for.
    return torch.get_device_module(settings().device).current_stream()


_VALUES: dict[str, Callable[[], Any]] = {
    "initialized": dist.is_initialized,
    "rank": rank,
    "world_size": world_size,
    "local_rank": lambda: int(os.environ.get("LOCAL_RANK", "0")),
    "local_size": lambda: settings().local_world_size,
    "zero_level": lambda: settings().zero_level,
    "comm": world_mesh,
    "topology": _topology,
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
    "pipe_enabled": lambda: pipe_size() > 1,
    **dict.fromkeys(
        ("calc_stream", "load_stream", "barrier_stream", "tp_comm_stream", "pp_comm_stream"), _current_stream
    ),
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
                fix="leave it out: events and switches of BMTrain's engine have no counterpart",
            )
        return _VALUES[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(_VALUES)

    def __len__(self) -> int:
        return len(_VALUES)


config = _Config()
"""Read-only mapping, as in ``config["tp_size"]``.

Every ``…_stream`` is the device's current one: FSDP2 orders its own streams with it, so code that waits for BMTrain's
streams waits for the right one.
"""
