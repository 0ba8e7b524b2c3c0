"""What one pipeline rank knows of the whole model, of which it holds a part: all names, and where each lies.

A model that ``pipeline_parallel`` has cut keeps its own names; this says which of them are elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

_ATTRIBUTE = "_part_of_whole"


@dataclass(frozen=True)
class Part:
    """One pipeline rank's part of a model, as plain data."""

    names: tuple[str, ...]
    """Of the whole model's state dict, in its order; tied tensors under each of theirs."""
    homes: Mapping[str, tuple[int, ...]]
    """By name, the pipeline ranks that hold a tensor as it is trained, ascending."""
    rank: int
    """This rank's place on the pipeline axis."""
    size: int
    """Ranks on it."""

    def is_home(self, name: str) -> bool:
        """Whether this rank holds a tensor as it is trained, and not a copy that is lent or goes stale."""
        homes = self.homes.get(name)  # what methods have added since is on every rank
        return homes is None or self.rank in homes


def keep_part_of_whole(model: nn.Module, part: Part) -> None:
    """Notes on a model what it is a part of."""
    model.__dict__[_ATTRIBUTE] = part


def part_of_whole(model: nn.Module) -> Part | None:
    """What :func:`keep_part_of_whole` noted; None for a model that every rank holds."""
    part: Part | None = model.__dict__.get(_ATTRIBUTE)
    return part
