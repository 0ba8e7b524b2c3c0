"""bf16 products on CPUs that have no instructions for them: in fp32, which they multiply several times as fast.

A bf16 number is an fp32 number, so products of bf16 numbers that are summed in fp32 and rounded once are the same in
both ways, up to the order of the sums. oneDNN does it for every product anew; here a matrix is widened once.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.nn.forward import wrap_methods
from meshwright.runtime.function import Function

_MIN_ROWS = 32  # fewer do not pay for widening the weight


def widen_products(model: nn.Module, device: torch.device) -> int:
    """Lets the ``nn.Linear`` layers of a model multiply in fp32 where they would in bf16, on CPUs that lack bf16.

    Weights, inputs, outputs and what backward keeps stay as they are; only for the time of a product its factors exist
    in fp32, too. Layers whose forward is not that of ``nn.Linear``, and DTensors, are left alone.

    Args:
        model: Changed in place.
        device: Where it computes; nothing is done on others than such CPUs.

    Returns:
        How many layers were changed.
    """
    if device.type != "cpu" or has_bf16_products():
        return 0
    layers = [module for module in model.modules() if type(module).forward is nn.Linear.forward]
    wrap_methods(layers, "forward", _widened)
    return len(layers)


@functools.cache
def has_bf16_products() -> bool:
    """Whether this CPU multiplies bf16 numbers; True for those that are not known here."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    known = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(ask is None or ask() for ask in known)


def _widened(forward: Callable[..., Any], input: Tensor) -> Tensor:
    layer = forward.args[0]  # type: ignore[attr-defined]
    weight, bias = layer.weight, layer.bias
    autocast = torch.is_autocast_enabled("cpu")
    half = (torch.get_autocast_dtype("cpu") if autocast else weight.dtype) == torch.bfloat16
    half = half and (autocast or input.dtype == torch.bfloat16)
    if not half or input.numel() < _MIN_ROWS * weight.shape[1] or _is_left_alone(input, weight):
        return forward(input)  # type: ignore[no-any-return]
    return _Widened.apply(*(None if each is None else each.to(torch.bfloat16) for each in (input, weight, bias)))  # type: ignore[no-any-return]


def _is_left_alone(input: Tensor, weight: Tensor) -> bool:
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return isinstance(weight, DTensor) or isinstance(input, DTensor) or weight.device.type != "cpu"


class _Widened(Function):
    """``F.linear`` of bf16 tensors: input (…, I), weight (O, I), bias (O) or None; output (…, O)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_input, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(input if of_weight else None, weight if of_input else None)
        with torch.autocast("cpu", enabled=False):  # would narrow them again
            wide = F.linear(input.float(), weight.float(), None if bias is None else bias.float())
        return wide.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[override]
        input, weight = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        half = gradient.dtype
        with torch.autocast("cpu", enabled=False):
            wide = gradient.float()
            rows = wide.flatten(0, -2)
            return (
                (wide @ weight.float()).to(half) if of_input else None,
                (rows.t() @ input.flatten(0, -2).float()).to(half) if of_weight else None,
                rows.sum(0).to(half) if of_bias else None,
            )
