"""The outer update of SlowMo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.optim.clip import local_tensor


class SlowMomentum(Optimizer):
    """u ← β u + Δ / γ; w ← w - α γ u, with the inner learning rate γ (Wang et al. 2019, arXiv 1910.00643, algorithm 1).

    With a constant γ this is heavy-ball momentum; when γ changes, u stays in units of the gradient. Where γ is 0 the
    weights move by Δ alone: what has no rate has no momentum.

    Args:
        params: Global weights; their gradients are pseudo-gradients Δ.
        rates: Tells the inner learning rate γ of every weight, at every step.
        lr: α.
        momentum: β.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        rates: Callable[[], Mapping[torch.Tensor, float]],
        lr: float = 1.0,
        momentum: float = 0.6,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self._rates = rates

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Moves every weight that has a pseudo-gradient."""
        rates = self._rates()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, group, rates[weight])

    def _move(self, weight: torch.Tensor, group: dict[str, Any], rate: float) -> None:
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        assert weight.grad is not None
        slow, change, local = (local_tensor(each) for each in (state["momentum_buffer"], weight.grad, weight))
        slow.mul_(group["momentum"])
        if rate:
            slow.add_(change, alpha=1 / rate)
            local.sub_(slow, alpha=group["lr"] * rate)
        else:
            local.sub_(change)
