"""A backward that cannot itself be differentiated, and says so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import ModelError


class _Refuse(torch.autograd.Function):
    """Identity of the gradients; differentiating it is the error."""

    @staticmethod
    def forward(ctx: Any, name: str, anchor: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.name = name
        return tuple(None if gradient is None else gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ModelError(
            f"The second derivative of {ctx.name} is not available",
            expected="one backward pass through the loss",
            got="a gradient that is differentiated again (create_graph=True)",
            fix="use torch.nn.functional.cross_entropy for losses that contain gradients",
        )


def once(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a Function's ``backward``: its results are constants, and differentiating them is a clear error.

    Without it a second differentiation would silently miss the terms that the saved values hide.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def wrapper(ctx: Any, *gradients: Tensor) -> Any:
            with torch.no_grad():
                results = backward(ctx, *gradients)
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # compiled graphs refuse it themselves
                return results
            anchor = torch.empty(0, requires_grad=True)
            return _Refuse.apply(name, anchor, *results)

        return wrapper

    return decorate
