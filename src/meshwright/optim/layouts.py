"""Tensors laid out like a parameter, and how often a shard exists in the world."""

from __future__ import annotations

import contextlib
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import Optimizer

from meshwright.optim.clip import layout_of
from meshwright.optim.held import Held
from meshwright.runtime import world_size

HALF_TYPES = (torch.float16, torch.bfloat16)
_LISTS = ("params", "param_names")  # of a parameter group: one item for each parameter


def is_dense(local: torch.Tensor) -> bool:
    """Whether a tensor's elements fill one block of memory without gaps, in any order of its dims."""
    return local.is_contiguous() or torch.empty_like(local, device="meta").stride() == local.stride()


def wrapped_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` as a shard of a tensor that is laid out like ``parameter``; itself when that is a plain tensor.

    The shard may live on another device than the mesh does (host memory beside a CUDA mesh), as FSDP2's own offload
    has it; ``DTensor.from_local`` would move it.
    """
    if not isinstance(parameter, DTensor):
        return local
    meta = TensorMeta(parameter.shape, parameter.stride(), local.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]


class Peers(NamedTuple):
    """The ranks that train one model together: the world, or those of one replica."""

    group: dist.ProcessGroup | None
    """None for the world, and for one rank alone."""
    size: int

    @classmethod
    def of_world(cls) -> Peers:
        """All ranks."""
        return cls(None, world_size())


def num_replicas(tensor: torch.Tensor, peers: Peers | None = None, held: Held | None = None) -> int:
    """How many ranks (of the world, or of some peers) hold the same shard.

    Args:
        tensor: A parameter, or the gradient of one.
        peers: None for the world.
        held: What methods have told of the parameter; None: a plain tensor is on all ranks, others on their mesh's.

    Raises:
        ModelError: When the tensor is an unreduced partial sum.
    """
    layout, every = layout_of(tensor), (peers or Peers.of_world()).size
    replicas = every if held is None else every * held.on // held.of
    if layout is None:
        return replicas
    mesh, split_dims = layout
    replicas = mesh.size() if held is None else replicas
    for dim in split_dims:
        replicas //= mesh.size(dim)
    return replicas


def by_kind(tensors: Iterable[torch.Tensor]) -> Sequence[list[torch.Tensor]]:
    """Tensors grouped by device and type, without the empty ones: what one multi-tensor kernel takes."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel() > 0:
            kinds[tensor.device, tensor.dtype].append(tensor)
    return list(kinds.values())


def reduced(values: torch.Tensor, operation: dist.ReduceOp.RedOpType, peers: Peers | None = None) -> torch.Tensor:
    """A small tensor reduced over the world (or over some peers), in one all-reduce; the tensor itself for one rank.

    It goes through the device on which the world's ranks meet: a rank that holds no part of a model has nothing else to
    tell it where its peers' numbers are.
    """
    peers = peers or Peers.of_world()
    if peers.size == 1:
        return values
    on_cuda = "nccl" in dist.get_backend_config(dist.group.WORLD)
    values = values.to("cuda" if on_cuda else "cpu")
    dist.all_reduce(values, operation, group=peers.group)
    return values


def step_by_layouts(optimizer: Optimizer) -> None:
    """Lets every step take each parameter group in parts that hold plain tensors only, or DTensors of one mesh only.

    torch's fused and foreach updates take a group's tensors in one operation, which refuses mixtures; groups that are
    updated one tensor at a time stay whole. Between steps the groups are the caller's: learning rates and schedules
    count them.
    """
    if all(len(_parts_of(group)) < 2 for group in optimizer.param_groups):
        return
    step = optimizer.step

    def stepped(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with _in_parts(optimizer):
            return step(*args, **kwargs)

    optimizer.step = types.MethodType(stepped, optimizer)  # type: ignore[method-assign]


@contextlib.contextmanager
def _in_parts(optimizer: Optimizer) -> Iterator[None]:
    groups = optimizer.param_groups
    parts = [(group, part) for group in groups for part in _parts_of(group)]
    optimizer.param_groups = [part for _, part in parts]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, part in parts:  # some optimizers count steps in their groups
            group.update({key: value for key, value in part.items() if key not in _LISTS})


def _updates_lists(group: dict[str, Any]) -> bool:
    """Whether torch updates many tensors of a group in one operation: left the choice, it does so on accelerators."""
    chosen = [group[key] for key in ("fused", "foreach") if group.get(key) is not None]
    if chosen or "foreach" not in group:
        return any(chosen)
    return any(parameter.device.type != "cpu" for parameter in group["params"])


def _parts_of(group: dict[str, Any]) -> list[dict[str, Any]]:
    if not _updates_lists(group):
        return [group]
    by_mesh: dict[Any, list[int]] = defaultdict(list)
    for index, parameter in enumerate(group["params"]):
        by_mesh[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(index)
    lists = [key for key in _LISTS if key in group]
    return [{**group, **{key: [group[key][each] for each in own] for key in lists}} for own in by_mesh.values()]
