"""Which of a training job's tensors are in host memory or on disk, as its optimizer tells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.optim import guard_of

if TYPE_CHECKING:
    from meshwright.optim import GuardedOptimizer, HostWeights, OffloadedOptimizer


class OffloadedBytes:
    """What ``offload`` has taken from the device; nothing where it is not used.

    Args:
        model: As the methods have changed it.
        optimizer: With all wrappers.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        weights, inner = _offloaded(guard_of(optimizer))
        self._optimizer, self._inner = optimizer, inner
        self.parameters: set[torch.Tensor] = set(weights.resident) if weights is not None else set()
        """The model's parameters that are on the host."""
        self.copies: set[torch.Tensor] = set(weights.hosted.values()) if weights is not None else set()
        """Copies of other parameters on the host or on disk."""
        self.gradients = {p.grad for p in (*self.parameters, *self.copies) if p.grad is not None}
        """Gradients of both."""
        self.on_disk = weights is not None and weights.disk is not None

    def states(self, home: Literal["device", "host", "disk"]) -> Iterator[torch.Tensor]:
        """The optimizer's state tensors in one place."""
        for parameter, state in self._optimizer.state.items() if self._optimizer is not None else ():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and self._home(parameter, key) == home:
                    yield value

    def _home(self, parameter: torch.Tensor, key: str) -> str:
        if self._inner is None or parameter not in self._inner.hosted:
            return "device"
        return "disk" if self._inner.is_stored(parameter, key) else "host"


def _offloaded(guard: GuardedOptimizer | None) -> tuple[HostWeights | None, OffloadedOptimizer | None]:
    if guard is None:
        return None, None
    from meshwright.optim import HostWeights, OffloadedOptimizer

    return (
        guard.master if isinstance(guard.master, HostWeights) else None,
        guard.inner if isinstance(guard.inner, OffloadedOptimizer) else None,
    )
