"""Floating-point operations of the operators that run, by torch's own formulas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from meshwright.planner.profile.views import cast_of

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class FlopCount(TorchDispatchMode):
    """Adds up what torch's ``FlopCounterMode`` does, of the whole pass alone: without its records of modules.

    Attributes:
        total: Floating-point operations so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled, and torch's guard against it takes longer than the operators without data do."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = kwargs or {}
        if _is_composite(func):
            with self:
                return func.decompose(*args, **given)
        cast = cast_of(func, args, given)  # past the mode beneath alone: above, casts are looked at
        if cast is not None:
            return cast
        result = func(*args, **given)
        formula = flop_registry.get(func._overloadpacket) or _of_cpu(func._overloadpacket)
        if formula is not None:
            self.total += formula(*_with_all_heads(func, args), **given, out_val=result)
        return result


def _with_all_heads(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Grouped keys and values of attention as the queries are, (B, H, S, D): torch 2.11's formulas know no groups."""
    if "scaled_dot_product" not in func._opname:
        return args
    sized = [each for each in args if isinstance(each, torch.Tensor) and each.dim() == 4]
    heads = max((each.shape[1] for each in sized), default=0)
    grouped = {id(each) for each in sized if each.shape[1] != heads}
    return tuple(each[:, :1].expand(-1, heads, -1, -1) if id(each) in grouped else each for each in args)


def _of_cpu(operator: Any) -> Callable[..., int] | None:
    """Attention as CPUs run it, which torch's table lacks: counted as that of GPUs, with all scores."""
    if operator is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return lambda query, key, value, *_, **__: sdpa_flop_count(query.shape, key.shape, value.shape)
    if operator is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return lambda gradient, *qkv, **__: sdpa_backward_flop_count(gradient.shape, *(each.shape for each in qkv[:3]))
    return None


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether an operator is nothing but others, which are then counted."""
    return _COMPOSITE in func.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)
