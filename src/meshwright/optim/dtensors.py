"""Optimizers over DTensors: layouts, placement, gradient norms, clipping, and steps on local tensors."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.optim import NAdam, Optimizer, RAdam
from torch.optim.adadelta import Adadelta
from torch.optim.adagrad import Adagrad
from torch.optim.adam import Adam
from torch.optim.adamax import Adamax
from torch.optim.adamw import AdamW
from torch.optim.rmsprop import RMSprop
from torch.optim.rprop import Rprop

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

# Which shards a gradient is made of: its mesh and the mesh dims that split it; None for a plain tensor.
Layout = tuple[DeviceMesh, tuple[int, ...]] | None


@dataclass(frozen=True)
class Stages:
    """Ranks that hold parameters of their own, as those of a pipeline do, and some that others hold too."""

    group: dist.ProcessGroup
    device: torch.device
    counted_elsewhere: frozenset[torch.Tensor]  # parameters that an earlier rank holds too: norms count them there
    alike: frozenset[torch.Tensor] = frozenset()  # held by all of them together, equal or as shards of one tensor

    def with_masters(self, masters: Mapping[torch.Tensor, torch.Tensor]) -> Stages:
        """Return the same, where the fp32 copies of parameters count in their place."""

        def with_copies(parameters: frozenset[torch.Tensor]) -> frozenset[torch.Tensor]:
            return parameters | {masters[parameter] for parameter in parameters if parameter in masters}

        return Stages(self.group, self.device, with_copies(self.counted_elsewhere), with_copies(self.alike))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: the local shard of a DTensor, a plain tensor itself. Not for autograd.

    The same object at every call, by which a replaced shard is noticed: ``to_local`` of a parameter makes a new view
    each time since torch 2.13.
    """
    return local_shard(tensor) if isinstance(tensor, DTensor) else tensor


def total_norm(
    tensors: Iterable[torch.Tensor],
    norm_type: float = 2.0,
    stages: Stages | None = None,
    alike: Iterable[torch.Tensor] = (),
) -> torch.Tensor:
    """Return the norm of many tensors as if they were one vector, in fp32 and without waiting for the device.

    Local shards are summed first, so a world of any size costs one all-reduce of one number per mesh axis that shards.
    torch's own ``clip_grad_norm_`` fails when parameters live on different meshes, and runs DTensor operations.

    Args:
        tensors: Plain tensors (equal on all ranks) and DTensors (sharded or replicated).
        norm_type: p of the p-norm; ``float("inf")`` for the largest absolute value.
        stages: Adds the tensors of the other ranks of a pipeline; none may be named twice.
        alike: Further tensors, which the ranks of ``stages`` hold together.

    Returns:
        0-dim fp32 tensor (fp64 for fp64 tensors), equal on every rank.

    Raises:
        ModelError: When a tensor is an unreduced partial sum.
    """
    norms = _norms(tensors, norm_type)
    infinite = norm_type == float("inf")
    if stages is not None:
        norms = [_over_stages(stages, norms, infinite)]
    norms += [norm.to(norms[0].device) if norms else norm for norm in _norms(alike, norm_type)]
    if not norms:
        return torch.zeros((), dtype=torch.float32)
    whole = _combined(norms, infinite)
    return whole if infinite else whole.pow(1.0 / norm_type)


def _norms(tensors: Iterable[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Sum of |x|^p (maxima for the infinity norm), one for each layout and device."""
    by_layout: dict[tuple[Layout, torch.device], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        local = local_tensor(tensor)
        by_layout[layout_of(tensor), local.device].append(local)
    norms = [_reduced(layout, parts, norm_type) for (layout, _), parts in by_layout.items()]
    if len({norm.device for norm in norms}) > 1:  # some gradients were offloaded
        norms = [norm.cpu() for norm in norms]
    return norms


def _over_stages(stages: Stages, norms: list[torch.Tensor], infinite: bool) -> torch.Tensor:
    own = torch.zeros((), dtype=torch.float32, device=stages.device)  # of a rank without gradients too
    if norms:
        own = _combined([norm.to(stages.device) for norm in norms], infinite)
    dist.all_reduce(own, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=stages.group)
    return own


def _combined(norms: list[torch.Tensor], infinite: bool) -> torch.Tensor:
    if len(norms) == 1:
        return norms[0]
    every = torch.stack(norms)
    return every.max() if infinite else every.sum()


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return which shards a gradient is made of.

    Raises:
        ModelError: When it is an unreduced partial sum.
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
    """Return the mesh dims that split a tensor; None where it is a partial sum."""
    if any(isinstance(placement, Partial) for placement in placements):
        return None
    return tuple(dim for dim, placement in enumerate(placements) if not isinstance(placement, Replicate))


def _reduced(layout: Layout, parts: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the sum of |x|^p over all parts on all ranks that hold one (the maximum for the infinity norm)."""
    parts = [numbers_of(part, norm_type) for part in parts]
    device, dtype = parts[0].device, _norm_type_of(parts)
    parts = [part for part in parts if part.numel() > 0]  # a shard can be empty; its maximum does not exist
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
    """Return the real numbers of a plain tensor whose norm is the tensor's.

    Of a sparse one its values, each row once.
    """
    if part.is_sparse:
        part = part.coalesce().values()
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj()) if norm_type == 2.0 else part.abs()
    return part


def local_norms(parts: list[torch.Tensor], norm_type: float) -> tuple[torch.Tensor, ...]:
    """One norm per tensor, in fp32 (fp64 where there is an fp64 tensor); none of them may be empty."""
    if all(part.dtype == torch.float32 for part in parts):
        return foreach_norm(parts, norm_type)  # a fifth faster than with a dtype
    return foreach_norm(parts, norm_type, dtype=_norm_type_of(parts))


def _norm_type_of(parts: list[torch.Tensor]) -> torch.dtype:
    return torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32


def clip_grad_norm_(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0, stages: Stages | None = None
) -> torch.Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; collective over the axes that shard them.

    Args:
        parameters: Parameters, plain or DTensor; those without a gradient are passed over.
        max_norm: Largest norm allowed, in the gradients' units; ``float("inf")`` only measures.
        norm_type: See :func:`total_norm`.
        stages: Where the parameters are those of one rank of a pipeline: the norm is that of all of them.

    Returns:
        The norm before clipping, 0-dim fp32, equal on every rank.

    Raises:
        ValueError: When ``max_norm`` is not above zero.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is the largest gradient norm allowed. Expected a number above 0. Got {max_norm!r}.")
    each_once = {id(parameter): parameter for parameter in parameters}.values()  # tensors are slow to hash
    found = [(parameter, gradient) for parameter in each_once if (gradient := parameter.grad) is not None]
    gradients = counted = [gradient for _, gradient in found]
    alike: list[torch.Tensor] = []
    if stages is not None:
        once = stages.counted_elsewhere | stages.alike
        counted = [gradient for parameter, gradient in found if parameter not in once]
        alike = [gradient for parameter, gradient in found if parameter in stages.alike]
    norm = total_norm(counted, norm_type, stages, alike)
    if max_norm < float("inf"):
        divide_([_dense(local_tensor(gradient)) for gradient in gradients], clip_divisor(norm, max_norm))
    return norm


def clip_grad_value_(parameters: Iterable[torch.Tensor], clip_value: float) -> None:
    """Clamp every element of all gradients to ``[-clip_value, clip_value]``, each rank those it holds.

    torch's own fails where only some parameters are DTensors.

    Raises:
        ValueError: When ``clip_value`` is not above zero.
    """
    if not clip_value > 0:
        raise ValueError(f"clip_value is the largest element allowed. Expected a number above 0. Got {clip_value!r}.")
    each_once = {id(parameter): parameter for parameter in parameters}.values()
    gradients = [gradient for parameter in each_once if (gradient := parameter.grad) is not None]
    for gradient in gradients:
        layout_of(gradient)  # refuses what is not summed yet
    gradients = [local_tensor(gradient) for gradient in gradients]
    if gradients:
        foreach_clamp_max_(gradients, clip_value)
        foreach_clamp_min_(gradients, -clip_value)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Itself, or the values of a sparse one, whose rows may come several times: what scales them scales their sums."""
    return gradient._values() if gradient.is_sparse else gradient


def clip_divisor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return what gradients of this norm are divided by, 0-dim.

    torch multiplies by its reciprocal. Fused kernels divide, and clipping beforehand gives the same bits.
    """
    return torch.clamp((norm + 1e-6) / max_norm, min=1.0)


def divide_(tensors: list[torch.Tensor], divisor: torch.Tensor) -> None:
    """Divide plain tensors of any devices and types by a 0-dim one, in place."""
    if divisor.device.type == "cpu" and divisor == 1.0:  # on the host it is known whether there is anything to do
        return
    for (device, _), group in _by_kind(tensors).items():
        foreach_div_(group, divisor.to(device))


def multiply_(tensors: list[torch.Tensor], scale: torch.Tensor) -> None:
    """Multiply plain tensors of any devices and types by a 0-dim one, in place."""
    for (device, _), group in _by_kind(tensors).items():
        foreach_mul_(group, scale.to(device))


def _by_kind(tensors: list[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_kind[tensor.device, tensor.dtype].append(tensor)
    return by_kind


# --- Where a parameter lies in the world, as methods tell optimizers that cannot see it from the parameter.

_ATTRIBUTE = "_held"


class Order(Protocol):
    """How the rows of a parameter lie here, and in the model's own order; see ``meshwright.nn.RankOrder``."""

    @property
    def dim(self) -> int:
        """Return the dim in question."""

    def to_model(self, tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        """Return a tensor in the model's own order."""

    def to_ranks(self, tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        """Return the way back."""


@dataclass(frozen=True)
class ParameterPlacement:
    """What one parameter is in the whole model."""

    position: int
    """Among the parameters of the whole model, in its order."""
    on: int
    """Pipeline ranks that train it, of :attr:`of`; all other ranks along other axes hold it, or shards of it."""
    of: int
    """Ranks of the pipeline."""
    order: Order | None = None
    """None: in the model's own."""


def set_placement(parameter: torch.Tensor, held: ParameterPlacement) -> None:
    """Note it on the parameter."""
    setattr(parameter, _ATTRIBUTE, held)


def placement_of(parameter: torch.Tensor) -> ParameterPlacement | None:
    """Return what was told; None: the parameter's mesh says all there is to know."""
    held: ParameterPlacement | None = getattr(parameter, _ATTRIBUTE, None)
    return held


def is_in_parts(optimizer: Optimizer) -> bool:
    """Return whether this rank's parameters are a part of a whole model's, or lie in an order of their own."""
    every: Iterable[dict[str, Any]] = optimizer.param_groups
    told = (placement_of(parameter) for group in every for parameter in group["params"])
    return any(held is not None and (held.of > 1 or held.order is not None) for held in told)


# --- Tensors laid out like a parameter, and how often a shard exists in the world.

HALF_TYPES = (torch.float16, torch.bfloat16)
_LISTS = ("params", "param_names")  # of a parameter group: one item for each parameter


def is_dense(local: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill one block of memory without gaps, in any order of its dims."""
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


def num_replicas(tensor: torch.Tensor, peers: Peers | None = None, held: ParameterPlacement | None = None) -> int:
    """Return how many ranks (of the world, or of some peers) hold the same shard.

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
    """Return the tensors grouped by device and type, without the empty ones: what one multi-tensor kernel takes."""
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
    """Let every step take each parameter group in parts that hold plain tensors only, or DTensors of one mesh only.

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
    """Return whether torch updates many tensors of a group in one operation.

    Left the choice, it does so on accelerators.
    """
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


# --- torch's own optimizers over DTensors, whose kernels then take the local shards.

# Element by element, and with nothing kept but what they collect in lists. SGD's momentum is not collected but made.
_ELEMENTWISE = (Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)


def step_on_local_tensors(optimizer: Optimizer) -> None:
    """Let an optimizer update the local shards of its DTensors, as DTensor operations would, without their dispatch.

    States stay DTensors. Nothing changes for optimizers other than torch's element-wise ones, for subclasses of
    theirs, and in steps whose states do not lie as their parameters.
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
    filled = [each for each in states if each]  # such as that of amsgrad stays empty
    if any(len(each) != len(parameters) for each in filled):
        return
    for index in sharded:
        parameter = parameters[index]
        if any(isinstance(each[index], DTensor) and not _alike(each[index], parameter) for each in filled):
            return
    increment_version([parameters[index] for index in sharded])  # the wrapper's own: it has one beside the shard's
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
    if own is other:  # as of gradients that FSDP2 has sharded
        return True
    return (own.mesh is other.mesh or own.mesh == other.mesh) and bool(own.placements == other.placements)


# --- Optimizers that a step can drive: those that need nothing but gradients.

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_steps_alone(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer whose ``step()`` takes gradients as they are.

    Raises:
        ConfigError: For one that asks for a closure (torch's LBFGS), with which it computes the loss several times.
    """
    step = getattr(type(optimizer), "step", None)  # what is no optimizer has none, and is refused elsewhere
    parameters = inspect.signature(step).parameters if step is not None else {}
    needed = [name for name in list(parameters)[1:] if parameters[name].default is inspect.Parameter.empty]
    needed = [name for name in needed if parameters[name].kind not in _VARIABLE]
    if needed:
        raise ConfigError(
            f"{type(optimizer).__name__} needs a closure that computes the loss anew, and a step computes it once",
            expected="an optimizer whose step() works without arguments",
            got=f"step({', '.join(needed)})",
            fix="use another optimizer, such as torch.optim.AdamW",
        )
    return optimizer
