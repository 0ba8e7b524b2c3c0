"""Clipping inside the optimizer's own kernel: gradients are divided where the update reads them anyway."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from meshwright.optim.clip import Stages, clip_divisor, divide_, local_tensor
from meshwright.optim.guarded import GuardedOptimizer
from meshwright.optim.wrapped import shows_gradients
from meshwright.optim.wrappers import clip_gradients

_FUSED = (Adam, AdamW, SGD)  # their kernels divide by ``grad_scale``, and write what they have divided back
_INFINITY = float("inf")


def clipped_step(
    model: nn.Module,
    optimizer: Optimizer,
    max_norm: float | None,
    norm_type: float = 2.0,
    stages: Stages | None = None,
) -> tuple[torch.Tensor, Callable[[], None]]:
    """The norm of the gradients before clipping (0-dim), and the step of the optimizer that is to follow.

    torch's fused optimizers clip in their kernel: until the step gradients are as backward left them, after it they are
    clipped. For all others they are clipped at once.

    Args:
        model: As a strategy has changed it.
        optimizer: Its optimizer, with guards and replicas around it or without.
        max_norm: Largest norm allowed; None only measures.
        norm_type: p of the p-norm.
        stages: Where the model is one pipeline rank's part: the norm is that of all of them.
    """
    fused, parameters = _fused_optimizer(optimizer), _parameters_of(model)
    if fused is None or max_norm is None or not max_norm > 0:  # the last is refused
        limit = _INFINITY if max_norm is None else max_norm
        return clip_gradients(parameters, optimizer, limit, norm_type, stages), optimizer.step
    norm = clip_gradients(parameters, optimizer, _INFINITY, norm_type, stages)
    clipped = parameters if optimizer is fused else ()  # guards clip what their optimizer updates
    return norm, functools.partial(_divide_and_step, clipped, optimizer, fused, norm, max_norm)


def _parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """As ``list(model.parameters())``, in a third of the time: torch composes every module's name, in each step."""
    found: dict[int, nn.Parameter] = {}
    met: set[int] = set()
    ahead: list[nn.Module | None] = [model]
    while ahead:
        module = ahead.pop()
        if module is None or id(module) in met:
            continue
        met.add(id(module))
        found.update((id(parameter), parameter) for parameter in module._parameters.values() if parameter is not None)
        ahead += reversed(module._modules.values())
    return list(found.values())


def _fused_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """What divides gradients in its kernel; None where there is no such kernel, or somebody looks before it."""
    guarded = isinstance(optimizer, GuardedOptimizer)
    if guarded and optimizer.scaler is not None:  # type: ignore[attr-defined]
        return None
    inner: Optimizer = optimizer.inner if guarded else optimizer  # type: ignore[attr-defined]
    if type(inner) not in _FUSED or not all(group["fused"] for group in inner.param_groups):
        return None
    if shows_gradients(inner) or hasattr(inner, "grad_scale"):
        return None
    every = (parameter for group in inner.param_groups for parameter in group["params"])
    if any(p.dtype == torch.float64 or (type(inner) is SGD and isinstance(p, DTensor)) for p in every):
        return None  # the kernels read the divisor in fp32
    return inner


def _divide_and_step(
    clipped: Sequence[torch.Tensor], optimizer: Optimizer, fused: Optimizer, norm: torch.Tensor, max_norm: float
) -> None:
    """Steps with divided gradients; those of ``clipped`` that are not updated are divided, too."""
    divisor = clip_divisor(norm, max_norm)
    if divisor.device.type == "cpu" and divisor == 1.0:  # known without waiting for a device
        optimizer.step()
        return
    updated = {id(parameter) for group in fused.param_groups for parameter in group["params"]}
    beside = [p.grad for p in clipped if p.grad is not None and id(p) not in updated]
    divide_([local_tensor(gradient) for gradient in beside], divisor)
    fused.grad_scale = divisor  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del fused.grad_scale  # type: ignore[attr-defined]
