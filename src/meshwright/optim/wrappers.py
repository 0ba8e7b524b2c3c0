"""Through the wrappers of an optimizer: its guards, and clipping as they want it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from meshwright.optim.clip import Stages, clip_grad_norm_, clip_grad_value_
from meshwright.optim.guarded import GuardedOptimizer
from meshwright.optim.wrapped import is_outer


def guard_of(optimizer: Optimizer | None) -> GuardedOptimizer | None:
    """The guards of an optimizer, also inside an outer one; None where there are none."""
    inner = optimizer.inner if is_outer(optimizer) else optimizer
    return inner if isinstance(inner, GuardedOptimizer) else None


def clip_gradients(
    parameters: Iterable[torch.Tensor],
    optimizer: Optimizer | None,
    max_norm: float,
    norm_type: float = 2.0,
    stages: Stages | None = None,
) -> torch.Tensor:
    """Clips the gradients of a model, prepared as its optimizer wants them; returns their norm before (0-dim).

    Args:
        parameters: Of the model as a strategy has changed it.
        optimizer: Its optimizer, with guards and replicas around it or without.
        max_norm: Largest norm allowed.
        norm_type: p of the p-norm.
        stages: Where the model is one pipeline rank's part: the norm is that of all of them.
    """
    if is_outer(optimizer):
        optimizer.prepare_gradients()
    guard = guard_of(optimizer)
    if guard is not None:
        return guard.clip_grad_norm(max_norm, norm_type)
    return clip_grad_norm_(parameters, max_norm, norm_type, stages)


def clip_gradient_values(parameters: Iterable[torch.Tensor], optimizer: Optimizer | None, clip_value: float) -> None:
    """Clamps every element of a model's gradients, prepared as its optimizer wants them; arguments as above."""
    if is_outer(optimizer):
        optimizer.prepare_gradients()
    guard = guard_of(optimizer)
    if guard is not None:
        guard.clip_grad_value(clip_value)
    else:
        clip_grad_value_(parameters, clip_value)
