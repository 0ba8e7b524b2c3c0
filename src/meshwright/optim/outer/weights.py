"""The weights that an optimizer updates, as accurately as it keeps them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from meshwright.errors import ConfigError
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
        self.parameters = self.training()
        """Those that train from the beginning."""
        self._frozen = [p for group in inner.param_groups for p in group["params"] if not p.requires_grad]
        self.resting: set[torch.Tensor] = set()
        """Those that have trained, and were frozen when they were sent last and the time before: without a
        pseudo-gradient, which is zero, outer momentum leaves them where they are."""
        self._were_frozen: set[torch.Tensor] = set()
        masters = self._guard.master.of if self._guard is not None and self._guard.master is not None else {}
        self._in_model = {id(master): parameter for parameter, master in masters.items()}

    def training(self) -> list[torch.Tensor]:
        """The optimizer's parameters that train now."""
        groups = self._inner.param_groups
        return [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]

    def check_frozen(self) -> None:
        """Refuses to train what has no global weight.

        Raises:
            ConfigError: When a parameter was frozen when the optimizer was built, and is not any more.
        """
        thawed = [tuple(parameter.shape) for parameter in self._frozen if parameter.requires_grad]
        if thawed:
            raise ConfigError(
                f"{len(thawed)} parameters were unfrozen under an outer optimizer, which would not synchronise them",
                expected="parameters that require gradients when the optimizer is built",
                got=f"shapes {thawed[:5]}",
                fix="save a checkpoint, build model and optimizer anew with these unfrozen, and load it",
            )

    def note_frozen(self, parameters: Sequence[torch.Tensor]) -> None:
        """Looks which parameters rest, of some that are about to be sent."""
        frozen = {each for each in parameters if not self._in_model.get(id(each), each).requires_grad}
        self.resting = self.resting.difference(parameters) | (frozen & self._were_frozen)
        self._were_frozen = self._were_frozen.difference(parameters) | frozen

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
