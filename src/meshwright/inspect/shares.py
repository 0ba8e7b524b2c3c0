"""Which elements of a tensor a rank answers for, so that the statistics of all ranks count every element once."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from meshwright.errors import InspectError
from meshwright.runtime import rank

NOBODY = 2**31 - 1
"""The team of a rank that has no such tensor."""


def share(tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, int]:
    """The elements this rank answers for, and the team of ranks that holds this copy of the whole tensor.

    A sharded tensor is whole on its mesh, a plain one on its rank. Of ranks that hold the same elements (they differ
    along replicated mesh dims only), the first answers and the others have nothing to say. One tensor may exist once
    per team, as when it is sharded over one axis of a larger mesh: teams are named by their lowest rank, and only one
    team's answers must be counted.

    Args:
        tensor: Plain, or a DTensor with any mix of ``Shard``, ``_StridedShard`` and ``Replicate``.
        name: For the error.

    Returns:
        A plain tensor without gradient (perhaps empty), and the team.

    Raises:
        InspectError: When the elements are not there (meta, partial sums) or have no order (complex).
    """
    _check(tensor, name)
    if not isinstance(tensor, DTensor):
        whole = tensor.detach()
        return (whole if whole.layout == torch.strided else whole.to_dense()), rank()
    local = tensor.to_local().detach()
    team = int(tensor.device_mesh.mesh.min())
    return (local if _answers(tensor) else local.new_empty(0)), team


def is_first_of_team(tensor: torch.Tensor) -> bool:
    """Whether this rank is the first of those that hold the tensor together; always for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and not any(coordinate)


def _answers(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not on the mesh
        return False
    placed = zip(coordinate, tensor.placements, strict=True)
    return all(place == 0 for place, placement in placed if isinstance(placement, Replicate))


def _check(tensor: torch.Tensor, name: str) -> None:
    if isinstance(tensor, DTensor) and any(isinstance(placement, Partial) for placement in tensor.placements):
        raise InspectError(
            f"{name!r} is a partial sum, whose statistics are not those of the sum",
            expected="a tensor that is sharded or replicated",
            got=str(tensor.placements),
            fix="finish the backward pass before inspecting parameters; redistribute an activation before recording "
            "it, or record it with requires_grad=False if it is the gradient that is partial",
        )
    if tensor.is_meta or tensor.is_complex():
        raise InspectError(
            f"{name!r} has no statistics",
            expected="real numbers in memory",
            got=f"{tensor.dtype} on the {tensor.device.type} device",
            fix="initialise the model first" if tensor.is_meta else "inspect torch.view_as_real of it",
        )
