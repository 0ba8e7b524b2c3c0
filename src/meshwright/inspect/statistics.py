"""Statistics of tensors over all shards and ranks, in which every element counts once.

Every rank computes moments of the elements that it reports; one small table of moments per rank is gathered and merged,
in the same way on every rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from meshwright.errors import InspectError
from meshwright.runtime import rank

COUNT, MEAN, SQUARES, MIN, MAX = range(5)
"""Columns of moments; SQUARES is the sum of squared deviations from the mean."""

# A large shard is never copied whole: 2 MiB of fp64 stay in a CPU's cache, 128 MiB keep a GPU busy.
_CHUNK_ELEMENTS = {"cpu": 1 << 18, "other": 1 << 24}


def nothing() -> torch.Tensor:
    """Return the moments of no elements, which change nothing when merged."""
    return torch.tensor([0.0, 0.0, 0.0, math.inf, -math.inf], dtype=torch.float64)


@torch.no_grad()
def moments(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the moments of each tensor, computed where it lives; the host waits once per device.

    Args:
        tensors: Plain tensors of any real type, shape and device; they may be empty.

    Returns:
        Shape ``(len(tensors), 5)``, fp64, on the CPU. NaN and infinity propagate as in arithmetic.
    """
    table = nothing().repeat(len(tensors), 1)
    places: dict[torch.device, list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        if tensor.numel() > 0:
            places[tensor.device].append(place)
    for here in places.values():
        table[here] = torch.stack([_of_one(tensors[place]) for place in here]).cpu()
    return table


def _of_one(tensor: torch.Tensor) -> torch.Tensor:
    size = _CHUNK_ELEMENTS["cpu" if tensor.is_cpu else "other"]
    return merge(torch.stack([_of_chunk(chunk) for chunk in tensor.detach().reshape(-1).split(size)]))


def _of_chunk(chunk: torch.Tensor) -> torch.Tensor:
    elements = chunk.to(torch.float64, copy=True)
    low, high = elements.aminmax()
    mean = elements.mean()
    elements -= mean  # two passes: four times as fast as torch.var_mean, and as exact
    return torch.stack([torch.full_like(mean, chunk.numel()), mean, torch.dot(elements, elements), low, high])


def merge(parts: torch.Tensor) -> torch.Tensor:
    """Merge the moments of parts into those of all their elements.

    Args:
        parts: Shape ``(parts, …, 5)``, fp64.

    Returns:
        Shape ``(…, 5)``, fp64.
    """
    count, mean, squares, low, high = parts.unbind(-1)
    total = count.sum(0)
    centre = (count * mean).sum(0) / total.clamp(min=1)
    spread = (squares + count * (mean - centre).square()).sum(0)
    return torch.stack([total, centre, spread, low.amin(0), high.amax(0)], dim=-1)


def statistics(row: torch.Tensor) -> tuple[float, float, float, float]:
    """Return ``(max, min, std, mean)`` of one row of moments.

    The standard deviation is the unbiased one (divided by n - 1), as ``torch.std`` and BMTrain compute it. A single
    element has none: it is 0.0 here, where torch gives NaN. Without elements all four are NaN.
    """
    count, mean, squares, low, high = row.tolist()
    if count == 0:
        return math.nan, math.nan, math.nan, math.nan
    return high, low, math.sqrt(squares / max(count - 1, 1)), mean


# --- The elements that a rank reports, so that every element counts once.

NOBODY = 2**31 - 1
"""Team of a rank that does not have the tensor."""


def share(tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, int]:
    """Return the elements that this rank reports, and its team: the ranks that hold one copy of the whole tensor.

    The team of a sharded tensor is its mesh, that of a plain one the rank. Of ranks with the same elements (whose
    coordinates differ along replicated mesh dims only) the first reports them. If a tensor is sharded over one axis of
    a larger mesh, there are several teams: they are numbered by their lowest rank, and one of them must be counted.

    Args:
        tensor: Plain, or a DTensor with any mix of ``Shard``, ``StridedShard`` and ``Replicate``.
        name: Name of the tensor, for the error.

    Returns:
        A plain tensor without gradient (perhaps empty), and the team.

    Raises:
        InspectError: When the elements do not exist (meta, partial sums) or have no order (complex).
    """
    _check(tensor, name)
    if not isinstance(tensor, DTensor):
        whole = tensor.detach()
        return (whole if whole.layout == torch.strided else whole.to_dense()), rank()
    local = tensor.to_local().detach()
    team = int(tensor.device_mesh.mesh.min())
    return (local if _reports(tensor) else local.new_empty(0)), team


def is_first_of_team(tensor: torch.Tensor) -> bool:
    """Return whether this rank is the first of its team; always for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and not any(coordinate)


def _reports(tensor: DTensor) -> bool:
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


# --- Tables of moments.

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One tensor on one rank, and its gradient."""

    name: str
    shape: Shape
    tensor: torch.Tensor
    grad: torch.Tensor | None


@dataclass(frozen=True)
class Table:
    """Moments of all tensors on one rank; about 0.2 kB per tensor of any size."""

    names: list[str]
    shapes: list[Shape]
    teams: torch.Tensor
    """``(rows, 2)``: teams of tensor and gradient; ``NOBODY`` where there is none."""
    moments: torch.Tensor
    """``(rows, 2, 5)``: moments of tensor and gradient."""


def fill(rows: Sequence[Row]) -> Table:
    """Compute this rank's table, without communication."""
    absent = torch.empty(0), NOBODY
    shares = []
    for row in rows:
        shares.append(share(row.tensor, row.name))
        shares.append(absent if row.grad is None else share(row.grad, f"gradient of {row.name}"))
    return Table(
        names=[row.name for row in rows],
        shapes=[row.shape for row in rows],
        teams=torch.tensor([team for _, team in shares], dtype=torch.int64).reshape(-1, 2),
        moments=moments([elements for elements, _ in shares]).reshape(-1, 2, 5),
    )


def merged(tables: Sequence[Table], *, one_team: bool, order: Sequence[str] = ()) -> tuple[list[str], torch.Tensor]:
    """Merge the tables of all ranks by name.

    Args:
        tables: One per rank; a rank may lack names, as on another pipeline stage.
        one_team: True if teams hold copies of one tensor, of which the first is counted; False if every team has
            elements of its own, which are all counted.
        order: Names that come first, in this order.

    Returns:
        The names of all tables, in ``order`` and then in order of first occurrence, and moments of shape
        ``(names, 2, 5)``.
    """
    found = dict.fromkeys(name for table in tables for name in table.names)
    names = list(dict.fromkeys(name for name in (*order, *found) if name in found))
    place = {name: index for index, name in enumerate(names)}
    every = nothing().repeat(len(tables), len(names), 2, 1)
    teams = torch.full(every.shape[:-1], NOBODY)
    for index, table in enumerate(tables):
        here = torch.tensor([place[name] for name in table.names], dtype=torch.int64)
        every[index, here], teams[index, here] = table.moments, table.teams
    if one_team:
        every = torch.where((teams == teams.amin(0))[..., None], every, nothing())
    return names, merge(every)


def entry(name: str, shape: Shape, both: torch.Tensor, no_grad: float | None) -> dict[str, Any]:
    """Return one line of a summary, under BMTrain's keys in the order of its table.

    Args:
        name: Name of the tensor.
        shape: Shape of the whole tensor.
        both: ``(2, 5)``, moments of the tensor and of its gradient.
        no_grad: Statistics of a gradient that does not exist.
    """
    high, low, std, mean = statistics(both[0])
    _, _, grad_std, grad_mean = statistics(both[1]) if both[1, COUNT] > 0 else (no_grad,) * 4
    return {
        "name": name, "shape": shape, "max": high, "min": low, "std": std, "mean": mean,
        "grad_std": grad_std, "grad_mean": grad_mean,
    }  # fmt: skip
