"""The norm of all gradients, and clipping by it, over any mix of plain and sharded parameters."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from meshwright.errors import ModelError

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
        """The same, where the fp32 copies of parameters count in their place."""

        def with_copies(parameters: frozenset[torch.Tensor]) -> frozenset[torch.Tensor]:
            return parameters | {masters[parameter] for parameter in parameters if parameter in masters}

        return Stages(self.group, self.device, with_copies(self.counted_elsewhere), with_copies(self.alike))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: the local shard of a DTensor, a plain tensor itself. Not for autograd.

    The same object at every call, by which a replaced shard is noticed: ``to_local`` of a parameter makes a new view
    each time since torch 2.13.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def total_norm(
    tensors: Iterable[torch.Tensor],
    norm_type: float = 2.0,
    stages: Stages | None = None,
    alike: Iterable[torch.Tensor] = (),
) -> torch.Tensor:
    """The norm of many tensors as if they were one vector, in fp32 and without waiting for the device.

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
    """Sums of |x|^p (maxima for the infinity norm), one for each layout and device."""
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
    """Which shards a gradient is made of.

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
    """The mesh dims that split a tensor; None where it is a partial sum."""
    if any(isinstance(placement, Partial) for placement in placements):
        return None
    return tuple(dim for dim, placement in enumerate(placements) if not isinstance(placement, Replicate))


def _reduced(layout: Layout, parts: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The sum of |x|^p over all parts on all ranks that hold one (the maximum for the infinity norm)."""
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
    """The real numbers of a plain tensor whose norm is the tensor's: of a sparse one its values, each row once."""
    if part.is_sparse:
        part = part.coalesce().values()
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj()) if norm_type == 2.0 else part.abs()
    return part


def local_norms(parts: list[torch.Tensor], norm_type: float) -> tuple[torch.Tensor, ...]:
    """One norm per tensor, in fp32 (fp64 where there is an fp64 tensor); none of them may be empty."""
    if all(part.dtype == torch.float32 for part in parts):
        return torch._foreach_norm(parts, norm_type)  # a fifth faster than with a dtype
    return torch._foreach_norm(parts, norm_type, dtype=_norm_type_of(parts))


def _norm_type_of(parts: list[torch.Tensor]) -> torch.dtype:
    return torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32


def clip_grad_norm_(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0, stages: Stages | None = None
) -> torch.Tensor:
    """Scales all gradients so that their norm is at most ``max_norm``; collective over the axes that shard them.

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
    """Clamps every element of all gradients to ``[-clip_value, clip_value]``, each rank those it holds.

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
        torch._foreach_clamp_max_(gradients, clip_value)
        torch._foreach_clamp_min_(gradients, -clip_value)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Itself, or the values of a sparse one, whose rows may come several times: what scales them scales their sums."""
    return gradient._values() if gradient.is_sparse else gradient


def clip_divisor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients of this norm are divided by, 0-dim.

    torch multiplies by its reciprocal. Fused kernels divide, and clipping beforehand gives the same bits.
    """
    return torch.clamp((norm + 1e-6) / max_norm, min=1.0)


def divide_(tensors: list[torch.Tensor], divisor: torch.Tensor) -> None:
    """Divides plain tensors of any devices and types by a 0-dim one, in place."""
    if divisor.device.type == "cpu" and divisor == 1.0:  # on the host it is known whether there is anything to do
        return
    for (device, _), group in _by_kind(tensors).items():
        torch._foreach_div_(group, divisor.to(device))


def multiply_(tensors: list[torch.Tensor], scale: torch.Tensor) -> None:
    """Multiplies plain tensors of any devices and types by a 0-dim one, in place."""
    for (device, _), group in _by_kind(tensors).items():
        torch._foreach_mul_(group, scale.to(device))


def _by_kind(tensors: list[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_kind[tensor.device, tensor.dtype].append(tensor)
    return by_kind
