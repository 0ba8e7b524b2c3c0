"""The table of all tensors' moments: filled on every rank, gathered once, merged alike everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.inspect.moments import COUNT, merge, moments, nothing, statistics
from meshwright.inspect.shares import NOBODY, share

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One tensor as one rank sees it, before any arithmetic."""

    name: str
    shape: Shape
    tensor: torch.Tensor
    grad: torch.Tensor | None


@dataclass(frozen=True)
class Table:
    """What one rank tells the others: about 0.2 kB per tensor, whatever the tensor's size."""

    names: list[str]
    shapes: list[Shape]
    teams: torch.Tensor
    """``(rows, 2)`` for tensor and gradient: which copy of it the moments are of; ``NOBODY`` where there is none."""
    moments: torch.Tensor
    """``(rows, 2, 5)``: see :mod:`meshwright.inspect.moments`."""


def fill(rows: Sequence[Row]) -> Table:
    """Computes this rank's table; does not communicate."""
    nothing = torch.empty(0), NOBODY
    shares = []
    for row in rows:
        shares.append(share(row.tensor, row.name))
        shares.append(nothing if row.grad is None else share(row.grad, f"gradient of {row.name}"))
    return Table(
        names=[row.name for row in rows],
        shapes=[row.shape for row in rows],
        teams=torch.tensor([team for _, team in shares], dtype=torch.int64).reshape(-1, 2),
        moments=moments([elements for elements, _ in shares]).reshape(-1, 2, 5),
    )


def merged(tables: Sequence[Table], *, one_team: bool, order: Sequence[str] = ()) -> tuple[list[str], torch.Tensor]:
    """Merges the tables of all ranks by name.

    Args:
        tables: One per rank; a rank may lack names, as on another pipeline stage.
        one_team: True when teams hold copies of one tensor, of which the first is counted; False when every team has
            elements of its own, which are counted together.
        order: Names in the order wanted; others follow.

    Returns:
        The names of all tables, in ``order`` and then in order of first mention, and moments of shape
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
    """One line of a summary, under BMTrain's keys in the order of its table.

    Args:
        name: As printed.
        shape: Of the whole tensor.
        both: ``(2, 5)``, moments of the tensor and of its gradient.
        no_grad: What stands for the statistics of a gradient that does not exist.
    """
    high, low, std, mean = statistics(both[0])
    _, _, grad_std, grad_mean = statistics(both[1]) if both[1, COUNT] > 0 else (no_grad,) * 4
    return {
        "name": name, "shape": shape, "max": high, "min": low, "std": std, "mean": mean,
        "grad_std": grad_std, "grad_mean": grad_mean,
    }  # fmt: skip
