"""A criterion that users call with whatever they like, as the loss function that methods wrap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from meshwright.accelerated import Accelerated
from meshwright.methods import StageOutput
from meshwright.strategy import Strategy

Criterion = Callable[..., Any]


class CalledWith(NamedTuple):
    """The arguments of a criterion, in the place of a model's output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def loss_of(criterion: Criterion | None) -> Callable[[Any, Any], Any] | None:
    """The criterion as methods wrap losses.

    A model's own output comes in a pass without data alone, which asks what depends on what: any sum tells that.
    """
    if criterion is None:
        return None

    def loss(_: Any, output: Any) -> Any:
        if isinstance(output, CalledWith):
            return criterion(*output.args, **output.kwargs)
        floating = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
        return sum(leaf.sum() for leaf in floating)

    return loss


def wrapped_criterion(criterion: Criterion | None, accelerated: Accelerated, strategy: Strategy) -> Criterion | None:
    """The criterion with what precision and stages need around it; itself where they need nothing."""
    wrapped = accelerated.unscaled_loss_func
    if wrapped is None or not {"half", "amp_native", "pipeline_parallel"} & set(strategy.names):
        return criterion

    def call(*args: Any, **kwargs: Any) -> Any:
        elsewhere = [value for value in (*args, *kwargs.values()) if isinstance(value, StageOutput)]
        return wrapped(None, elsewhere[0] if elsewhere else CalledWith(args, kwargs))

    return call
