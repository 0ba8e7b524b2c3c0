"""What an OptimManager refuses, before anything is changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from meshwright.errors import ConfigError, ModelError
from meshwright.optim.guarded import GuardedOptimizer
from meshwright.optim.manager.loss_scale import LossScale
from meshwright.optim.outer import OuterOptimizer

_POLICIES = ("skip", "raise", "ignore")


def check_policy(on_nonfinite: str | None, scale: LossScale, grad_scale: float | None, max_skips: int) -> None:
    """Refuses a manager's arguments that do not fit together.

    Raises:
        ConfigError: When ``on_nonfinite`` is none, or not one for this scale, or another number is out of range.
    """
    if on_nonfinite not in (None, *_POLICIES) or (scale.dynamic and on_nonfinite not in (None, "skip")):
        raise ConfigError(
            "on_nonfinite does not fit",
            expected="'skip' with a loss scale that adapts, else one of 'skip', 'raise' and 'ignore'",
            got=repr(on_nonfinite),
            fix="leave it out, or fix the scale with loss_scale_steps=None",
        )
    if max_skips < 1 or (grad_scale is not None and not 0 < grad_scale < float("inf")):
        raise ConfigError(
            "max_skips or grad_scale is out of range",
            expected="max_skips of 1 or more, and a finite grad_scale above 0 or None",
            got=f"max_skips={max_skips!r}, grad_scale={grad_scale!r}",
            fix="leave them out",
        )


def check_optimizer(optimizer: Optimizer, others: Sequence[Optimizer]) -> None:
    """Refuses an optimizer that cannot be stepped with others.

    Raises:
        ConfigError: When it guards its own steps, needs a closure, or updates what another one does.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, GuardedOptimizer):
        raise ConfigError(
            "A GuardedOptimizer decides about its steps and its loss scale itself",
            expected="an optimizer that steps when it is told to",
            got=repr(optimizer),
            fix="add AdamOptimizer, which has fp32 master weights too, or any torch optimizer",
        )
    if any(required(optimizer.step, skip=("self",))):
        raise ConfigError(
            f"{name}.step needs arguments, such as a closure, and a manager has none to give",
            expected="an optimizer whose step() can be called without arguments",
            got=f"step{inspect.signature(optimizer.step)}",
            fix=f"step {name} by itself",
        )
    if others and isinstance(optimizer, OuterOptimizer) != isinstance(others[0], OuterOptimizer):
        raise ConfigError(
            "Some of the optimizers synchronise replicas and others do not",
            expected="outer optimizers, such as DiLoCo, for all parameters or for none",
            got=f"{name} beside {type(others[0]).__name__}",
            fix="wrap each of them: replicas must agree on every parameter that trains",
        )
    if isinstance(optimizer, OuterOptimizer) and optimizer.guard is not None:
        raise ConfigError(
            "A GuardedOptimizer decides about its steps and its loss scale itself",
            expected=f"a {name} around an optimizer that steps when it is told to",
            got=repr(optimizer.guard),
            fix=f"wrap AdamOptimizer, which has fp32 master weights too, or any torch optimizer into {name}",
        )
    taken = {id(p) for other in others for group in other.param_groups for p in group["params"]}
    shared = [p for group in optimizer.param_groups for p in group["params"] if id(p) in taken]
    if shared:
        raise ConfigError(
            f"{len(shared)} parameters of this {name} are updated by another optimizer already",
            expected="every parameter in one optimizer",
            got=f"parameters of shapes {[tuple(p.shape) for p in shared[:5]]} in two",
            fix="split the parameters between the optimizers; add each optimizer once",
        )


def check_scheduler(scheduler: Any, optimizer: Optimizer) -> None:
    """Refuses a scheduler of another optimizer, or one that needs to be told something.

    Raises:
        ConfigError: When it is one of these.
    """
    if scheduler is None:
        return
    name, owner = type(scheduler).__name__, getattr(scheduler, "optimizer", optimizer)
    if owner is not optimizer:
        raise ConfigError(
            f"The {name} belongs to another optimizer",
            expected=f"the {type(optimizer).__name__} that is added with it",
            got=type(owner).__name__,
            fix="add each optimizer with its own scheduler",
        )
    if any(required(scheduler.step)):
        raise ConfigError(
            f"{name}.step needs arguments, and a manager has none to give",
            expected="a scheduler whose step() can be called without arguments",
            got=f"step{inspect.signature(scheduler.step)}",
            fix="add the optimizer without it, and step it yourself unless manager.step_was_skipped",
        )


def required(function: Callable[..., Any], skip: Iterable[str] = ()) -> Iterable[str]:
    """Names of the arguments that a function cannot be called without."""
    for parameter in inspect.signature(function).parameters.values():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not variadic and parameter.name not in skip:
            yield parameter.name


def check_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Refuses sparse gradients, which can be neither measured nor checked with the others.

    Raises:
        ModelError: When there is one.
    """
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ModelError(
                "A gradient is sparse",
                expected="dense gradients",
                got=f"{parameter.grad.layout} for a parameter of shape {tuple(parameter.shape)}",
                fix="build the embedding with sparse=False, or step its optimizer by itself",
            )
