"""An optimizer's state under the names of the model's parameters: out of one optimizer, into a fresh one.

Why not ``get_optimizer_state_dict`` of torch: it fills a fresh optimizer by a step with zero gradients, which moves
weights when the update ignores the learning rate, leaves a momentum where there was none, and knows no master weights.
Here the saved list of tensors says which states exist, so they are made without any step.

Two attributes let an optimizer of one's own help: ``empty_state(parameter)`` returns the tensors of a fresh state,
needed when they are sharded otherwise than the parameter; ``state_kind`` names the kind whose checkpoints it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from meshwright.errors import CheckpointError, join_names
from meshwright.optim import guard_of
from meshwright.store.plain import dtype_named, from_plain, to_plain
from meshwright.store.record import GroupRecord, OptimizerRecord, TensorRecord

# How a step is computed, not what it computes: these stay as the new job chose them.
_JOB_CHOICES = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NOT_VALUES = _JOB_CHOICES | {"params", "param_names"}


def masters_by_name(optimizer: Optimizer | None, model: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The fp32 master weights among the parameters, by model name, with what was changed in the parameters alone."""
    guard = guard_of(optimizer)
    if guard is None or guard.master is None:
        return {}
    guard.master.take_changes()
    masters = {id(parameter): master for parameter, master in guard.master.of.items()}
    return {name: masters[id(tensor)] for name, tensor in model.items() if id(tensor) in masters}


def state_name(parameter: str, key: str) -> str:
    """The stored name of one state of one parameter."""
    return f"optim.state.{parameter}.{key}"


def _kind(optimizer: Optimizer) -> str:
    # An optimizer with the states of another (an offloaded AdamW) may say so, and then loads its checkpoints.
    return str(getattr(optimizer, "state_kind", type(optimizer).__name__))


def _names(optimizer: Optimizer, weights: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """The model name of each of the optimizer's parameters, by identity.

    Raises:
        CheckpointError: When a parameter is not in the model.
    """
    names = {id(tensor): name for name, tensor in weights.items()}
    strange = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if strange:
        raise CheckpointError(
            "The optimizer updates parameters that are not in the model: they have no name to be stored under",
            expected="an optimizer over the model's parameters (as they are after wrapping)",
            got=f"{len(strange)} others, of shapes {join_names(str(tuple(p.shape)) for p in strange)}",
            fix="register these parameters in the model, or build the optimizer after the model was wrapped",
        )
    return names


def updated_names(optimizer: Optimizer, weights: Mapping[str, torch.Tensor]) -> list[str]:
    """The parameters that an optimizer updates, by model name; arguments as for :func:`capture_optimizer`.

    Raises:
        CheckpointError: When it updates what is not in ``weights``.
    """
    names = _names(optimizer, weights)
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def capture_optimizer(
    optimizer: Optimizer, weights: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], OptimizerRecord]:
    """Names all states and hyperparameters of an optimizer.

    Args:
        optimizer: The one that holds the state (inside all wrappers).
        weights: The tensors it may update, by model name: parameters, or the masters of those that have one.

    Returns:
        Live state tensors by stored name, and everything else.

    Raises:
        CheckpointError: When it updates what is not in ``weights``, or holds what cannot be stored.
    """
    names = _names(optimizer, weights)
    tensors: dict[str, torch.Tensor] = {}
    record = OptimizerRecord(_kind(optimizer), [], {}, {})
    for group in optimizer.param_groups:
        where = f"The optimizer's group {len(record.groups)}"
        values = {key: to_plain(value, f"{where}, {key}") for key, value in group.items() if key not in _NOT_VALUES}
        record.groups.append(GroupRecord([names[id(p)] for p in group["params"]], values))
        for parameter in group["params"]:
            name, state = names[id(parameter)], optimizer.state.get(parameter, {})
            kept = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
            record.tensor_keys[name] = list(kept)
            record.values[name] = {
                key: to_plain(value, f"The optimizer's {key} of {name}")
                for key, value in state.items()
                if key not in kept
            }
            tensors |= {state_name(name, key): value for key, value in kept.items()}
    return tensors, record


@dataclass(frozen=True)
class OptimizerPlan:
    """What loading will do to an optimizer; nothing is changed until :meth:`commit`."""

    optimizer: Optimizer
    targets: dict[str, torch.Tensor]
    """Tensors to be filled before ``commit``, by stored name."""
    states: list[tuple[torch.Tensor, dict[str, Any]]]
    """Per parameter its new state, made of ``targets`` and plain values."""
    values: list[dict[str, Any]]
    """Per group its new hyperparameters."""

    def commit(self) -> None:
        """Puts states and hyperparameters into the optimizer."""
        for parameter, state in self.states:
            self.optimizer.state.pop(parameter, None)
            if state:
                self.optimizer.state[parameter] = state
        for group, values in zip(self.optimizer.param_groups, self.values, strict=True):
            for key, value in values.items():
                _set_value(group, key, value)


def _set_value(group: dict[str, Any], key: str, value: Any) -> None:
    now = group.get(key)
    if isinstance(now, torch.Tensor):
        now.fill_(value)  # a compiled or captured step holds on to this very tensor
    else:
        group[key] = value.item() if isinstance(value, torch.Tensor) and now is not None else value


def plan_optimizer(
    optimizer: Optimizer,
    weights: Mapping[str, torch.Tensor],
    record: OptimizerRecord,
    tensors: Mapping[str, TensorRecord],
    elsewhere: frozenset[str] = frozenset(),
    *,
    role: str = "optimizer",
) -> OptimizerPlan:
    """Checks that a stored optimizer fits this one, and makes the tensors that its states will be read into.

    Args:
        optimizer: Fresh, or already stepped (its state is then replaced); any layout.
        weights: As for :func:`capture_optimizer`.
        record: The stored optimizer.
        tensors: Shapes and types of all stored tensors.
        elsewhere: Parameters that optimizers of other ranks update, and this one does not.
        role: What it is called in errors.

    Raises:
        CheckpointError: When kinds or parameters differ, or a group would mix hyperparameters of several.
    """
    names = _names(optimizer, weights)
    stored = {name: group.values for group in record.groups for name in group.parameters}
    updated = {names[id(p)] for group in optimizer.param_groups for p in group["params"]}
    _check_fits(optimizer, record, set(stored) - elsewhere, updated, role)
    plan = OptimizerPlan(optimizer, {}, [], [])
    for group in optimizer.param_groups:
        plan.values.append(_common_values([names[id(p)] for p in group["params"]], stored))
        for parameter in group["params"]:
            name = names[id(parameter)]
            state = {key: from_plain(value) for key, value in record.values[name].items()}
            for key in record.tensor_keys[name]:
                told = tensors[state_name(name, key)]
                state[key] = _state_tensor(optimizer, group, parameter, key, told, tensors[f"model.{name}"])
                plan.targets[state_name(name, key)] = state[key]
            plan.states.append((parameter, state))
    return plan


def _check_fits(optimizer: Optimizer, record: OptimizerRecord, stored: set[str], present: set[str], role: str) -> None:
    if record.kind != _kind(optimizer):
        raise CheckpointError(
            f"The checkpoint was written with another {role}",
            expected=_kind(optimizer),
            got=record.kind,
            fix=f"train on with {record.kind}, or load the weights only (a TrainingState with optim=None)",
        )
    if stored != present:
        raise CheckpointError(
            f"The checkpoint's {role} does not update the same parameters",
            expected=f"{len(present)} parameters",
            got=f"missing: {join_names(sorted(present - stored))}; not wanted: {join_names(sorted(stored - present))}",
            fix="freeze and group parameters as before, or load the weights only (a TrainingState with optim=None)",
        )


def _common_values(names: list[str], stored: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    for name in names[1:]:
        if stored[name] != stored[names[0]]:
            raise CheckpointError(
                "The checkpoint has other parameter groups",
                expected=f"the same hyperparameters for {names[0]} and {name}, which are in one group now",
                got=f"{stored[names[0]]} and {stored[name]}",
                fix="group the parameters as before, or load the weights only (a TrainingState with optim=None)",
            )
    return {key: from_plain(value) for key, value in stored[names[0]].items()} if names else {}


def _state_tensor(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameter: torch.Tensor,
    key: str,
    told: TensorRecord,
    weight: TensorRecord,
) -> torch.Tensor:
    """The tensor to read one state into: the present one if it fits, else a new one laid out as torch would."""
    like_parameter = told.shape == tuple(parameter.shape) and key != "step"
    # A state in its parameter's type follows it from half to fp32 and back; one in a type of its own keeps that.
    follows = like_parameter and told.dtype == weight.dtype
    dtype = parameter.dtype if follows else dtype_named(told.dtype)
    present = optimizer.state.get(parameter, {}).get(key)
    if present is None and hasattr(optimizer, "empty_state"):
        # States that are neither like the parameter nor whole on every rank: only the optimizer knows their shards.
        present = optimizer.empty_state(parameter).get(key)
    if isinstance(present, torch.Tensor) and tuple(present.shape) == told.shape and present.dtype == dtype:
        return present
    if like_parameter:
        make = getattr(optimizer, "state_like", None)  # offload knows a place for it on disk
        return torch.empty_like(parameter.detach(), dtype=dtype) if make is None else make(parameter, key, dtype)
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    return torch.zeros(told.shape, dtype=dtype, device=parameter.device if on_device else "cpu")
