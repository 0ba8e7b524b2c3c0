"""Whole tensors between rank 0 and the ranks that hold parts of them, one tensor at a time."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.optim.whole_state import whole_tensor
from meshwright.runtime import rank, world_size


def collect(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of the whole tensor on the host of rank 0; None elsewhere. Collective for a DTensor."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.to("cpu", copy=True) if rank() == 0 else None
    if not _in_rows_over_the_world(tensor):
        whole = whole_tensor(tensor)
        return whole.to("cpu", copy=True) if rank() == 0 else None
    part = _padded(tensor.to_local().to(tensor.device_mesh.device_type), tensor)  # offloaded ones are on the host
    parts = [torch.empty_like(part) for _ in range(world_size())] if rank() == 0 else None
    dist.gather(part, parts, dst=0)
    return torch.cat(parts)[: tensor.shape[0]].cpu() if parts is not None else None


def spread(source: torch.Tensor | None, target: torch.Tensor) -> None:
    """Copies a whole tensor, which rank 0 holds, into ``target`` or the ranks' parts of it. Collective.

    Args:
        source: On rank 0 a tensor of the target's shape, of any dtype and device; elsewhere None.
        target: A tensor that all ranks hold whole, or a DTensor.
    """
    target = target.detach()
    if not isinstance(target, DTensor):
        if source is not None:
            target.copy_(source)
        if world_size() > 1:
            dist.broadcast(target, src=0)
        return
    local = target.to_local()
    device = target.device_mesh.device_type  # offloaded shards are on the host
    full = source.to(device, target.dtype) if source is not None else None
    if _in_rows_over_the_world(target):
        part = local.new_empty(_padded_shape(target), device=device)
        parts = [_padded(rows, target) for rows in full.split(part.shape[0])] if full is not None else None
        if parts is not None:
            parts += [torch.empty_like(part)] * (world_size() - len(parts))
        dist.scatter(part, parts, src=0)
        local.copy_(part[: local.shape[0]])
        return
    # Rank 0 is on one of several smaller meshes only; and torch scatters interleaved shards only if they are even.
    if target.device_mesh.size() < world_size() or any(isinstance(each, _StridedShard) for each in target.placements):
        full = local.new_empty(target.shape, device=device) if full is None else full.contiguous()
        dist.broadcast(full, src=0)
        local.copy_(distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None).to_local())
        return
    if full is None:  # only its shape counts: takes no memory
        full = local.new_empty((), device=device).expand(target.shape)
    local.copy_(distribute_tensor(full, target.device_mesh, target.placements).to_local())


def _in_rows_over_the_world(tensor: DTensor) -> bool:
    """Whether a tensor is split along dim 0 over all ranks in their order, as Blocks and FSDP2 split."""
    mesh = tensor.device_mesh
    return mesh.ndim == 1 and tensor.placements == (Shard(0),) and mesh.mesh.tolist() == list(range(world_size()))


def _padded_shape(tensor: DTensor) -> tuple[int, ...]:
    return (-(-tensor.shape[0] // world_size()), *tensor.shape[1:])


def _padded(rows: torch.Tensor, tensor: DTensor) -> torch.Tensor:
    """Rows filled up to what every rank sends: collectives want equal sizes."""
    shape = _padded_shape(tensor)
    if rows.shape == shape:
        return rows.contiguous()
    padded = rows.new_zeros(shape)
    padded[: rows.shape[0]] = rows
    return padded
