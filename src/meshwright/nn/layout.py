"""Which part of a distributed parameter a rank holds, and how modules get at what they compute with.

A parameter is split along dim 0 over the ``zero`` axis. With tensor parallelism that happens inside each tensor rank's
*piece*: of a tensor-split parameter a slice along one dim, of any other the whole. So the DTensor's placements are
``(Shard(0),)``, ``(Shard(0), Replicate())``, or those that FSDP2 gives to tensor-parallel weights.

The gradient of every parameter is that of the mean over all ranks' losses, whatever is exchanged between the ranks. A
piece exists once per tensor group, and backward of parallel layers brings it the sum of its group's losses: that is
divided by ``tp_size``. Every other parameter exists on all ranks, whose gradients are averaged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.runtime import ShardAxes, settings, shard_axes, tensor_rank, tensor_size

_AXES = ("zero", "tensor")  # of the mesh of parameters with tensor parallelism
_ZERO, _TENSOR = 0, 1


def sharded(full: torch.Tensor, axes: ShardAxes | None = None) -> DTensor:
    """Keeps this rank's part of a full tensor, without communication.

    Args:
        full: Equal on all ranks of the mesh.
        axes: Those of a pipeline stage; None for all ranks.

    Returns:
        A DTensor split along dim 0 as ``torch.chunk`` splits: the last ranks may hold less, or nothing.
    """
    mesh = (axes or shard_axes()).parameters
    placements = (Shard(0), Replicate()) if mesh.ndim == 2 else (Shard(0),)
    return _placed(_rows(full, mesh), full.shape, mesh, placements)


def sharded_piece(piece: torch.Tensor, dim: int, axes: ShardAxes | None = None) -> DTensor:
    """Keeps this rank's rows of its tensor rank's piece, without communication.

    Args:
        piece: Equal on all ranks with the same place in their tensor group.
        dim: Along which the pieces of a tensor group make the whole.
        axes: Those of a pipeline stage; None for all ranks.

    Returns:
        A DTensor of the whole's shape.
    """
    shape = _widened(piece.shape, dim)
    over_zero = _StridedShard(0, split_factor=tensor_size()) if dim == 0 else Shard(0)
    axes = axes or shard_axes()
    return _placed(_rows(piece, axes.zero), shape, axes.parameters, (over_zero, Shard(dim)))


def laid_out_like(parameter: DTensor, full: torch.Tensor) -> DTensor:
    """Keeps of a full tensor, equal on all ranks, what this rank holds of ``parameter``; without communication."""
    mesh, placements = parameter.device_mesh, parameter.placements
    if placements == (Shard(0),) or mesh.mesh_dim_names == _AXES:
        return _placed(local_part(full, parameter), full.shape, mesh, placements)
    return distribute_tensor(full, mesh, placements, src_data_rank=None)  # of a wrapper that is not ours


def local_part(full: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """The elements of a full tensor that this rank holds of a distributed parameter, as a view."""
    dim = tensor_dim(parameter)
    mesh = parameter.device_mesh
    return _rows(full if dim is None else local_piece(full, dim), mesh)


def local_piece(full: torch.Tensor, dim: int) -> torch.Tensor:
    """The piece of a full tensor that this rank has in its tensor group, as a view."""
    return full.chunk(tensor_size(), dim)[tensor_rank()]


def tensor_dim(parameter: torch.Tensor) -> int | None:
    """The dim along which tensor ranks hold pieces of a parameter; None where each has the whole."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.mesh_dim_names != _AXES:
        return None
    placement = parameter.placements[_TENSOR]
    return placement.dim if isinstance(placement, Shard) else None


def gather_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank computes with, gathered over the ``zero`` axis: the whole, or its piece. Collective.

    Backward averages the gradient and splits it again.
    """
    assert isinstance(parameter, DTensor)
    mesh, dim = parameter.device_mesh, tensor_dim(parameter)
    if dim is None:
        whole = parameter.redistribute(placements=[Replicate()] * mesh.ndim)
        return whole.to_local(grad_placements=[Partial("avg")] * mesh.ndim)
    shape = list(parameter.shape)
    shape[dim] //= mesh.size(_TENSOR)
    rows = DTensor.from_local(
        parameter.to_local(),
        shard_axes().zero,
        [Shard(0)],
        run_check=False,
        shape=torch.Size(shape),
        stride=_strides(shape),
    )
    piece = rows.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])
    return _OncePerGroup.apply(piece, mesh.size(_TENSOR))


def gathered_piece(parameter: DTensor) -> torch.Tensor:
    """What this rank computes with of a tensor-split parameter that FSDP2 has gathered over the ``zero`` axis."""
    piece = parameter.to_local(grad_placements=parameter.placements)
    return _OncePerGroup.apply(piece, parameter.device_mesh.size())


def without_memory(parameter: torch.Tensor, axes: ShardAxes) -> nn.Parameter:
    """What FSDP2 is given to shard over the ``zero`` axis: the parameter's shapes on ``meta``."""
    shape, dim = list(parameter.shape), tensor_dim(parameter)
    if dim is not None:
        shape[dim] //= tensor_size()
    empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
    if dim is not None:
        assert axes.tensor is not None
        empty = _dtensor(empty, parameter.shape, axes.tensor, (Shard(dim),))
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


class _OncePerGroup(Function):
    """Identity; the gradient, a sum over a tensor group's losses, becomes one over their number."""

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, group_size: int) -> torch.Tensor:
        ctx.group_size = group_size
        return piece.view_as(piece)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0] / ctx.group_size, None


def _rows(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's rows along the first mesh dim, as a view."""
    rows, chunk = whole.shape[0], -(-whole.shape[0] // mesh.size(_ZERO))
    start = min(mesh.get_local_rank(_ZERO) * chunk, rows)
    return whole[start : min(start + chunk, rows)]


def _placed(part: torch.Tensor, shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    device = settings().device
    if part.is_meta:
        return _dtensor(torch.empty(part.shape, dtype=part.dtype, device=device), shape, mesh, placements)
    # A copy even on the same device: a view would keep the full storage alive.
    return _dtensor(part.to(device, copy=True, memory_format=torch.contiguous_format), shape, mesh, placements)


def _dtensor(local: torch.Tensor, shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    meta = TensorMeta(shape, _strides(shape), local.dtype)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]


def _strides(shape: Any) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def _widened(shape: torch.Size, dim: int) -> torch.Size:
    return torch.Size(size * tensor_size() if index == dim else size for index, size in enumerate(shape))
