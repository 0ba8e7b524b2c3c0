"""An optimizer around another one."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

if TYPE_CHECKING:
    from meshwright.optim.ema import WeightAverage
    from meshwright.optim.outer import OuterOptimizer

AVERAGE = "_weight_average"


class WrappedOptimizer(Optimizer):
    """Base of optimizers that change what happens around another one's step.

    Groups and states are the inner optimizer's own, so learning-rate schedulers take the wrapper for an optimizer.

    Args:
        inner: Any torch optimizer.
    """

    is_outer: ClassVar[bool] = False
    """Whether it is an OuterOptimizer, whose module is imported by those who have one."""

    def __init__(self, inner: Optimizer) -> None:
        # No super().__init__: it would want groups of its own.
        self.inner = inner
        self.defaults = inner.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's states."""
        return self.inner.state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_optimizer_"):  # torch's lists of hooks: whoever registers one means the inner steps
            return getattr(self.inner, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        # Without what others have put around ``step``, as schedulers do: it would step the original.
        return {name: value for name, value in vars(self).items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Not torch's, which puts its own wrapper around the ``step`` of the class.
        vars(self).update(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients."""
        self.inner.zero_grad(set_to_none)


def is_outer(optimizer: Optimizer | None) -> TypeGuard[OuterOptimizer]:
    """Whether an optimizer is an OuterOptimizer."""
    return isinstance(optimizer, WrappedOptimizer) and optimizer.is_outer


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that holds the states, inside all wrappers."""
    while isinstance(optimizer, WrappedOptimizer):
        optimizer = optimizer.inner
    return optimizer


def call_around(
    optimizer: Optimizer, before: Sequence[Callable[[], None]] = (), after: Sequence[Callable[[], None]] = ()
) -> None:
    """Calls these around every step of an optimizer. Those before it must not look at gradients: kernels clip later."""
    if isinstance(optimizer, WrappedOptimizer) and (before or after):  # has no hooks, and its inner one several steps
        step = optimizer.step

        def stepped(_: Optimizer, *args: Any, **kwargs: Any) -> None:
            for call in before:
                call()
            step(*args, **kwargs)
            for call in after:
                call()

        optimizer.step = types.MethodType(stepped, optimizer)  # type: ignore[method-assign]
        return
    for call in before:
        optimizer.register_step_pre_hook(_Hook(call))
    for call in after:
        optimizer.register_step_post_hook(_Hook(call))


class _Hook:
    """A hook of :func:`call_around`."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, *_: Any) -> None:
        self._call()


def shows_gradients(optimizer: Optimizer) -> bool:
    """Whether somebody's hook may look at the gradients before the optimizer's kernel does."""
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *_global_optimizer_pre_hooks.values())
    return not all(isinstance(hook, _Hook) for hook in hooks)


def average_of(optimizer: Optimizer | None) -> WeightAverage | None:
    """The average of the weights that an optimizer moves, through all its wrappers; None where none is kept."""
    found: WeightAverage | None = None if optimizer is None else getattr(inner_optimizer(optimizer), AVERAGE, None)
    return found
