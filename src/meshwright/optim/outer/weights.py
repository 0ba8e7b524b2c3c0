"""The weights that an optimizer updates, as accurately as it keeps them."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from meshwright.optim.clip import local_tensor
from meshwright.optim.guarded import GuardedOptimizer
from meshwright.optim.master import MASTER


class InnerWeights:
    """This rank's parts of the weights of an optimizer: its parameters, or their fp32 copies where there are some.

    Args:
        inner: Any torch optimizer; a GuardedOptimizer updates its master weights, ours keep theirs in their states.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._guard = inner if isinstance(inner, GuardedOptimizer) else None
        self._inner = inner.inner if isinstance(inner, GuardedOptimizer) else inner
        self.parameters: list[torch.Tensor] = [
            parameter for group in inner.param_groups for parameter in group["params"] if parameter.requires_grad
        ]
        """Those that train."""

    def source(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part where it is kept, which may be the host."""
        master = self._master(parameter)
        return local_tensor(parameter).detach() if master is None else master

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part on the parameter's device; not to be written to."""
        return self.source(parameter).to(local_tensor(parameter).device)

    @torch.no_grad()
    def write(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Replaces this rank's part, of the copy too; call :meth:`finish` after the last."""
        master = self._master(parameter)
        if master is not None:
            master.copy_(value)
        local_tensor(parameter).copy_(value)

    def finish(self) -> None:
        """Rounds the master weights that a guard keeps into the model."""
        if self._guard is not None and self._guard.master is not None:
            self._guard.master.write_back()

    def _master(self, parameter: torch.Tensor) -> torch.Tensor | None:
        state = self._inner.state.get(parameter)
        found = state.get(MASTER) if state else None
        return local_tensor(found) if isinstance(found, torch.Tensor) else None
