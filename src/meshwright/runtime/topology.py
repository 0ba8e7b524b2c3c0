"""The topology of `init_distributed`: pipeline, ZeRO and tensor groups of each rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.runtime.agreement import check_equal
from meshwright.runtime.mesh import build_mesh, world_mesh
from meshwright.runtime.processes import require_distributed, settings


@dataclass(frozen=True)
class ShardAxes:
    """Meshes over which parameters are sharded.

    Made once, since slicing a mesh gives another object at every call.
    """

    parameters: DeviceMesh
    """Mesh of distributed parameters: ``("zero",)``, or ``("zero", "tensor")`` with tensor parallelism."""
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


def ranks_per_host(purpose: str) -> int:
    """Return the number of ranks on each host; collective.

    Args:
        purpose: What cannot work where hosts have different numbers of ranks.

    Raises:
        LaunchError: On every rank, where they have.
    """
    number = settings().local_world_size
    fix = f"start equally many processes on every machine, or do without {purpose}"
    check_equal("The number of ranks on a host", str(number), fix)
    return number


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
