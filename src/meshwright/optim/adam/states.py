"""The states of Adam: made for a parameter, and brought into the right type and place after loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.errors import CheckpointError, MeshwrightError, ModelError, join_names
from meshwright.optim.clip import local_tensor
from meshwright.optim.layouts import is_dense, wrapped_like

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Shards:
    """A parameter's local tensors, ready for a kernel: what is computed on is fp32 and laid out alike."""

    weight: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    master: torch.Tensor | None
    step: torch.Tensor
    kept: tuple[Any, ...]
    """The values in ``optimizer.state`` that these were taken from."""


class AdamStates:
    """Fills ``optimizer.state``: ``step`` (0-dim, on the host), ``exp_avg``, ``exp_avg_sq`` and ``master``, all fp32.

    A ``master`` exists where the update cannot be computed in the parameter itself: for half precision, for states on
    another device, and for tensors with gaps in memory.

    Args:
        state_of: The optimizer's states of a parameter; filled in place.
        home: Where a parameter's states live, and whether that is another device than its own.
    """

    def __init__(
        self,
        state_of: Callable[[torch.Tensor], dict[str, Any]],
        home: Callable[[torch.Tensor], tuple[torch.device, bool]],
    ) -> None:
        self._state_of = state_of  # torch replaces ``optimizer.state`` when it loads: it must be asked every time
        self._home = home
        self._ready: dict[torch.Tensor, Shards] = {}

    def needs_master(self, parameter: torch.Tensor) -> bool:
        """Whether the update is computed in a copy."""
        _, remote = self._home(parameter)
        return remote or parameter.dtype != torch.float32 or not is_dense(local_tensor(parameter))

    def made_for(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Fresh states."""
        home, _ = self._home(parameter)
        state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
        state |= {name: wrapped_like(parameter, _zeros(local_tensor(parameter), home)) for name in _MOMENTS}
        if self.needs_master(parameter):
            state["master"] = _laid_out(parameter, parameter, home)
        return state

    def ready(self, parameter: torch.Tensor) -> Shards:
        """A parameter's states, made or mended: what another kind of Adam, or torch's, has left is taken over."""
        state: dict[str, Any] = self._state_of(parameter)
        found, weight = self._ready.get(parameter), local_tensor(parameter)
        if found is None or not _is_current(found, state, weight):
            found = self._mended(parameter, weight, state)
            self._ready[parameter] = found
        return found

    def forget(self) -> None:
        """Lets go of states that are about to be replaced."""
        self._ready.clear()

    def _mended(self, parameter: torch.Tensor, weight: torch.Tensor, state: dict[str, Any]) -> Shards:
        home, _ = self._home(parameter)
        if not state:
            state.update(self.made_for(parameter))
        if not _are_adams(state):
            raise _of_another(ModelError, state)
        if not isinstance(state["step"], torch.Tensor) or not _counts_on_host(state["step"]):
            state["step"] = torch.tensor(float(state["step"]), dtype=torch.float32, device="cpu")
        if not self.needs_master(parameter):
            state.pop("master", None)
        elif "master" not in state:
            state["master"] = _laid_out(parameter, parameter, home)
        for name in (*_MOMENTS, *(["master"] if "master" in state else [])):
            if not _is_laid_out(state[name], parameter, home):
                state[name] = _laid_out(state[name], parameter, home)
        exp_avg, exp_avg_sq = (local_tensor(state[name]) for name in _MOMENTS)
        master = local_tensor(state["master"]) if "master" in state else None
        return Shards(weight, exp_avg, exp_avg_sq, master, state["step"], _kept(state))


def check_saved_states(state_dict: Mapping[str, Any]) -> None:
    """Refuses what another kind of optimizer has saved.

    Raises:
        CheckpointError: Naming the states of the first parameter that has others.
    """
    for state in state_dict["state"].values():
        if state and not _are_adams(state):
            raise _of_another(CheckpointError, state)


def _are_adams(state: Mapping[str, Any]) -> bool:
    return state.keys() >= {"step", *_MOMENTS}


def _of_another(kind: type[MeshwrightError], state: Mapping[str, Any]) -> MeshwrightError:
    return kind(
        "The states of a parameter are not those of an Adam: they were saved by another optimizer",
        expected=f"step, {join_names(_MOMENTS)}",
        got=join_names(map(str, state)),
        fix="load them into the kind of optimizer that saved them, or leave them out",
    )


def _counts_on_host(step: torch.Tensor) -> bool:
    # In half precision, torch's default type for some users, a count would stand still: bfloat16 knows no 257.
    return step.device.type == "cpu" and step.dtype == torch.float32


def _kept(state: dict[str, Any]) -> tuple[Any, ...]:
    return state["exp_avg"], state["exp_avg_sq"], state.get("master"), state["step"]


def _is_current(shards: Shards, state: dict[str, Any], weight: torch.Tensor) -> bool:
    """Whether nobody has replaced a state, or the weight or its layout, since the last step."""
    if not state or shards.weight is not weight:
        return False
    if any(kept is not now for kept, now in zip(shards.kept, _kept(state), strict=True)):
        return False
    if shards.master is None:
        return weight.dtype == torch.float32 and weight.stride() == shards.exp_avg.stride()
    return weight.shape == shards.master.shape


def _zeros(local: torch.Tensor, home: torch.device) -> torch.Tensor:
    return torch.zeros_like(local, dtype=torch.float32, device=home, memory_format=torch.preserve_format)


def _is_laid_out(value: torch.Tensor, parameter: torch.Tensor, home: torch.device) -> bool:
    local, like = local_tensor(value), _zeros_layout(local_tensor(parameter))
    right_kind = isinstance(value, DTensor) == isinstance(parameter, DTensor)
    right_kind = right_kind and local.dtype == torch.float32 and local.device == home
    return right_kind and local.shape == like.shape and local.stride() == like.stride()


def _zeros_layout(local: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(local, device="meta", memory_format=torch.preserve_format)


def _laid_out(value: torch.Tensor, parameter: torch.Tensor, home: torch.device) -> torch.Tensor:
    """A copy of a tensor of the parameter's shape, in fp32 at home, in the order of the parameter's memory."""
    return wrapped_like(parameter, _zeros(local_tensor(parameter), home).copy_(local_tensor(value)))
