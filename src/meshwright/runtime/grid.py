"""Where each rank stands when ``init_distributed`` splits the world: pipeline outermost, tensor innermost (BMTrain).

Rank ``r`` of ``W = pipe x zero x tp`` is ``(r // (zero * tp), r // tp % zero, r % tp)`` along ``("pipeline", "zero",
"tensor")``. Ranks of one tensor group work on one batch, and parameters are sharded over ``zero`` inside that split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.runtime.mesh import build_mesh, world_mesh
from meshwright.runtime.processes import require_distributed, settings


@dataclass(frozen=True)
class _Grid:
    """The mesh and the slices of it that modules need: a slice made anew would be another object at every call."""

    whole: DeviceMesh
    parameters: DeviceMesh
    zero: DeviceMesh
    tensor: DeviceMesh
    pipeline: DeviceMesh


_grids: dict[tuple[object, int, int], _Grid] = {}  # of the present world, by its process group, tp_size and pipe_size


def process_grid() -> DeviceMesh:
    """The mesh ``("pipeline", "zero", "tensor")`` over all ranks, made once per world; the first call is collective.

    Raises:
        LaunchError: Before ``init_distributed``.
    """
    return _grid().whole


def parameter_mesh() -> DeviceMesh:
    """The mesh that distributed parameters live on: ``("zero",)``, or ``("zero", "tensor")`` with tensor parallelism.

    Raises:
        LaunchError: Before ``init_distributed``.
    """
    return _grid().parameters if tensor_size() > 1 else world_mesh()


def zero_mesh() -> DeviceMesh:
    """The axis over which parameters are sharded: all ranks, or those with this rank's place in their tensor group."""
    return _grid().zero if tensor_size() > 1 else world_mesh()


def stage_mesh() -> DeviceMesh:
    """The axis over which a pipeline stage shards its parameters: the ranks that run the same blocks."""
    return _grid().zero if pipe_size() > 1 else zero_mesh()


def pipeline_mesh() -> DeviceMesh:
    """The axis along which the stages of this rank's pipeline follow one another."""
    return _grid().pipeline


def pipe_size() -> int:
    """Pipeline stages: ``init_distributed``'s ``pipe_size``; 1 before it."""
    return settings().pipe_size if dist.is_initialized() else 1


def stage_index() -> int:
    """The pipeline stage that this rank runs."""
    return dist.get_rank() // (dist.get_world_size() // pipe_size()) if dist.is_initialized() else 0


def tensor_mesh() -> DeviceMesh:
    """The axis over which single layers are split."""
    return _grid().tensor


def tensor_size() -> int:
    """Ranks of a tensor group: ``init_distributed``'s ``tp_size``; 1 before it."""
    return settings().tp_size if dist.is_initialized() else 1


def tensor_rank() -> int:
    """This rank's place in its tensor group."""
    return dist.get_rank() % tensor_size() if dist.is_initialized() else 0


def replica_index() -> int:
    """Which of the ``world / tp_size`` tensor groups this rank belongs to: ranks of one work on the same samples."""
    return dist.get_rank() // tensor_size() if dist.is_initialized() else 0


def _grid() -> _Grid:
    require_distributed("A process grid")
    key = world, tensor, stages = dist.group.WORLD, tensor_size(), pipe_size()
    if key not in _grids:
        for old in [each for each in _grids if each[0] is not world]:
            del _grids[old]
        axes = [("tensor", tensor), ("zero", dist.get_world_size() // (tensor * stages)), ("pipeline", stages)]
        mesh = build_mesh(axes, None, settings().device.type)
        _grids[key] = _Grid(mesh, mesh["zero", "tensor"], mesh["zero"], mesh["tensor"], mesh["pipeline"])
    return _grids[key]
