"""Logits of a linear head, kept as what they are made of until something other than a cross entropy wants them.

Shapes: (…, D) hidden states · (C, D) weight · (C,) bias · (…, C) logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.errors import ModelError
from meshwright.loss.lazy_logits import LazyLogits
from meshwright.loss.linear_cross_entropy import in_autocast_type, linear_cross_entropy

_T: Any = torch.Tensor
_CASTS = {
    _T.float: torch.float32, _T.half: torch.float16, _T.bfloat16: torch.bfloat16, _T.double: torch.float64,
}  # fmt: skip
_SAME = {_T.contiguous, _T.clone, torch.clone}


class HeadLogits(LazyLogits):
    """``F.linear(hidden, weight, bias)`` that is not computed: its cross entropy goes a few rows at a time.

    ``F.cross_entropy`` of it (after slices, flattening and casts, as losses of language models do) is
    :func:`~meshwright.loss.linear_cross_entropy`, in which the logits are never there at once. Anything else computes
    them. Made by :meth:`of`.
    """

    weight: Tensor
    bias: Tensor | None

    @staticmethod
    def __new__(
        cls: type[HeadLogits], hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> HeadLogits:
        """Makes a tensor without memory of its own."""
        shape = (*hidden.shape[:-1], weight.shape[0])
        self: HeadLogits = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=dtype, device=hidden.device
        )
        self.part, self.weight, self.bias, self.whole = hidden, weight, bias, None
        return self

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> HeadLogits:
        """The logits of a head, in the type in which ``F.linear`` would give them (that of autocast, where it is on).

        Args:
            hidden: (…, D).
            weight: (C, D); it must hold its values until the loss is computed.
            bias: (C,).
        """
        hidden, weight, bias = in_autocast_type(hidden, weight, bias)
        return _deferred(hidden, weight, bias, hidden.dtype)

    @property
    def num_classes(self) -> int:
        """C."""
        return self.weight.shape[0]

    def make_whole(self) -> Tensor:
        """The product."""
        self._check_weight()
        with torch.autocast(self.part.device.type, enabled=False):
            return F.linear(self.part, self.weight, self.bias).to(self.dtype)

    def with_part(self, part: Tensor) -> HeadLogits:
        """The logits of other hidden states."""
        return _deferred(part, self.weight, self.bias, self.dtype)

    def elementwise(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> HeadLogits | None:
        """Casts; the cross entropy is computed in fp32 from products in the type of the head, whatever the cast."""
        if func in _SAME:
            return self.with_part(self.part)
        dtype = _CASTS.get(func)
        if func is _T.to and len(args) + len(kwargs) == 1:
            dtype = args[0] if args else kwargs.get("dtype")
        # To a narrower type, rounding the logits is part of the result.
        widens = isinstance(dtype, torch.dtype) and torch.promote_types(dtype, self.dtype) == dtype
        return _deferred(self.part, self.weight, self.bias, dtype) if dtype is not None and widens else None

    def cross_entropy(
        self, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
    ) -> Tensor:
        """The cross entropy of rows (N, C), in at least fp32; see :func:`linear_cross_entropy`."""
        self._check_weight()
        with torch.autocast(self.part.device.type, enabled=False):  # what it does to types has been done
            return linear_cross_entropy(
                self.part,
                self.weight,
                target,
                self.bias,
                class_weight=weight,
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=label_smoothing,
            )

    def _check_weight(self) -> None:
        """Refuses a weight that FSDP has freed since."""
        if self.weight.untyped_storage().nbytes() == 0:
            raise ModelError(
                "The weight of the head was freed before the loss was computed",
                expected="a head outside the units that are freed after their forward, as it is by default",
                got="a head that is a unit of its own, or in one",
                fix="do not name its class with atorch_wrap_cls, or leave loss out of module_replace",
            )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        shape = (*self.part.shape[:-1], self.num_classes)
        return f"HeadLogits(shape={shape}, hidden={tuple(self.part.shape)}, dtype={self.dtype})"


def _deferred(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> HeadLogits:
    with torch._C.DisableTorchFunctionSubclass():
        logits: HeadLogits = _Wrapped.apply(hidden, weight, bias, dtype)
    # Inside the function they were cut off from their graphs.
    logits.part, logits.weight, logits.bias = hidden, weight, bias
    return logits


class _Wrapped(torch.autograd.Function):
    """Logits of a head. Functions with a backward of their own give a gradient of the logits back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> HeadLogits:
        ctx.save_for_backward(hidden, weight)
        return HeadLogits(hidden, weight, bias, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        gradient = gradient.to(hidden.dtype)
        rows = gradient.flatten(0, -2)
        wants_hidden, wants_weight, wants_bias, _ = ctx.needs_input_grad
        return (
            gradient @ weight if wants_hidden else None,
            rows.T @ hidden.flatten(0, -2) if wants_weight else None,
            rows.sum(0) if wants_bias else None,
            None,
        )
