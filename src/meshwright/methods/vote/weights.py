"""The weights that replicas vote on, and everything that hangs on one of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from meshwright.optim import OuterOptimizer, average_of, inner_optimizer, local_tensor
from meshwright.optim.outer.weights import InnerWeights
from meshwright.store.entries import stored_name, unwrapped
from meshwright.store.optimizer import masters_by_name


class VotedWeights:
    """What the optimizer updates, or else the parameter, by name.

    A parameter in half precision beside fp32 masters is left out for its master, which every step writes over it.

    Args:
        model: As all methods have left it.
        optimizer: Its optimizer, with everything around it.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._inner = InnerWeights(optimizer.inner if isinstance(optimizer, OuterOptimizer) else optimizer)
        named = {stored_name(name): parameter for name, parameter in unwrapped(model).named_parameters()}
        self._updated: dict[str, torch.Tensor] = named | masters_by_name(optimizer, named)
        self._parameters = named

    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's, which tell by their layout which part a rank holds."""
        return self._parameters

    def tensors(self) -> list[torch.Tensor]:
        """This rank's parts, where they are kept, in the order of the parameters."""
        return [self._inner.source(tensor) for tensor in self._updated.values()]

    def copied(self, name: str) -> dict[str, Any]:
        """A weight of this rank and everything that hangs on it, on the host."""
        return {key: tensor.cpu() for key, tensor in self._around(name).items()}

    @torch.no_grad()
    def take(self, name: str, copied: dict[str, Any]) -> None:
        """Replaces them by those of another rank; call :meth:`finish` after the last.

        A state that only one of the two ranks has, because it belongs to an owner, stays as it is.
        """
        for key, tensor in self._around(name).items():
            given = copied.get(key)
            if given is not None and given.shape == tensor.shape and given.dtype == tensor.dtype:
                tensor.copy_(given)

    def finish(self) -> None:
        """Rounds masters into the model, and forgets what was gathered from the weights before."""
        self._inner.finish()
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _around(self, name: str) -> dict[str, torch.Tensor]:
        updated, average = self._updated[name], average_of(self._optimizer)
        found = {"parameter": local_tensor(self._parameters[name]).detach(), "weight": self._inner.source(updated)}
        for key, value in inner_optimizer(self._optimizer).state.get(updated, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"state.{key}"] = local_tensor(value)
        if average is not None and updated in average.of:
            found["average"] = local_tensor(average.of[updated])
        return found
