"""The optimizer that ``boost`` returns: the user's own, with ColossalAI's verbs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import ConfigError
from meshwright.optim import GuardedOptimizer, Stages, inner_optimizer


class BoostedOptimizer(GuardedOptimizer):
    """A GuardedOptimizer that also calls backward, and clips in every step when it is told to.

    Args:
        optimizer: What ``accelerate`` returned: the user's optimizer, guarded or not.
        model: What it updates.
        max_norm: Largest gradient norm, applied in every step; 0 for no clipping.
        norm_type: p of the p-norm.
        stages: Where the model is one rank's part, of a pipeline or of experts: norms are those of all of them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        stages: Stages | None = None,
    ) -> None:
        if isinstance(optimizer, GuardedOptimizer):
            guards = {
                "scaler": optimizer.scaler,
                "master": optimizer.master,
                "skip_nonfinite": optimizer.skip_nonfinite,
                "stop_nonfinite": optimizer.stop_nonfinite,
            }
            super().__init__(optimizer.inner, **guards, stages=stages)  # type: ignore[arg-type]
        else:
            super().__init__(optimizer, stages=stages)
        self.model = model
        self.max_norm, self.norm_type = max_norm, norm_type
        self._last_norm: torch.Tensor | None = None

    def backward(self, loss: torch.Tensor, inputs: Any = None, retain_graph: bool = False) -> None:
        """Backward of the loss, scaled where the precision needs it."""
        self.scaled(loss).backward(inputs=inputs, retain_graph=retain_graph)

    def backward_by_grad(
        self, tensor: torch.Tensor, grad: torch.Tensor, inputs: Any = None, retain_graph: bool = False
    ) -> None:
        """Backward from a tensor whose gradient (of the loss, not scaled) is known."""
        torch.autograd.backward(self.scaled(tensor), grad, inputs=inputs, retain_graph=retain_graph)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The same loss, whose backward multiplies by the loss scale."""
        return self.scaled(loss)

    def unscale_grad(self) -> None:
        """Removes the loss scale from the gradients; repeats do nothing."""
        self.prepare_gradients()

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clips the gradients of all ranks' shards by their common norm; returns it as before clipping (0-dim).

        Raises:
            RuntimeError: When the norm is not finite and ``error_if_nonfinite`` asks for it.
        """
        self._last_norm = self.clip_grad_norm(max_norm, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(self._last_norm)):
            raise RuntimeError(
                f"The norm of the gradients is {self._last_norm.item()}, so they cannot be clipped by it. What to do: "
                "leave error_if_nonfinite out to skip such steps in fp16, or look for the cause with a lower lr."
            )
        return self._last_norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clips every gradient element to ``[-clip_value, clip_value]``, after the loss scale is removed."""
        self.clip_grad_value(clip_value)

    def get_grad_norm(self, norm_type: float = 2.0) -> float | None:
        """The norm of the last step before clipping; None when nothing has asked for it (``max_norm`` is 0).

        Raises:
            ConfigError: For another norm than the one that clips.
        """
        if norm_type != self.norm_type:
            raise ConfigError(
                "This norm was not measured",
                expected=f"norm_type={self.norm_type}",
                got=f"norm_type={norm_type}",
                fix="call clip_grad_by_norm(float('inf'), norm_type) before the step",
            )
        return self._last_norm.item() if self._last_norm is not None else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Clips if ``max_norm`` asks for it, and updates the weights unless gradients overflowed."""
        if self.max_norm > 0 and closure is None:
            self.clip_grad_by_norm(self.max_norm, self.norm_type)
        super().step(closure)

    def unwrap(self) -> Optimizer:
        """The optimizer that was boosted."""
        return inner_optimizer(self)
