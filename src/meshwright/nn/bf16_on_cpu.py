"""Compute bf16 products and attention in fp32 on CPUs that are slow in bf16."""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from meshwright.nn.module_structure import wrap_method, wrap_methods
from meshwright.runtime.torch_internals.autograd import Function, current_function_modes, in_functorch_transform
from meshwright.runtime.torch_internals.operators import (
    CPU_HAS_AMX_BF16,
    CPU_HAS_AVX512_BF16,
    flash_attention_on_cpu,
    flash_attention_on_cpu_backward,
)

_MIN_ROWS = 32  # fewer do not pay for widening the weight


def widen_products(model: nn.Module, device: torch.device) -> int:
    """Let the ``nn.Linear`` layers of a model multiply in fp32 where they would in bf16, on CPUs that lack bf16.

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
    """Return whether this CPU multiplies bf16 numbers; True for those that are not known here."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    known = (getattr(torch.cpu, name, None) for name in (CPU_HAS_AVX512_BF16, CPU_HAS_AMX_BF16))
    return any(ask is None or ask() for ask in known)


def _widened(forward: Callable[..., Any], input: Tensor) -> Tensor:
    layer = forward.args[0]  # type: ignore[attr-defined]
    weight, bias = layer.weight, layer.bias
    autocast = torch.is_autocast_enabled("cpu")
    half = (torch.get_autocast_dtype("cpu") if autocast else weight.dtype) == torch.bfloat16
    half = half and (autocast or input.dtype == torch.bfloat16)
    if not half or input.numel() < _MIN_ROWS * weight.shape[1] or _is_left_alone(input, weight):
        return forward(input)  # type: ignore[no-any-return]
    return _WidenedLinear.apply(*(None if each is None else each.to(torch.bfloat16) for each in (input, weight, bias)))  # type: ignore[no-any-return]


def _is_left_alone(input: Tensor, weight: Tensor) -> bool:
    if torch.compiler.is_compiling() or in_functorch_transform():
        return True
    return isinstance(weight, DTensor) or isinstance(input, DTensor) or weight.device.type != "cpu"


class _WidenedLinear(Function):
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


# --- bf16 attention on x86 CPUs: in fp32 where torch's fused kernel is faster in that.
#
# Without bf16 instructions all of it is, several times. With them backward over few tokens is (2 times over 128; over
# 512 it no longer is), and forward stays as it is. Queries, keys, values and results stay bf16 in what backward keeps;
# only while a kernel runs do they exist in fp32, too: memory is that of bf16, and sums are at least as exact.

_aten = torch.ops.aten
_MASK_DIMS = (2, 4)  # that the fused kernel takes
_MOST_TOKENS = 256  # up to which backward is faster in fp32 on CPUs that multiply bf16


class WideAttention(TorchFunctionMode):
    """While it is entered, attention of bf16 tensors on the CPU runs in fp32; all else runs as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Answer calls of ``scaled_dot_product_attention``."""
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _attention(*args, **(kwargs or {}))


def attends_wide(device: torch.device) -> bool:
    """Return whether bf16 attention runs in fp32 there: on x86, where it was measured."""
    return device.type == "cpu" and platform.machine().lower() in ("x86_64", "amd64")


def with_wide_attention(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Go around a forward whose attention is to run in fp32; nothing is done inside another such."""
    with contextlib.nullcontext() if _is_on() else WideAttention():
        return forward(*args, **kwargs)


def carried(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that runs again in backward as it runs now, when modes that were entered have been left."""

    def again(*args: Any, **kwargs: Any) -> Any:
        return with_wide_attention(forward, *args, **kwargs)

    return again if _is_on() else forward


def _is_on() -> bool:
    return any(isinstance(mode, WideAttention) for mode in current_function_modes())


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    given = (query, key, value)
    plain = dropout_p == 0.0 and not enable_gqa and not (is_causal and attn_mask is not None)
    if not (plain and _is_half(given) and _fits_kernel(given, attn_mask)):
        return scaled_dot_product_attention(
            *given, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    halves = (each.to(torch.bfloat16) for each in given)
    return _WidenedAttention.apply(*halves, attn_mask, is_causal, scale)  # type: ignore[no-any-return]


def _is_half(given: tuple[Tensor, ...]) -> bool:
    """Return whether torch would compute in bf16."""
    if torch.is_autocast_enabled("cpu"):
        floating = all(each.dtype in (torch.float32, torch.bfloat16) for each in given)
        return floating and torch.get_autocast_dtype("cpu") == torch.bfloat16
    return all(each.dtype == torch.bfloat16 for each in given)


def _fits_kernel(given: tuple[Tensor, ...], mask: Tensor | None) -> bool:
    """Return whether it is what torch's fused kernel does, and nobody looks at or transforms the operators."""
    query, key, value = given
    if torch.compiler.is_compiling() or in_functorch_transform():
        return False
    if any(type(each) is DTensor or each.device.type != "cpu" or each.dim() != 4 for each in given):
        return False
    if key.shape != value.shape or query.shape[:2] != key.shape[:2] or query.shape[-1] != key.shape[-1]:
        return False
    if has_bf16_products() and key.shape[-2] > _MOST_TOKENS:
        return False
    masked = mask is None or (mask.dim() in _MASK_DIMS and not mask.requires_grad and mask.device.type == "cpu")
    return masked and all(each.numel() > 0 for each in given)


class _WidenedAttention(Function):
    """Query (B, H, T, D), key and value (B, H, S, D) in bf16; output (B, H, T, D)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
    ) -> Tensor:
        ctx.is_causal, ctx.scale = is_causal, scale
        given = (query, key, value) if has_bf16_products() else tuple(map(_wide, (query, key, value)))
        with torch.autocast("cpu", enabled=False):
            found, sums = flash_attention_on_cpu(
                *map(_along_rows, given), 0.0, is_causal, attn_mask=_added(mask), scale=scale
            )
        out = found.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, out, sums)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, mask, out, sums = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            found = flash_attention_on_cpu_backward(
                *map(_wide, (gradient, query, key, value, out)), sums, 0.0, ctx.is_causal,
                attn_mask=_added(mask), scale=ctx.scale,
            )  # fmt: skip
        return (*(each.to(query.dtype) for each in found), None, None, None)


def _wide(half: Tensor) -> Tensor:
    return _along_rows(half.float())


def _along_rows(tensor: Tensor) -> Tensor:
    """As the kernel reads it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _added(mask: Tensor | None) -> Tensor | None:
    """Return what is added to scores: of a mask of truths, minus infinity where it is false."""
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else mask.float()
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, float("-inf"))


# --- Models in bf16 on CPUs: what these are slow in runs in fp32.


def widen(model: nn.Module, device: torch.device) -> None:
    """Let a model's layers multiply, and its forward attend, in fp32 where that is faster; change it in place."""
    widen_products(model, device)
    if attends_wide(device):
        wrap_method(model, "forward", with_wide_attention)


@contextlib.contextmanager
def widened(model: nn.Module, device: torch.device) -> Iterator[None]:
    """:func:`widen` for a while: afterwards the model is as it was."""
    classes = {module: type(module) for module in model.modules() if isinstance(module, nn.Linear)}
    widen_products(model, device)
    try:
        with WideAttention() if attends_wide(device) else contextlib.nullcontext():
            yield
    finally:
        for module, cls in classes.items():
            module.__class__ = cls
