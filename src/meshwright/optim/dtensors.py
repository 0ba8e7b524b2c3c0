"""Optimizers over DTensors: gradient norms and clipping, parameter placement, layouts, and steps on local tensors.

Parameters of one model may be plain tensors and DTensors of several meshes at once, in device and in host memory.
torch's own functions refuse such mixtures, or run DTensor operations that cost more than the arithmetic; everything
here works on local shards and communicates only what has to be summed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from meshwright.errors import ConfigError, ModelError
from meshwright.runtime import world_size
from meshwright.runtime.torch_internals.dtensor import DTensorSpec, TensorMeta, local_shard, spec_of
from meshwright.runtime.torch_internals.optim import (
    INIT_GROUP,
    foreach_clamp_max_,
    foreach_clamp_min_,
    foreach_div_,
    foreach_mul_,
    foreach_norm,
    init_group_of,
)

_ROW = 2**10  # elements of long tensors whose norm is taken at a time
Layout = tuple[DeviceMesh, tuple[int, ...]] | None
"""The mesh of a tensor and the mesh dims that split it; None for a plain tensor."""


@dataclass(frozen=True)
class Stages:
    """Ranks that hold parameters of their own, under names of their own: of a pipeline, and of listed experts."""

    device: torch.device
    group: dist.ProcessGroup | None = None
    """The ranks of the pipeline; None without one."""
    counted_elsewhere: frozenset[torch.Tensor] = frozenset()
    """Parameters that an earlier rank of the pipeline holds too: norms count them there."""
    experts: frozenset[torch.Tensor] = frozenset()
    """Parameters of experts of which each rank of ``expert_group`` holds others. These ranks hold all others alike."""
    expert_group: dist.ProcessGroup | None = None

    def with_masters(self, masters: Mapping[torch.Tensor, torch.Tensor]) -> Stages:
        """Return the same ranks, where the fp32 copies of parameters count as the parameters do."""

        def with_copies(parameters: frozenset[torch.Tensor]) -> frozenset[torch.Tensor]:
            return parameters | {masters[parameter] for parameter in parameters if parameter in masters}

        counted_elsewhere, experts = with_copies(self.counted_elsewhere), with_copies(self.experts)
        return dataclasses.replace(self, counted_elsewhere=counted_elsewhere, experts=experts)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, or a plain tensor itself. Not for autograd.

    Every call returns the same object, so that a replaced shard can be recognised; ``to_local`` of a parameter makes a
    new view each time since torch 2.13.
    """
    return local_shard(tensor) if isinstance(tensor, DTensor) else tensor


def total_norm(
    tensors: Iterable[torch.Tensor],
    norm_type: float = 2.0,
    stages: Stages | None = None,
    experts: Iterable[torch.Tensor] = (),
) -> torch.Tensor:
    """Compute the norm of many tensors as if they were one vector, in fp32 and without waiting for the device.

    Local shards are summed first: a world of any size costs one all-reduce of one number per mesh axis that shards.
    torch's own ``clip_grad_norm_`` fails when parameters live on different meshes, and runs DTensor operations.

    Args:
        tensors: Plain tensors (equal on all ranks) and DTensors (sharded or replicated).
        norm_type: p of the p-norm; ``float("inf")`` for the largest absolute value.
        stages: Adds the tensors of the other pipeline ranks; none may be named twice.
        experts: Further tensors, of which each rank of ``stages.expert_group`` holds others.

    Returns:
        0-dim fp32 tensor (fp64 for fp64 tensors), equal on every rank.

    Raises:
        ModelError: When a tensor is an unreduced partial sum.
    """
    norms = _norms(tensors, norm_type)
    infinite = norm_type == float("inf")
    if stages is not None and stages.expert_group is not None:
        own = _summed(_norms(experts, norm_type), infinite, stages.expert_group, stages.device)
        norms = [*(norm.to(stages.device) for norm in norms), own]
    if stages is not None and stages.group is not None:
        norms = [_summed(norms, infinite, stages.group, stages.device)]
    if not norms:
        return torch.zeros((), dtype=torch.float32)
    whole = _combined(norms, infinite)
    return whole if infinite else whole.pow(1.0 / norm_type)


def total_norm_of(
    found: Iterable[tuple[torch.Tensor, torch.Tensor]], norm_type: float = 2.0, stages: Stages | None = None
) -> torch.Tensor:
    """Return the norm of one tensor for each of many parameters, such as their gradients; see :func:`total_norm`.

    Args:
        found: Pairs of a parameter and its tensor.
        norm_type: See :func:`total_norm`.
        stages: The ranks that hold others, where the parameters are one's part: the norm is the whole model's.
    """
    if stages is None or not (stages.counted_elsewhere or stages.experts):
        return total_norm([tensor for _, tensor in found], norm_type, stages)
    elsewhere, apart = {*map(id, stages.counted_elsewhere)}, {*map(id, stages.experts)}  # tensors are slow to hash
    pairs = [(id(parameter), tensor) for parameter, tensor in found]
    counted = [tensor for key, tensor in pairs if key not in elsewhere and key not in apart]
    return total_norm(counted, norm_type, stages, [tensor for key, tensor in pairs if key in apart])


def _norms(tensors: Iterable[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Return the sum of |x|^p (the maximum for the infinity norm) for each layout and device."""
    listed = [*tensors]
    # Models have thousands of small ones, of one kind: no call for each.
    if not any(issubclass(kind, DTensor) for kind in {*map(type, listed)}) and len({t.device for t in listed}) == 1:
        return [_reduced(None, listed, norm_type)]
    by_layout: dict[tuple[Layout, torch.device], list[torch.Tensor]] = defaultdict(list)
    for tensor in listed:
        local = local_tensor(tensor)
        by_layout[layout_of(tensor), local.device].append(local)
    norms = [_reduced(layout, parts, norm_type) for (layout, _), parts in by_layout.items()]
    several = len({norm.device for norm in norms}) > 1  # some gradients were offloaded
    return [norm.cpu() for norm in norms] if several else norms


def _summed(norms: list[torch.Tensor], infinite: bool, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    own = torch.zeros((), dtype=torch.float32, device=device)  # a rank without gradients takes part, too
    if norms:
        own = _combined([norm.to(device) for norm in norms], infinite)
    dist.all_reduce(own, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
    return own


def _combined(norms: list[torch.Tensor], infinite: bool) -> torch.Tensor:
    if len(norms) == 1:
        return norms[0]
    every = torch.stack(norms)
    return every.max() if infinite else every.sum()


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the mesh of a tensor and the mesh dims that split it; None for a plain tensor.

    Raises:
        ModelError: When the tensor is an unreduced partial sum.
    """
    if not isinstance(tensor, DTensor):
        return None
    split = _split_dims(tensor.placements)
    if split is None:
        raise ModelError(
            "A gradient is an unreduced partial sum",
            expected="gradients that are sharded or replicated",
            got=str(tensor.placements),
            fix="finish the backward pass (with gradient synchronisation) before clipping",
        )
    return tensor.device_mesh, split


@functools.lru_cache
def _split_dims(placements: tuple[Placement, ...]) -> tuple[int, ...] | None:
    """Return the mesh dims that split a tensor; None for a partial sum."""
    if any(isinstance(placement, Partial) for placement in placements):
        return None
    return tuple(dim for dim, placement in enumerate(placements) if not isinstance(placement, Replicate))


def _reduced(layout: Layout, parts: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the sum of |x|^p (or the maximum) over all parts on all ranks that share them."""
    parts = [numbers_of(part, norm_type) if part.is_sparse or part.dtype.is_complex else part for part in parts]
    device, dtype = parts[0].device, _norm_type_of(parts)
    parts = [*compress(parts, map(torch.Tensor.numel, parts))]  # a shard can be empty; its maximum does not exist
    infinite = norm_type == float("inf")
    if parts:
        norms = torch.stack(local_norms(parts, norm_type))
        partial = norms.max() if infinite else norms.pow(norm_type).sum()
    else:
        partial = torch.zeros((), device=device, dtype=dtype)
    if layout is not None:
        mesh, split_dims = layout
        carried = partial.to(mesh.device_type)  # offloaded shards: NCCL's groups know no tensors of the host
        for dim in split_dims:
            dist.all_reduce(carried, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=mesh.get_group(dim))
        partial = carried.to(device)
    return partial


def numbers_of(part: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return a dense real tensor with the norm of a plain tensor, which may be complex or sparse."""
    if part.is_sparse:
        part = part.coalesce().values()
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj()) if norm_type == 2.0 else part.abs()
    return part


def local_norms(parts: list[torch.Tensor], norm_type: float) -> tuple[torch.Tensor, ...]:
    """Compute one norm per tensor, in fp32 (fp64 if any tensor is fp64). No tensor may be empty."""
    dtype = None if {part.dtype for part in parts} == {torch.float32} else _norm_type_of(parts)  # None is faster
    if any(part.device.type == "cpu" and part.numel() > 4 * _ROW for part in parts):
        return tuple(_norm_by_rows(part, norm_type, dtype) for part in parts)
    return foreach_norm(parts, norm_type, dtype=dtype)


def _norm_by_rows(part: torch.Tensor, norm_type: float, dtype: torch.dtype | None) -> torch.Tensor:
    # A CPU adds a long tensor up in fp32, in one thread: of 2**26 numbers the norm is 0.5 % too small.
    rows = part.reshape(-1).split(part.numel() // _ROW * _ROW or _ROW)
    norms = [torch.linalg.vector_norm(row.view(-1, min(_ROW, row.numel())), norm_type, 1, dtype=dtype) for row in rows]
    return torch.linalg.vector_norm(found := torch.cat(norms), norm_type, dtype=torch.float64).to(found.dtype)


def _norm_type_of(parts: list[torch.Tensor]) -> torch.dtype:
    return torch.float64 if torch.float64 in {part.dtype for part in parts} else torch.float32


def clip_grad_norm_(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0, stages: Stages | None = None
) -> torch.Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; collective over the axes that shard them.

    Args:
        parameters: Parameters, plain or DTensor; those without a gradient are skipped.
        max_norm: Largest norm allowed, in the gradients' units; ``float("inf")`` only measures.
        norm_type: See :func:`total_norm`.
        stages: The ranks that hold others, where the parameters are one's part: the norm is the whole model's.

    Returns:
        The norm before clipping, 0-dim fp32, equal on every rank.

    Raises:
        ValueError: When ``max_norm`` is not above zero.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is the largest gradient norm allowed. Expected a number above 0. Got {max_norm!r}.")
    found = _with_gradients(parameters)
    norm = total_norm_of(found, norm_type, stages)
    if max_norm < float("inf"):
        local = [local_shard(each) if isinstance(each, DTensor) else each for _, each in found]
        # Rows of a sparse gradient may occur several times: scaling each of them scales their sum.
        divide_([each._values() if each.is_sparse else each for each in local], clip_divisor(norm, max_norm))
    return norm


def clip_grad_value_(parameters: Iterable[torch.Tensor], clip_value: float) -> None:
    """Clamp every element of all gradients to ``[-clip_value, clip_value]``, without communication.

    torch's own function fails where only some parameters are DTensors.

    Raises:
        ValueError: When ``clip_value`` is not above zero.
    """
    if not clip_value > 0:
        raise ValueError(f"clip_value is the largest element allowed. Expected a number above 0. Got {clip_value!r}.")
    found = [gradient for _, gradient in _with_gradients(parameters)]
    for gradient in found:
        layout_of(gradient)  # refuses unreduced partial sums
    if gradients := [*map(local_tensor, found)]:
        foreach_clamp_max_(gradients, clip_value)
        foreach_clamp_min_(gradients, -clip_value)


def _with_gradients(parameters: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    every = [*parameters]
    each_once = dict(zip(map(id, every), every, strict=True))  # tensors are slow to hash
    return [(parameter, gradient) for parameter in each_once.values() if (gradient := parameter.grad) is not None]


def clip_divisor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the number (0-dim) that gradients of this norm are divided by to clip them.

    torch multiplies by the reciprocal. Fused kernels divide: so clipping before the step gives the same bits.
    """
    return torch.clamp((norm + 1e-6) / max_norm, min=1.0)


def divide_(tensors: list[torch.Tensor], divisor: torch.Tensor) -> None:
    """Divide plain tensors of any devices and types by a 0-dim one, in place."""
    # On the host one can look without waiting for a device.
    if divisor.device.type == "cpu" and divisor == 1.0:
        return
    for group in by_kind(tensors):
        foreach_div_(group, divisor.to(group[0].device))


def multiply_(tensors: list[torch.Tensor], scale: torch.Tensor) -> None:
    """Multiply plain tensors of any devices and types by a 0-dim one, in place."""
    for group in by_kind(tensors):
        foreach_mul_(group, scale.to(group[0].device))


# --- Parameter placement: what methods know of a parameter and its mesh does not say (pipelines, reordered rows)

_ATTRIBUTE = "_placement"


class Order(Protocol):
    """An order of a parameter's rows on this rank other than the model's; see ``meshwright.nn.RankOrder``."""

    @property
    def dim(self) -> int:
        """Return the reordered dim."""

    def to_model(self, tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        """Return a tensor in the model's own order."""

    def to_ranks(self, tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        """Return a tensor in the order of ranks."""


@dataclass(frozen=True)
class ParameterPlacement:
    """Position of a parameter in the whole model, and the pipeline ranks that train it."""

    position: int
    """Its index among the parameters of the whole model."""
    on: int
    """Number of pipeline ranks that train it. All ranks along other axes hold it, or shards of it."""
    of: int
    """Number of pipeline ranks."""
    order: Order | None = None
    """The order of its rows here; None for the model's own."""


def set_placement(parameter: torch.Tensor, placement: ParameterPlacement) -> None:
    """Attach a placement to a parameter."""
    setattr(parameter, _ATTRIBUTE, placement)


def placement_of(parameter: torch.Tensor) -> ParameterPlacement | None:
    """Return the placement attached to a parameter; None where its mesh says everything."""
    placement: ParameterPlacement | None = getattr(parameter, _ATTRIBUTE, None)
    return placement


def is_in_parts(optimizer: Optimizer) -> bool:
    """Return whether this rank has only some of the model's parameters, or has them in another order."""
    placements = (placement_of(parameter) for group in optimizer.param_groups for parameter in group["params"])
    return any(each is not None and (each.of > 1 or each.order is not None) for each in placements)


# --- Layouts: tensors laid out like a parameter, and the number of ranks that hold the same shard

HALF_TYPES = (torch.float16, torch.bfloat16)
_LISTS = ("params", "param_names")  # entries of a parameter group with one item per parameter


def is_dense(local: torch.Tensor) -> bool:
    """Return whether a tensor fills one block of memory without gaps, in any order of its dims."""
    return local.is_contiguous() or torch.empty_like(local, device="meta").stride() == local.stride()


def wrapped_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Wrap a local shard into a DTensor that is laid out like ``parameter``; return it as it is for a plain parameter.

    The shard may live on another device than the mesh (host memory beside a CUDA mesh), as under FSDP2's offload;
    ``DTensor.from_local`` would move it.
    """
    if not isinstance(parameter, DTensor):
        return local
    meta = TensorMeta(parameter.shape, parameter.stride(), local.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]


class Peers(NamedTuple):
    """The ranks that train one model together: the world, or the ranks of one replica."""

    group: dist.ProcessGroup | None
    """None for the world, and for one rank alone."""
    size: int

    @classmethod
    def of_world(cls) -> Peers:
        """Return all ranks."""
        return cls(None, world_size())


def num_replicas(tensor: torch.Tensor, peers: Peers | None = None, placement: ParameterPlacement | None = None) -> int:
    """Return the number of ranks that hold the same shard of a tensor.

    Args:
        tensor: A parameter, or the gradient of one.
        peers: The ranks to count among; None for the world.
        placement: The parameter's placement. None: a plain tensor is on all ranks, a DTensor on those of its mesh.

    Raises:
        ModelError: When the tensor is an unreduced partial sum.
    """
    layout, every = layout_of(tensor), (peers or Peers.of_world()).size
    replicas = every if placement is None else every * placement.on // placement.of
    if layout is None:
        return replicas
    mesh, split_dims = layout
    replicas = mesh.size() if placement is None else replicas
    for dim in split_dims:
        replicas //= mesh.size(dim)
    return replicas


def by_kind(tensors: Iterable[torch.Tensor]) -> Sequence[list[torch.Tensor]]:
    """Group non-empty tensors by device and type, as multi-tensor kernels need them."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel() > 0:
            kinds[tensor.device, tensor.dtype].append(tensor)
    return list(kinds.values())


def reduced(values: torch.Tensor, operation: dist.ReduceOp.RedOpType, peers: Peers | None = None) -> torch.Tensor:
    """Reduce a small tensor over the world (or over some peers) in one all-reduce; return it as it is for one rank.

    It travels on the device of the world's backend, not on its own: a rank that holds no part of a model cannot know on
    which device its peers' numbers are.
    """
    peers = peers or Peers.of_world()
    if peers.size == 1:
        return values
    on_cuda = "nccl" in dist.get_backend_config(dist.group.WORLD)
    values = values.to("cuda" if on_cuda else "cpu")
    dist.all_reduce(values, operation, group=peers.group)
    return values


def step_by_layouts(optimizer: Optimizer) -> None:
    """Let every step split parameter groups into parts that hold only plain tensors, or only DTensors of one mesh.

    torch's fused and foreach updates take a group's tensors in one operation, which refuses mixtures; groups that are
    updated one tensor at a time stay whole. Between steps the groups are the caller's: learning-rate schedules count
    them.
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
        # Some optimizers count steps in their groups.
        for group, part in parts:
            group.update({key: value for key, value in part.items() if key not in _LISTS})


def _updates_lists(group: dict[str, Any]) -> bool:
    """Return whether torch updates many tensors of a group in one operation."""
    chosen = [group[key] for key in ("fused", "foreach") if group.get(key) is not None]
    if chosen or "foreach" not in group:
        return any(chosen)
    # Left to itself, torch does so on accelerators.
    return any(parameter.device.type != "cpu" for parameter in group["params"])


def _parts_of(group: dict[str, Any]) -> list[dict[str, Any]]:
    if not _updates_lists(group):
        return [group]
    by_mesh: dict[Any, list[int]] = defaultdict(list)
    for index, parameter in enumerate(group["params"]):
        by_mesh[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(index)
    lists = [key for key in _LISTS if key in group]
    return [{**group, **{key: [group[key][each] for each in own] for key in lists}} for own in by_mesh.values()]


# --- Steps of torch's optimizers on local shards: DTensor dispatch costs more than an element-wise update

# They update element by element, and `_init_group` collects all their states. SGD's makes its momentum later.
_ELEMENTWISE = (Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)
CUTTABLE = (*_ELEMENTWISE, SGD)  # the same update of any piece of a parameter, with its piece of the states


def step_on_local_tensors(optimizer: Optimizer) -> None:
    """Let an optimizer update the local shards of its DTensors, without the dispatch of DTensor operations.

    States stay DTensors. Nothing changes for optimizers other than torch's element-wise ones, for subclasses of these,
    and in steps where states are laid out otherwise than their parameters.
    """
    if type(optimizer) not in _ELEMENTWISE:
        return
    collect = init_group_of(optimizer)

    def collect_local(group: dict[str, Any], parameters: list[Any], gradients: list[Any], *states: list[Any]) -> Any:
        found = collect(group, parameters, gradients, *states)
        if not group.get("differentiable"):
            _unwrap(parameters, gradients, states)
        return found

    setattr(optimizer, INIT_GROUP, collect_local)


def _unwrap(parameters: list[Any], gradients: list[Any], states: tuple[list[Any], ...]) -> None:
    """Replace DTensors by their local tensors, in all lists or in none."""
    sharded = [index for index, each in enumerate(parameters) if isinstance(each, DTensor)]
    if not sharded:
        return
    filled = [each for each in states if each]  # amsgrad's, for one, stays empty
    if any(len(each) != len(parameters) for each in filled):
        return
    for index in sharded:
        parameter = parameters[index]
        if any(isinstance(each[index], DTensor) and not _alike(each[index], parameter) for each in filled):
            return
    # The wrapper has a version of its own beside the shard's.
    increment_version([parameters[index] for index in sharded])
    for index in sharded:
        parameter, gradient = parameters[index], gradients[index]
        if not _alike(gradient, parameter):
            gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
        parameters[index], gradients[index] = local_shard(parameter), local_shard(gradient)
        for each in filled:
            if isinstance(each[index], DTensor):
                each[index] = local_shard(each[index])


def _alike(tensor: DTensor, parameter: DTensor) -> bool:
    own, other = spec_of(tensor), spec_of(parameter)
    if own is other:  # as FSDP2's gradients have it
        return True
    return (own.mesh is other.mesh or own.mesh == other.mesh) and bool(own.placements == other.placements)


# --- Optimizers that a training step can drive: those that need nothing but gradients

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_steps_alone(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer if its ``step()`` needs no closure.

    Raises:
        ConfigError: For an optimizer that computes the loss several times through a closure (torch's LBFGS).
    """
    step = getattr(type(optimizer), "step", None)  # without one it is no optimizer, and is refused elsewhere
    parameters = inspect.signature(step).parameters if step is not None else {}
    needed = [name for name in list(parameters)[1:] if parameters[name].default is inspect.Parameter.empty]
    if needed := [name for name in needed if parameters[name].kind not in _VARIABLE]:
        raise ConfigError(
            f"{type(optimizer).__name__} needs a closure that computes the loss anew, and a step computes it once",
            expected="an optimizer whose step() works without arguments",
            got=f"step({', '.join(needed)})",
            fix="use another optimizer, such as torch.optim.AdamW",
        )
    return optimizer


KERNELS = (Adam, AdamW, SGD)
"""Classes whose kernels divide gradients by ``grad_scale``, and leave everything as it is where ``found_inf`` is 1."""


def fused_where_possible(build: Callable[..., Optimizer], device: torch.device) -> Callable[..., Optimizer]:
    """Let an optimizer of torch use its fused kernels on CUDA, unless its arguments choose otherwise.

    torch itself takes lists (``foreach``): more kernels and memory, and steps that cannot be skipped on the device.
    """
    if device.type != "cuda" or build not in KERNELS:
        return build

    def built(params: Any, **options: Any) -> Optimizer:
        optimizer = build(params, **options)
        groups, every = optimizer.param_groups, [p for group in optimizer.param_groups for p in group["params"]]
        is_chosen = any(group[name] is not None for group in groups for name in ("fused", "foreach"))
        is_chosen |= any(group.get(name) for group in groups for name in ("capturable", "differentiable"))
        # torch's fused SGD has no rule for DTensors.
        has_kernels = all(p.is_floating_point() and not (build is SGD and isinstance(p, DTensor)) for p in every)
        for group in (optimizer.defaults, *groups) if has_kernels and not is_chosen else ():
            group["fused"], group["foreach"] = True, False
        return optimizer

    return built
