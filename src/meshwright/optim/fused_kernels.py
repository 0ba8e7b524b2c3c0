"""torch's fused optimizers: which can be used, and steps that a device skips by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

KERNELS = (Adam, AdamW, SGD)
"""Classes whose kernels divide gradients by ``grad_scale``, and leave everything as it is where ``found_inf`` is 1."""

_OTHER_CHOICES = ("fused", "foreach", "capturable", "differentiable")


def use_fused(optimizer: Optimizer) -> bool:
    """Return whether an optimizer, and no subclass of it, updates all its parameters with the fused kernels."""
    return type(optimizer) in KERNELS and all(group["fused"] for group in optimizer.param_groups)


def step_unless(optimizer: Optimizer, skipped: torch.Tensor) -> None:
    """Take a step that the device skips where a number is 1; the host does not wait for it.

    Args:
        optimizer: See :func:`use_fused`.
        skipped: 0 or 1, 0-dim fp32 on the device.
    """
    kernels: Any = optimizer
    kernels.found_inf = skipped
    try:
        kernels.step()
    finally:
        del kernels.found_inf


def fused_where_possible(build: Callable[..., Optimizer], device: torch.device) -> Callable[..., Optimizer]:
    """Let an optimizer of torch use its fused kernels on CUDA, unless its arguments choose otherwise.

    torch itself takes lists of operations (``foreach``): more kernels, more memory for a moment, and a step that cannot
    be skipped on the device.

    Args:
        build: Called with parameters and options.
        device: The device that the model computes on.

    Returns:
        A function that builds the same optimizer.
    """
    if device.type != "cuda" or build not in KERNELS:
        return build

    def built(params: Any, **options: Any) -> Optimizer:
        optimizer = build(params, **options)
        for group in optimizer.param_groups:
            if any(group.get(name) for name in _OTHER_CHOICES) or group.get("foreach") is False:
                return optimizer
            if group["fused"] is False or not all(_has_kernel(build, each) for each in group["params"]):
                return optimizer
        for group in (optimizer.defaults, *optimizer.param_groups):
            group["fused"], group["foreach"] = True, False
        return optimizer

    return built


def _has_kernel(build: Any, parameter: torch.Tensor) -> bool:
    # torch's fused SGD has no rule for DTensors.
    return torch.is_floating_point(parameter) and not (build is SGD and isinstance(parameter, DTensor))
