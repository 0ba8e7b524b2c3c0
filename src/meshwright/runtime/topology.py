"""The topology of ``init_distributed``: pipeline, ZeRO and tensor groups of each rank, and ``config`` (BMTrain)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import ConfigError, did_you_mean
from meshwright.runtime.mesh import build_mesh, world_mesh
from meshwright.runtime.processes import rank, require_distributed, settings, world_size


@dataclass(frozen=True)
class ShardAxes:
    """Meshes over which parameters are sharded.

    Made once, since slicing a mesh gives another object at every call.
    """

    parameters: DeviceMesh
    """What distributed parameters live on: ``("zero",)``, or ``("zero", "tensor")`` with tensor parallelism."""
    zero: DeviceMesh
    tensor: DeviceMesh | None
    """None without tensor parallelism."""


@dataclass(frozen=True)
class _Grid:
    whole: DeviceMesh
    everywhere: ShardAxes
    stage: ShardAxes
    tensor: DeviceMesh
    pipeline: DeviceMesh


_grids: dict[tuple[object, int, int], _Grid] = {}  # of the present world, by its process group, tp_size and pipe_size


def process_grid() -> DeviceMesh:
    """Return the mesh ``("pipeline", "zero", "tensor")`` over all ranks, made once per world.

    The first call is collective.

    Raises:
        LaunchError: Before ``init_distributed``.
    """
    return _grid().whole


def shard_axes() -> ShardAxes:
    """Return the axes of parameters that all stages of a pipeline hold.

    Raises:
        LaunchError: Before ``init_distributed``.
    """
    # No grid is needed.
    if tensor_size() == 1:
        return ShardAxes(world_mesh(), world_mesh(), None)
    return _grid().everywhere


def stage_axes() -> ShardAxes:
    """Return the axes of parameters that only this rank's pipeline stage holds.

    Raises:
        LaunchError: Before ``init_distributed``.
    """
    return _grid().stage


def parameter_mesh() -> DeviceMesh:
    """Return the mesh of :func:`shard_axes` that distributed parameters live on."""
    return shard_axes().parameters


def zero_mesh() -> DeviceMesh:
    """Return the axis over which parameters are sharded.

    It has all ranks, or those with this rank's place in their tensor group.
    """
    return shard_axes().zero


def pipeline_mesh() -> DeviceMesh:
    """Return the axis along which the stages of this rank's pipeline follow one another."""
    return _grid().pipeline


def pipe_size() -> int:
    """Return the number of pipeline stages; 1 before ``init_distributed``."""
    return settings().pipe_size if dist.is_initialized() else 1


def stage_index() -> int:
    """Return the pipeline stage that this rank runs."""
    return dist.get_rank() // (dist.get_world_size() // pipe_size()) if dist.is_initialized() else 0


def tensor_mesh() -> DeviceMesh:
    """Return the axis over which single layers are split."""
    return _grid().tensor


def tensor_size() -> int:
    """Return the number of ranks in a tensor group; 1 before ``init_distributed``."""
    return settings().tp_size if dist.is_initialized() else 1


def tensor_rank() -> int:
    """Return this rank's place in its tensor group."""
    return dist.get_rank() % tensor_size() if dist.is_initialized() else 0


def replica_index() -> int:
    """Return the number of this rank's tensor group, of ``world / tp_size``.

    Ranks of one group work on the same samples.
    """
    return dist.get_rank() // tensor_size() if dist.is_initialized() else 0


def _grid() -> _Grid:
    require_distributed("A process grid")
    key = world, tensor, stages = dist.group.WORLD, tensor_size(), pipe_size()
    if key not in _grids:
        for old in [each for each in _grids if each[0] is not world]:
            del _grids[old]
        device, size = settings().device.type, dist.get_world_size()
        mesh = build_mesh([("tensor", tensor), ("zero", size // (tensor * stages)), ("pipeline", stages)], None, device)
        # One over all stages is no slice: it joins two axes of the mesh, and FSDP2 wants axes of one root.
        flat = build_mesh([("tensor", tensor), ("zero", size // tensor)], None, device) if tensor > 1 < stages else mesh
        _grids[key] = _Grid(mesh, _axes(flat, tensor), _axes(mesh, tensor), mesh["tensor"], mesh["pipeline"])
    return _grids[key]


def _axes(mesh: DeviceMesh, tensor: int) -> ShardAxes:
    zero = mesh["zero"]
    return ShardAxes(mesh["zero", "tensor"], zero, mesh["tensor"]) if tensor > 1 else ShardAxes(zero, zero, None)


# --- ``config``: the state of ``init_distributed`` under the names that BMTrain's model code asks for.

_PLACES: dict[str, tuple[Callable[[], int], Callable[[], int]]] = {
    "pipe": (lambda: rank() % (world_size() // pipe_size()), stage_index),
    "zero": (lambda: 0, rank),
    "tp": (replica_index, tensor_rank),
    "tp_zero": (tensor_rank, replica_index),
}
"""Number of this rank's group, and its place there, by kind of group."""


class Topology:
    """The groups this rank is in, and its place in each. Seed: BMTrain."""

    def get_group_id(self, group_name: str) -> int:
        """Return the number of this rank's group among those of a kind.

        Kinds are ``"pipe"``, ``"zero"``, ``"tp"`` and ``"tp_zero"``.

        Raises:
            ConfigError: For another kind.
        """
        return _place(group_name)[0]()

    def get_group_rank(self, group_name: str) -> int:
        """Return this rank's place in its group of a kind; in ``"pipe"`` its stage.

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
    """An unknown key of ``config``, which ``in`` and ``get`` of a mapping catch."""

    __str__ = Exception.__str__  # that of KeyError quotes the text


class _Config(Mapping[str, Any]):
    """A view of the present state. Its ``…_comm`` are mesh axes, which :mod:`meshwright.comm` takes as groups."""

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
"""Read-only, as in ``config["tp_size"]``. Seed: BMTrain, whose streams and NCCL communicators have no counterpart."""
