"""An optimizer around another one."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class WrappedOptimizer(Optimizer):
    """Base of optimizers that change what happens around another one's step.

    Groups and states are the inner optimizer's own, so learning-rate schedulers take the wrapper for an optimizer.

    Args:
        inner: Any torch optimizer.
    """

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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients."""
        self.inner.zero_grad(set_to_none)
