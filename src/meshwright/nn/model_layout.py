"""Layouts of a model's parameters: shards and tensor-parallel pieces, fused rows in rank order, and pipeline stages.

The mesh of a parameter has one dim, ``zero``, or two, ``zero`` and ``tensor``. A tensor group's ranks each compute with
a *piece* of a parameter, cut along any dim; the ranks of the ``zero`` axis each hold *rows* (dim 0) of that piece.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.autograd.function import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from meshwright.errors import ModelError
from meshwright.runtime import ShardAxes, settings, shard_axes, stage_index, tensor_rank, tensor_size
from meshwright.runtime.torch_internals.dtensor import DTensorSpec, StridedShard, TensorMeta
from meshwright.runtime.torch_internals.modules import children_of

_AXES = ("zero", "tensor")
_ZERO, _TENSOR = 0, 1


def sharded(full: torch.Tensor, axes: ShardAxes | None = None) -> DTensor:
    """Shard a full tensor over the ``zero`` axis, without communication.

    Args:
        full: Equal on all ranks of the mesh.
        axes: The axes of a pipeline stage; None for all ranks.

    Returns:
        A DTensor split along dim 0 as ``torch.chunk`` splits: the last ranks may hold less, or nothing.
    """
    mesh = (axes or shard_axes()).parameters
    placements = (Shard(0), Replicate()) if mesh.ndim == 2 else (Shard(0),)
    return _placed(_rows(full, mesh), full.shape, mesh, placements)


def sharded_piece(piece: torch.Tensor, dim: int, axes: ShardAxes | None = None) -> DTensor:
    """Shard a tensor rank's piece over the ``zero`` axis, without communication.

    Args:
        piece: Equal on all ranks with the same tensor rank.
        dim: The dim along which pieces are concatenated to the whole.
        axes: The axes of a pipeline stage; None for all ranks.

    Returns:
        A DTensor of the whole's shape.
    """
    shape = torch.Size(size * tensor_size() if index == dim else size for index, size in enumerate(piece.shape))
    over_zero = StridedShard(0, split_factor=tensor_size()) if dim == 0 else Shard(0)
    axes = axes or shard_axes()
    return _placed(_rows(piece, axes.zero), shape, axes.parameters, (over_zero, Shard(dim)))


def laid_out_like(parameter: DTensor, full: torch.Tensor) -> DTensor:
    """Distribute a full tensor, equal on all ranks, as ``parameter`` is; without communication."""
    mesh, placements = parameter.device_mesh, parameter.placements
    if placements == (Shard(0),) or mesh.mesh_dim_names == _AXES:
        return _placed(local_part(full, parameter), full.shape, mesh, placements)
    # A layout that this module did not make.
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def local_part(full: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """Return a view of the elements of a full tensor that this rank holds of ``parameter``."""
    dim = tensor_dim(parameter)
    mesh = parameter.device_mesh
    return _rows(full if dim is None else local_piece(full, dim), mesh)


def local_piece(full: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a view of this tensor rank's piece of a full tensor."""
    return full.chunk(tensor_size(), dim)[tensor_rank()]


def tensor_dim(parameter: torch.Tensor) -> int | None:
    """Return the dim along which tensor ranks hold pieces of a parameter; None if each has the whole."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.mesh_dim_names != _AXES:
        return None
    placement = parameter.placements[_TENSOR]
    return placement.dim if isinstance(placement, Shard) else None


def gather_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """Gather a parameter over the ``zero`` axis: the whole, or this tensor rank's piece. Collective.

    Backward averages the gradient and shards it again.
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
    """Return this tensor rank's piece of a parameter that FSDP2 has gathered over the ``zero`` axis."""
    piece = parameter.to_local(grad_placements=parameter.placements)
    return _OncePerGroup.apply(piece, parameter.device_mesh.size())


def without_memory(parameter: torch.Tensor, axes: ShardAxes) -> nn.Parameter:
    """Return a parameter of the same shapes on ``meta``, for FSDP2 to shard over the ``zero`` axis."""
    shape, dim = list(parameter.shape), tensor_dim(parameter)
    if dim is not None:
        shape[dim] //= tensor_size()
    empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
    if dim is not None:
        assert axes.tensor is not None
        empty = _dtensor(empty, parameter.shape, axes.tensor, (Shard(dim),))
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


class _OncePerGroup(Function):
    """Identity whose gradient, a sum over the tensor group's losses, is divided by their number."""

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, group_size: int) -> torch.Tensor:
        ctx.group_size = group_size
        return piece.view_as(piece)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0] / ctx.group_size, None


def _rows(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return a view of this rank's rows along the first mesh dim."""
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


# --- [Note: rank order] Fused projections that a tensor axis splits.
#
# A fused projection lists all queries, then all keys, then all values; each rank of a tensor axis needs some of each.
# So the DTensor's whole tensor lists rank 0's queries, keys and values, then rank 1's: rows are in rank order. What
# does not depend on the order of rows (updates, norms, further sharding) works on it as it is. State dicts and
# checkpoints have the model's own order.

_ATTRIBUTE = "_rank_orders"


@dataclass(frozen=True)
class RankOrder:
    """Rank order of one dim of a parameter.

    Args:
        dim: The dim.
        parts: Sizes of the parts fused along it, in the model's own order.
        ranks: Size of the tensor axis; divides every part.
    """

    dim: int
    parts: tuple[int, ...]
    ranks: int

    def source(self) -> torch.Tensor:
        """Return the index in the model's order of every row in rank order, int64."""
        places = torch.arange(sum(self.parts)).split(list(self.parts))
        return torch.cat([part.chunk(self.ranks)[rank] for rank in range(self.ranks) for part in places])

    def to_model(self, tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        """Permute a plain tensor or DTensor from rank order to the model's own; collective for a DTensor."""
        return _permuted(tensor, self.dim if dim is None else dim, self.source().argsort())

    def to_ranks(self, tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        """Permute a tensor from the model's own order to rank order; the inverse of :meth:`to_model`."""
        return _permuted(tensor, self.dim if dim is None else dim, self.source())


@torch.no_grad()
def _permuted(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach().index_select(dim, index.to(tensor.device))
    whole: torch.Tensor = tensor.full_tensor().detach()
    whole = whole.index_select(dim, index.to(whole.device))
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)


def keep_rank_order(module: nn.Module, name: str, order: RankOrder) -> None:
    """Declare that a parameter of a module is in rank order; the state dict keeps the model's own order.

    ``state_dict()`` and ``load_state_dict()`` of such a model are collective. With ``keep_vars=True`` the former holds
    the parameters themselves, in rank order.
    """
    orders = module.__dict__.setdefault(_ATTRIBUTE, {})
    if not orders:
        module.register_state_dict_post_hook(_to_model_order)
        module.register_load_state_dict_pre_hook(_to_rank_order)
    orders[name] = order


def rank_orders(model: nn.Module) -> dict[int, RankOrder]:
    """Return the rank orders of a model's parameters, by the parameter's ``id``."""
    return {
        id(getattr(module, name)): order
        for module in model.modules()
        for name, order in module.__dict__.get(_ATTRIBUTE, {}).items()
    }


def _to_model_order(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    for name, order in module.__dict__[_ATTRIBUTE].items():
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            state_dict[prefix + name] = order.to_model(value)


def _to_rank_order(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, order in module.__dict__[_ATTRIBUTE].items():
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            state_dict[prefix + name] = order.to_ranks(value)


# --- Buffers in half precision that small steps add up in: their fp32 values lie beside them

_FP32 = "_fp32_buffers"


def keep_fp32(module: nn.Module, name: str) -> None:
    """Keep the fp32 value of a buffer beside it, if it is cast; checkpoints have that in the buffer's place."""
    module.__dict__.setdefault(_FP32, {}).setdefault(name, None)


def fp32_buffer(module: nn.Module, name: str) -> torch.Tensor:
    """Return the fp32 value of a buffer that :func:`keep_fp32` named; itself if it is in fp32.

    Where the buffer was changed, the value follows it. What is added to the value must be copied into the buffer.
    """
    buffer: torch.Tensor = getattr(module, name)
    if buffer.dtype == torch.float32:
        return buffer
    values: dict[str, torch.Tensor | None] = module.__dict__[_FP32]
    value = values[name]
    if value is None:
        value = values[name] = buffer.detach().float()
    return value.copy_(torch.where(buffer == value.to(buffer.dtype), value, buffer.float()))


def fp32_buffers(model: nn.Module) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return the buffers that have an fp32 value beside them, and that value, by the buffer's ``id``."""
    return {
        id(buffer): (buffer, fp32_buffer(module, name))
        for module in model.modules()
        for name in module.__dict__.get(_FP32, ())
        if (buffer := getattr(module, name)).dtype != torch.float32
    }


# --- Blocks of other pipeline stages.


class Elsewhere(nn.Module):
    """Placeholder for a block of another stage, so that names and positions are those of the whole model.

    Args:
        block: The block, its tensors on ``meta``.
        stage: The stage that holds it.
    """

    def __init__(self, block: nn.Module, stage: int) -> None:
        from meshwright.inspect import OUTLINE  # late: few runs inspect anything

        super().__init__()
        self.stage = stage
        self.__dict__[OUTLINE] = block  # not a submodule: this rank has no such parameters

    @property
    def outline(self) -> nn.Module:
        """Return the block, without memory."""
        from meshwright.inspect import OUTLINE

        block: nn.Module = self.__dict__[OUTLINE]
        return block

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to run.

        Raises:
            ModelError: Always.
        """
        raise ModelError(
            "A block was called on a rank that does not hold it",
            expected=f"a call on stage {self.stage} of the pipeline",
            got=f"stage {stage_index()}",
            fix="call the PipelineTransformerBlockList as a whole; its blocks cannot be iterated",
        )

    def _load_from_state_dict(self, *args: Any) -> None:
        # Its entries are for other ranks: neither missing nor unexpected here.
        pass

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if _whole_model:
            destination.update(self.outline.state_dict(prefix=prefix, keep_vars=keep_vars))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # Follow conversions of the dtype, so that it is the one on the block's own stage.
        self.outline._apply(lambda each: each.to(fn(torch.empty(0, dtype=each.dtype)).dtype))
        return super()._apply(fn, recurse)


_whole_model: list[None] = []  # as many entries as `whole_model` contexts are active


@contextlib.contextmanager
def whole_model() -> Iterator[None]:
    """Include other stages' tensors in ``state_dict()``, on ``meta``: all ranks then have the same names."""
    _whole_model.append(None)
    try:
        yield
    finally:
        _whole_model.pop()


def stages_of(model: nn.Module, names: Iterable[str]) -> dict[str, int]:
    """Return the stage of every entry of a model's state dict that one stage holds."""
    paths: dict[str, int] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        children = children_of(module)
        if any(isinstance(child, Elsewhere) for child in children.values()):
            for key, child in children.items():
                paths[f"{prefix}{key}."] = child.stage if isinstance(child, Elsewhere) else stage_index()
    return {name: stage for name in names for path, stage in paths.items() if name.startswith(path)}
