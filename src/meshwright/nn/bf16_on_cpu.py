"""Compute bf16 products and attention in fp32 on CPUs that are slow in bf16.

Tensors stay bf16, also those that backward keeps. Only while a kernel runs do its operands exist in fp32 as well:
memory is that of bf16, and sums are at least as exact.
"""

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

from meshwright.nn.module_structure import find_blocks, wrap_method
from meshwright.runtime.torch_internals.autograd import Function, current_function_modes, in_functorch_transform
from meshwright.runtime.torch_internals.operators import (
    CPU_HAS_AMX_BF16,
    CPU_HAS_AVX512_BF16,
    flash_attention_on_cpu,
    flash_attention_on_cpu_backward,
)

# Fewer rows do not pay for converting the weight.
_MIN_ROWS = 32


def widen_products(model: nn.Module, device: torch.device) -> int:
    """Let the ``nn.Linear`` layers of a model multiply bf16 in fp32, on CPUs without bf16 products.

    Layers with a forward of their own, and DTensors, are left alone.

    Args:
        model: Changed in place.
        device: The device it runs on; on any but such a CPU nothing is done.

    Returns:
        The number of layers that were changed.
    """
    if device.type != "cpu" or has_bf16_products():
        return 0
    layers = [module for module in model.modules() if type(module).forward is nn.Linear.forward]
    for layer in layers:
        wrap_method(layer, "forward", _widened)
    return len(layers)


@functools.cache
def has_bf16_products() -> bool:
    """Return whether this CPU has instructions for bf16 products; True for unknown architectures."""
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


# --- Attention on x86 CPUs, in fp32 where torch's fused kernel is faster in it.
#
# Without bf16 instructions forward and backward are faster in fp32, several times. With them only backward over few
# tokens is (2 times over 128 tokens, not any more over 512); forward then stays in bf16.

_aten = torch.ops.aten
# Dims of the masks that the fused kernel takes.
_MASK_DIMS = (2, 4)
# Up to so many tokens backward is faster in fp32 on CPUs with bf16 products.
_MOST_TOKENS = 256


class WideAttention(TorchFunctionMode):
    """Mode in which ``scaled_dot_product_attention`` of bf16 tensors on the CPU runs in fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Intercept ``scaled_dot_product_attention``; run anything else as it is."""
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _attention(*args, **(kwargs or {}))


def attends_wide(device: torch.device) -> bool:
    """Return whether bf16 attention may run in fp32 on a device: on x86 CPUs, where it was measured."""
    return device.type == "cpu" and platform.machine().lower() in ("x86_64", "amd64")


def with_wide_attention(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a forward with its attention in fp32; nested calls enter the mode once."""
    with contextlib.nullcontext() if _is_on() else WideAttention():
        return forward(*args, **kwargs)


def carried(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that enters :class:`WideAttention` if it is active now.

    Recomputation in backward runs when the mode has been left.
    """
    return functools.partial(with_wide_attention, forward) if _is_on() else forward


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
    plain = dropout_p == 0.0 and not (is_causal and attn_mask is not None)
    if not (plain and _is_half(given) and _fits_kernel(given, attn_mask, enable_gqa)):
        return scaled_dot_product_attention(
            *given, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    halves = (each.to(torch.bfloat16) for each in given)
    return _WidenedAttention.apply(*halves, attn_mask, is_causal, scale)  # type: ignore[no-any-return]


def _is_half(given: tuple[Tensor, ...]) -> bool:
    # Whether torch would compute in bf16.
    if torch.is_autocast_enabled("cpu"):
        floating = all(each.dtype in (torch.float32, torch.bfloat16) for each in given)
        return floating and torch.get_autocast_dtype("cpu") == torch.bfloat16
    return all(each.dtype == torch.bfloat16 for each in given)


def _fits_kernel(given: tuple[Tensor, ...], mask: Tensor | None, grouped: bool) -> bool:
    # Whether torch's fused kernel applies, and neither a compiler nor functorch transforms the operators.
    query, key, value = given
    if torch.compiler.is_compiling() or in_functorch_transform():
        return False
    if any(type(each) is DTensor or each.device.type != "cpu" or each.dim() != 4 for each in given):
        return False
    if key.shape != value.shape or query.shape[0] != key.shape[0] or query.shape[-1] != key.shape[-1]:
        return False
    heads, of_keys = query.shape[1], key.shape[1]
    if heads != of_keys and not (grouped and of_keys > 0 and heads % of_keys == 0):
        return False
    if has_bf16_products() and key.shape[-2] > _MOST_TOKENS:
        return False
    masked = mask is None or (mask.dim() in _MASK_DIMS and not mask.requires_grad and mask.device.type == "cpu")
    return masked and all(each.numel() > 0 for each in given)


class _WidenedAttention(Function):
    """Query (B, H, T, D), key and value (B, K, S, D) in bf16, of which H / K heads share one; output (B, H, T, D)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
    ) -> Tensor:
        ctx.is_causal, ctx.scale = is_causal, scale
        given = (query, key, value) if has_bf16_products() else tuple(map(_wide, (query, key, value)))
        with torch.autocast("cpu", enabled=False):
            found, sums = flash_attention_on_cpu(
                *(_for_heads(_along_rows(each), query) for each in given),
                0.0,
                is_causal,
                attn_mask=_added(mask),
                scale=scale,
            )
        out = found.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, out, sums)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, mask, out, sums = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            found = flash_attention_on_cpu_backward(
                *(_for_heads(_wide(each), query) for each in (gradient, query, key, value, out)), sums, 0.0,
                ctx.is_causal, attn_mask=_added(mask), scale=ctx.scale,
            )  # fmt: skip
        of_shared = (_over_heads(each, key) for each in found[1:])
        return (found[0].to(query.dtype), *(each.to(query.dtype) for each in of_shared), None, None, None)


def _wide(half: Tensor) -> Tensor:
    return _along_rows(half.float())


def _along_rows(tensor: Tensor) -> Tensor:
    # The kernel reads rows with stride 1.
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _for_heads(given: Tensor, query: Tensor) -> Tensor:
    # Heads that share keys and values: each gets a copy, which the kernel reads, and backward does not keep.
    return given if given.shape[1] == query.shape[1] else given.repeat_interleave(query.shape[1] // given.shape[1], 1)


def _over_heads(gradient: Tensor, given: Tensor) -> Tensor:
    heads = given.shape[1]
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)


def _added(mask: Tensor | None) -> Tensor | None:
    """Return the mask that is added to scores: minus infinity where a boolean mask is false."""
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else mask.float()
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, float("-inf"))


def widen(model: nn.Module, device: torch.device) -> None:
    """Let a bf16 model's products and attention run in fp32 where that is faster; change it in place."""
    widen_products(model, device)
    if attends_wide(device):
        # Blocks, too: a model's own torch.utils.checkpoint runs them again in backward, and must save the same tensors.
        for module in (model, *(block for _, block in find_blocks(model))):
            wrap_method(module, "forward", with_wide_attention)


@contextlib.contextmanager
def widened(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Apply :func:`widen` inside the context; afterwards the model is as it was."""
    classes = {module: type(module) for module in model.modules() if isinstance(module, nn.Linear)}
    widen_products(model, device)
    try:
        with WideAttention() if attends_wide(device) else contextlib.nullcontext():
            yield
    finally:
        for module, cls in classes.items():
            module.__class__ = cls
