"""The arithmetic of Adam on plain tensors, and its states for plain and sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam

from meshwright.errors import CheckpointError, MeshwrightError, ModelError, join_names
from meshwright.optim.dtensors import is_dense, local_tensor, wrapped_like
from meshwright.runtime.torch_internals.optim import foreach_div_, fused_adam_, fused_adamw_

WeightDecayRule = Literal["decoupled", "coupled", "bmtrain"]
WEIGHT_DECAY_RULES: tuple[str, ...] = get_args(WeightDecayRule)

UNCORRECTED = 10**9
"""A step number so late that Adam's bias corrections are 1."""
_FUSED_DEVICES = ("cpu", "cuda")


def is_decoupled(rule: str, dtype: torch.dtype) -> bool:
    """Return whether weight decay bypasses the moments for parameters of this type.

    ``"decoupled"`` is AdamW (Loshchilov and Hutter 2019, Algorithm 2), ``"coupled"`` is L2 regularisation as in Adam
    (Kingma and Ba 2015), ``"bmtrain"`` is what BMTrain does: decoupled for half precision, coupled for fp32.
    """
    return rule == "decoupled" or (rule == "bmtrain" and dtype != torch.float32)


@dataclass(frozen=True)
class AdamRule:
    """Adam with the hyperparameters of one group, for parameters of one type."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float = 0.0
    decoupled: bool = True
    maximize: bool = False
    hold_steps: int = 0

    @classmethod
    def of(cls, group: Mapping[str, Any], dtype: torch.dtype) -> AdamRule:
        """Read a parameter group; tensors among its values are read to the host."""
        beta1, beta2 = group["betas"]
        return cls(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=is_decoupled(group["weight_decay_rule"], dtype),
            maximize=group["maximize"],
            hold_steps=group["hold_steps"],
        )

    def update(
        self,
        weights: list[torch.Tensor],
        gradients: list[torch.Tensor],
        exp_avgs: list[torch.Tensor],
        exp_avg_sqs: list[torch.Tensor],
        step: int,
        scale: float,
    ) -> None:
        """Move fp32 weights and moments by one step, in place.

        Args:
            weights: Dense fp32 tensors of one device.
            gradients: Gradients, laid out like the weights; left divided by ``scale``.
            exp_avgs: First moments.
            exp_avg_sqs: Second moments.
            step: Number of this step for these weights, from 1.
            scale: The factor by which the gradients are multiplied.
        """
        device = weights[0].device
        options: dict[str, Any] = {
            # Zero and not a skipped step: the moments go on.
            "lr": 0.0 if step <= self.hold_steps else self.lr,
            "beta1": self.beta1,
            "beta2": self.beta2,
            "weight_decay": self.weight_decay,
            "eps": self.eps,
            "amsgrad": False,
            "maximize": self.maximize,
        }
        tensors: Any = weights, gradients, exp_avgs, exp_avg_sqs, []
        if device.type not in _FUSED_DEVICES:
            if scale != 1.0:
                foreach_div_(gradients, scale)
            before = [torch.tensor(float(step - 1), dtype=torch.float32) for _ in weights]
            unfused: Any = adam
            unfused(*tensors, before, foreach=True, decoupled_weight_decay=self.decoupled, **options)
            return
        kernel: Any = fused_adamw_ if self.decoupled else fused_adam_
        # One tensor for all: the kernels read the step number and leave it as it is.
        steps = [torch.full((), float(step), dtype=torch.float32, device=device)] * len(weights)
        grad_scale = torch.full((), scale, dtype=torch.float32, device=device) if scale != 1.0 else None
        kernel(*tensors, steps, grad_scale=grad_scale, found_inf=None, **options)

    def delta(self, weight: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: int) -> torch.Tensor:
        """Return the direction of a step: m̂ / (√v̂ + eps), plus weight_decay · w where decay is decoupled.

        Args:
            weight: The weight before the step.
            exp_avg: First moment after the step.
            exp_avg_sq: Second moment after the step.
            step: Number of the step, from 1.
        """
        mean = exp_avg / (1 - self.beta1**step)
        delta = mean / ((exp_avg_sq / (1 - self.beta2**step)).sqrt_() + self.eps)
        return delta.add_(weight, alpha=self.weight_decay) if self.decoupled and self.weight_decay else delta


# --- The states of Adam: made for a parameter, and brought into the right type and place after loading

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Shards:
    """A parameter's local tensors, ready for a kernel: those it computes with are fp32 and laid out alike."""

    weight: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    master: torch.Tensor | None
    step: torch.Tensor
    stored: tuple[Any, ...]
    """The values in ``optimizer.state`` from which these were taken."""


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
        self._state_of = state_of  # asked every time, as torch replaces ``optimizer.state`` when it loads
        self._home = home
        self._ready: dict[torch.Tensor, Shards] = {}

    def needs_master(self, parameter: torch.Tensor) -> bool:
        """Return whether the update is computed in a copy."""
        _, remote = self._home(parameter)
        return remote or parameter.dtype != torch.float32 or not is_dense(local_tensor(parameter))

    def made_for(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Make fresh states of a parameter."""
        home, _ = self._home(parameter)
        state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
        state |= {name: wrapped_like(parameter, _zeros(local_tensor(parameter), home)) for name in _MOMENTS}
        if self.needs_master(parameter):
            state["master"] = _laid_out(parameter, parameter, home)
        return state

    def ready(self, parameter: torch.Tensor) -> Shards:
        """Return a parameter's tensors, with states made or converted where another kind of Adam has left them."""
        state: dict[str, Any] = self._state_of(parameter)
        found, weight = self._ready.get(parameter), local_tensor(parameter)
        if found is None or not _is_current(found, state, weight):
            found = self._mended(parameter, weight, state)
            self._ready[parameter] = found
        return found

    def forget(self) -> None:
        """Release states that are about to be replaced."""
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
        return Shards(weight, exp_avg, exp_avg_sq, master, state["step"], _stored(state))


def check_saved_states(state_dict: Mapping[str, Any]) -> None:
    """Refuse states that another kind of optimizer has saved.

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
    # A count in half precision, the default type of some users, would stop: bfloat16 has no 257.
    return step.device.type == "cpu" and step.dtype == torch.float32


def _stored(state: dict[str, Any]) -> tuple[Any, ...]:
    return state["exp_avg"], state["exp_avg_sq"], state.get("master"), state["step"]


def _is_current(shards: Shards, state: dict[str, Any], weight: torch.Tensor) -> bool:
    """Return whether states, weight and layout are the same objects as in the last step."""
    if not state or shards.weight is not weight:
        return False
    if any(before is not now for before, now in zip(shards.stored, _stored(state), strict=True)):
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
    """Copy a tensor of the parameter's shape to fp32 at home, in the order of the parameter's memory."""
    return wrapped_like(parameter, _zeros(local_tensor(parameter), home).copy_(local_tensor(value)))
