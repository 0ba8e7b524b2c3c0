"""``config``: what ``init_distributed`` set up, under the names that BMTrain's model code asks for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

from meshwright.runtime.grid import (
    pipe_size,
    process_grid,
    replica_index,
    stage_index,
    tensor_rank,
    tensor_size,
    zero_mesh,
)
from meshwright.runtime.processes import rank, settings, world_size

_VALUES: dict[str, Callable[[], Any]] = {
    "initialized": dist.is_initialized,
    "rank": rank,
    "world_size": world_size,
    "local_rank": lambda: int(os.environ.get("LOCAL_RANK", "0")),
    "local_size": lambda: settings().local_world_size,
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


class _Config(Mapping[str, Any]):
    """Reads the present state; the ``…_comm`` are mesh axes, which :mod:`meshwright.distributed` takes as groups."""

    def __getitem__(self, key: str) -> Any:
        return _VALUES[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(_VALUES)

    def __len__(self) -> int:
        return len(_VALUES)


config = _Config()
"""Read-only, as in ``config["tp_size"]``. Seed: BMTrain, whose streams and NCCL communicators have no counterpart."""
