"""Measures of many gradients over all ranks: their norm, and whether all are finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from meshwright.optim.clip import local_norms, local_tensor, numbers_of
from meshwright.optim.held import held_of
from meshwright.optim.layouts import Peers, by_kind, num_replicas, reduced


def norm_and_count(
    parameters: Iterable[torch.Tensor], norm_type: float, count: int, peers: Peers | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of all gradients in the world as if they were one vector, in one all-reduce; every rank calls it.

    Each rank adds what it holds, divided by how many ranks hold the same: tensors of any meshes share one reduction,
    and pipeline stages add up. The host does not wait.

    Args:
        parameters: This rank's, with gradients or without: plain ones, equal on all ranks that hold them, and DTensors.
        norm_type: p of the p-norm; ``float("inf")`` for the largest absolute value.
        count: Any number of this rank's own; travels along.
        peers: The ranks of one replica, whose gradients count; None for the world.

    Returns:
        0-dim fp64 norm, and the count of the rank that has most (a sum over ranks when ``norm_type`` is finite).

    Raises:
        ModelError: When a gradient is an unreduced partial sum.
    """
    infinite = norm_type == float("inf")
    by_replicas: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            replicas = num_replicas(parameter.grad, peers, held_of(parameter))
            by_replicas.setdefault(replicas, []).append(numbers_of(local_tensor(parameter.grad), norm_type))
    parts = []
    for replicas, group in by_replicas.items():
        for kind in by_kind(group):
            # fp64: a sum of few numbers, whose powers must not overflow.
            norms = torch.stack(local_norms(kind, norm_type)).double()
            parts.append(norms.max() if infinite else norms.pow(norm_type).sum() / replicas)
    device = parts[0].device if parts else torch.device("cpu")
    every = torch.stack([part.to(device) for part in parts]) if parts else torch.zeros(1, dtype=torch.float64)
    # A maximum over ranks may lose a nan, but not an infinity.
    own = every.nan_to_num(nan=float("inf")).max() if infinite else every.sum()
    vector = torch.stack([own, torch.full((), float(count), dtype=torch.float64, device=device)])
    norm, total = reduced(vector, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, peers).unbind()
    return (norm if infinite else norm.pow(1.0 / norm_type)), total


def any_nonfinite(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """1 when one of this rank's plain tensors holds inf or nan, else 0; 0-dim fp32. Reads them once, writes nothing."""
    found = [~torch.isfinite(torch.stack(torch._foreach_norm(kind, float("inf")))).all() for kind in by_kind(tensors)]
    return _any([flag.float() for flag in found])


def unscale_and_find_nonfinite(tensors: Iterable[torch.Tensor], inverse_scale: float) -> torch.Tensor:
    """Multiplies this rank's plain tensors in place, and finds inf or nan in the same pass; result as above."""
    found = []
    for kind in by_kind(tensors):
        flag = torch.zeros((), dtype=torch.float32, device=kind[0].device)
        factor = torch.full((), inverse_scale, dtype=torch.float32, device=kind[0].device)
        torch._amp_foreach_non_finite_check_and_unscale_(kind, flag, factor)
        found.append(flag)
    return _any(found)


def _any(flags: list[torch.Tensor]) -> torch.Tensor:
    if not flags:
        return torch.zeros(())
    return torch.stack([flag.to(flags[0].device) for flag in flags]).max()


def parameters_in(param_groups: Iterable[Mapping[str, Any] | torch.Tensor]) -> list[torch.Tensor]:
    """All parameters of groups, or listed by themselves, each once."""
    found: dict[int, torch.Tensor] = {}
    for group in param_groups:
        members = [group] if isinstance(group, torch.Tensor) else group["params"]
        found.update({id(parameter): parameter for parameter in members})
    return list(found.values())
