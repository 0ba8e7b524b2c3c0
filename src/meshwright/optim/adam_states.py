"""The states of Adam: made for a parameter, and brought into the right type and place after loading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.optim.clip import local_tensor
from meshwright.optim.layouts import is_dense, wrapped_like

if TYPE_CHECKING:
    from meshwright.optim.adam_base import AdamBase


class AdamStates:
    """Fills ``optimizer.state``: ``step`` (0-dim, on the host), ``exp_avg``, ``exp_avg_sq`` and ``master``, all fp32.

    A ``master`` exists where the update cannot be computed in the parameter itself: for half precision, for states on
    another device, and for tensors with gaps in memory.
    """

    def __init__(self, optimizer: AdamBase) -> None:
        self._optimizer = optimizer

    def needs_master(self, parameter: torch.Tensor) -> bool:
        """Whether the update is computed in a copy."""
        _, remote = self._optimizer.home(parameter)
        return remote or parameter.dtype != torch.float32 or not is_dense(local_tensor(parameter))

    def of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """A parameter's states as they are."""
        state: dict[str, Any] = self._optimizer.state[parameter]
        return state

    def made_for(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Fresh states."""
        local = local_tensor(parameter)
        home, _ = self._optimizer.home(parameter)
        names = ["exp_avg", "exp_avg_sq"]
        state = {"step": torch.zeros(())}
        state |= {name: wrapped_like(parameter, _zeros(local, home)) for name in names}
        if self.needs_master(parameter):
            state["master"] = self._master(parameter, home)
        return state

    def _master(self, parameter: torch.Tensor, home: torch.device) -> torch.Tensor:
        local = local_tensor(parameter)
        return wrapped_like(parameter, _zeros(local, home).copy_(local))

    def ready(self, parameter: torch.Tensor) -> dict[str, Any]:
        """A parameter's states, made or mended: what another kind of Adam, or torch's, has left is taken over."""
        state = self.of(parameter)
        if not state:
            state.update(self.made_for(parameter))
            return state
        home, _ = self._optimizer.home(parameter)
        if not isinstance(state["step"], torch.Tensor) or state["step"].device.type != "cpu":
            state["step"] = torch.tensor(float(state["step"]))
        if not self.needs_master(parameter):
            state.pop("master", None)
        elif "master" not in state:
            state["master"] = self._master(parameter, home)
        for name in ("exp_avg", "exp_avg_sq", "master"):
            if name in state:
                state[name] = self._at_home(parameter, state[name], home)
        return state

    def _at_home(self, parameter: torch.Tensor, value: torch.Tensor, home: torch.device) -> torch.Tensor:
        local = local_tensor(value)
        same_kind = isinstance(value, DTensor) == isinstance(parameter, DTensor)
        if same_kind and local.dtype == torch.float32 and local.device == home and is_dense(local):
            return value
        return wrapped_like(parameter, _zeros(local_tensor(parameter), home).copy_(local))


def _zeros(local: torch.Tensor, home: torch.device) -> torch.Tensor:
    return torch.zeros_like(local, dtype=torch.float32, device=home, memory_format=torch.preserve_format)
