"""Where a parameter lies in the world, as methods tell optimizers that cannot see it from the parameter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

_ATTRIBUTE = "_held"


class Order(Protocol):
    """How the rows of a parameter lie here, and in the model's own order; see ``meshwright.nn.RankOrder``."""

    @property
    def dim(self) -> int:
        """The dim in question."""

    def to_model(self, tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        """A tensor in the model's own order."""

    def to_ranks(self, tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        """The way back."""


@dataclass(frozen=True)
class Held:
    """What one parameter is in the whole model."""

    position: int
    """Among the parameters of the whole model, in its order."""
    on: int
    """Pipeline ranks that train it, of :attr:`of`; all other ranks along other axes hold it, or shards of it."""
    of: int
    """Ranks of the pipeline."""
    order: Order | None = None
    """None: in the model's own."""


def tell_held(parameter: torch.Tensor, held: Held) -> None:
    """Notes it on the parameter."""
    setattr(parameter, _ATTRIBUTE, held)


def held_of(parameter: torch.Tensor) -> Held | None:
    """What was told; None: the parameter's mesh says all there is to know."""
    held: Held | None = getattr(parameter, _ATTRIBUTE, None)
    return held


def is_in_parts(optimizer: Optimizer) -> bool:
    """Whether this rank's parameters are a part of a whole model's, or lie in an order of their own."""
    every: Iterable[dict[str, Any]] = optimizer.param_groups
    told = (held_of(parameter) for group in every for parameter in group["params"])
    return any(held is not None and (held.of > 1 or held.order is not None) for held in told)
