"""Name the states of an optimizer and of averaged weights by the model's parameters, and plan their way back.

Where ranks hold different parts of a model by name, as pipeline ranks do, their records are united here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.optim import Optimizer

from meshwright.errors import CheckpointError, join_names
from meshwright.nn import fp32_buffers
from meshwright.optim import WeightAverage, guard_of, inner_optimizer
from meshwright.optim.full_state_dict import template_of
from meshwright.runtime import smallest
from meshwright.runtime.agreement import gather_distinct
from meshwright.store.entries import ModelEntries, dtype_named, from_plain, to_plain
from meshwright.store.manifest import GroupRecord, OptimizerRecord, Record, TensorRecord

# How a step is computed, not what it computes: these stay as the new job chose them.
_JOB_CHOICES = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NOT_VALUES = _JOB_CHOICES | {"params", "param_names"}


def masters_by_name(optimizer: Optimizer | None, model: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the fp32 masters of the model's weights, by name; they take over changes of the weights first."""
    guard = guard_of(optimizer)
    if guard is None or guard.master is None:
        return {}
    guard.master.take_changes()
    masters = {id(parameter): master for parameter, master in guard.master.of.items()}
    return {name: masters[id(tensor)] for name, tensor in model.items() if id(tensor) in masters}


def updatable(entries: ModelEntries, optimizer: Optimizer | None) -> dict[str, torch.Tensor]:
    """Return the tensors that an optimizer may update, by model name: entries, or their masters where they have one."""
    return entries.tensors | masters_by_name(optimizer, entries.tensors)


def finest(entries: ModelEntries, optimizer: Optimizer | None) -> dict[str, torch.Tensor]:
    """Return what is stored of a model, by name: in place of what is rounded from fp32 masters or values, these."""
    beside = fp32_buffers(entries.module)
    values = {name: beside[id(tensor)][1] for name, tensor in entries.tensors.items() if id(tensor) in beside}
    return updatable(entries, optimizer) | values


def state_name(parameter: str, key: str) -> str:
    """Return the stored name of one state of one parameter."""
    return f"optim.state.{parameter}.{key}"


def _kind(optimizer: Optimizer) -> str:
    # An optimizer with the states of another (an offloaded AdamW) may say so, and then loads its checkpoints.
    return str(getattr(optimizer, "state_kind", type(optimizer).__name__))


def _names(optimizer: Optimizer, weights: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """Return the model name of each of the optimizer's parameters, by identity.

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


def capture_optimizer(
    optimizer: Optimizer, weights: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], OptimizerRecord]:
    """Name all states and hyperparameters of an optimizer.

    Args:
        optimizer: The one that holds the state (inside all wrappers).
        weights: See :func:`updatable`.

    Returns:
        Live state tensors by stored name, and the record of everything else.

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
            name = names[id(parameter)]
            keys, values = record.tensor_keys[name], record.values[name] = [], {}
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    keys.append(key)
                    # The momentum of sparse gradients is sparse; optimizers go on with a dense one.
                    tensors[state_name(name, key)] = value.to_dense() if value.is_sparse else value
                else:
                    values[key] = to_plain(value, f"The optimizer's {key} of {name}")
    return tensors, record


@dataclass(frozen=True)
class OptimizerPlan:
    """The checked restoration of an optimizer; nothing changes before :meth:`commit`."""

    optimizer: Optimizer
    targets: dict[str, torch.Tensor]
    """Tensors to be filled before ``commit``, by stored name."""
    states: list[tuple[torch.Tensor, dict[str, Any]]]
    """Per parameter, its new state: tensors of ``targets``, and plain values."""
    values: list[dict[str, Any]]
    """Per group, its new hyperparameters."""

    def commit(self) -> None:
        """Put states and hyperparameters into the optimizer."""
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
        now.fill_(value)  # a compiled or captured step reads this very tensor
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
    """Check that a stored optimizer fits this one, and make the tensors that its states will be read into.

    Args:
        optimizer: Fresh, or already stepped (its state is then replaced); any layout.
        weights: See :func:`updatable`.
        record: The stored optimizer.
        tensors: Shapes and types of all stored tensors.
        elsewhere: Parameters that only optimizers of other ranks update.
        role: Name of the optimizer in errors.

    Raises:
        CheckpointError: When kinds, parameters or states differ, or a group would mix hyperparameters of several.
    """
    names = _names(optimizer, weights)
    stored = {name: group.values for group in record.groups for name in group.parameters}
    updated = {names[id(p)] for group in optimizer.param_groups for p in group["params"]}
    _check_fits(optimizer, record, set(stored) - elsewhere, updated, role)
    grouped = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    plan = OptimizerPlan(optimizer, {}, [], [_common_values(group, stored) for group in grouped])
    groups = [group | values for group, values in zip(optimizer.param_groups, plan.values, strict=True)]
    _check_states(optimizer, groups, grouped, record, tensors)
    # Groups with their new hyperparameters: the form of states may depend on these.
    for group in groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            state = {key: from_plain(value) for key, value in record.values[name].items()}
            # A frozen parameter has no states, and its weight may not be stored either.
            if keys := record.tensor_keys[name]:
                stored_states = {key: tensors[state_name(name, key)] for key in keys}
                state |= _state_buffers(optimizer, group, parameter, tensors[f"model.{name}"], stored_states)
                plan.targets.update({state_name(name, key): state[key] for key in keys})
            plan.states.append((parameter, state))
    return plan


def _check_states(
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    names: list[list[str]],
    record: OptimizerRecord,
    tensors: Mapping[str, TensorRecord],
) -> None:
    """Let the optimizer check, where it has a ``check_saved``, whether it can go on with the stored states."""
    check = getattr(optimizer, "check_saved", None)
    if check is None:
        return
    states = {
        name: record.values[name] | {key: tensors[state_name(name, key)] for key in record.tensor_keys[name]}
        for group in names
        for name in group
    }
    check({"state": states, "param_groups": [g | {"params": own} for g, own in zip(groups, names, strict=True)]})


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


def _state_buffers(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameter: torch.Tensor,
    weight: TensorRecord,
    stored: Mapping[str, TensorRecord],
) -> dict[str, torch.Tensor]:
    """Return tensors to read one parameter's states into: the present ones that fit, else new ones.

    Args:
        optimizer: The parameter's optimizer.
        group: The parameter's group, with the hyperparameters that are loaded.
        parameter: As it is laid out now.
        weight: The stored shape and type of the parameter.
        stored: The stored shapes and types of its states.
    """
    present = optimizer.state.get(parameter, {})
    # Only the optimizer knows the shards of states that are neither like the parameter nor whole on every rank.
    template = functools.cache(lambda: template_of(optimizer, parameter, group))
    buffers: dict[str, torch.Tensor] = {}
    for key, record in stored.items():
        like_parameter = record.shape == tuple(parameter.shape) and key != "step"
        # A state in its parameter's type follows it from half to fp32 and back; one in a type of its own keeps that.
        follows = like_parameter and record.dtype == weight.dtype
        dtype = parameter.dtype if follows else dtype_named(record.dtype)
        if _has_form(found := present.get(key), record, dtype) or _has_form(
            found := template().get(key), record, dtype
        ):
            buffers[key] = found
        elif like_parameter:
            make = getattr(optimizer, "state_like", None)  # an offloaded optimizer may put it on disk
            like = torch.empty_like(parameter.detach(), dtype=dtype) if make is None else make(parameter, key, dtype)
            buffers[key] = like
        else:
            # torch keeps step counts on the host, unless its kernel reads them on the device.
            on_device = key != "step" or group.get("fused") or group.get("capturable")
            device = parameter.device if on_device else "cpu"
            buffers[key] = torch.zeros(record.shape, dtype=dtype, device=device)
    return buffers


def _has_form(value: Any, stored: TensorRecord, dtype: torch.dtype) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and tuple(value.shape) == stored.shape and value.dtype == dtype


# --- The moving average of the weights: ``average.NAME`` beside ``model.NAME``, for any layout

_COUNTS = ("num_steps", "num_updates", "num_steps_since")


def average_tensors(average: WeightAverage | None, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the live averages by stored name; ``weights`` as of :func:`updatable`."""
    if average is None:
        return {}
    return {f"average.{name}": average.of[tensor] for name, tensor in weights.items() if tensor in average.of}


def average_counts(average: WeightAverage | None) -> dict[str, int] | None:
    """Return the counts of an average, for the record."""
    return None if average is None else {name: getattr(average, name) for name in _COUNTS}


@dataclass(frozen=True)
class AveragePlan:
    """The checked restoration of an average; nothing changes before :meth:`commit`."""

    average: WeightAverage | None
    targets: dict[str, torch.Tensor]
    """Tensors to be filled before ``commit``, by stored name."""
    counts: Mapping[str, int] | None
    """None: the checkpoint holds no average, and a new one begins with the checkpoint's weights."""

    def commit(self) -> None:
        """Take over the counts."""
        if self.average is None:
            return
        if self.counts is None:
            self.average.restart()
            return
        average, counts = self.average, self.counts
        average.num_steps, average.num_updates = int(counts["num_steps"]), int(counts["num_updates"])
        # Older checkpoints are not of replicas, whose updates may come at any step.
        average.num_steps_since = int(counts.get("num_steps_since", average.num_steps % average.policy.every))


def plan_average(average: WeightAverage | None, weights: Mapping[str, torch.Tensor], record: Record) -> AveragePlan:
    """Check that a stored average fits this one, and list the tensors to fill.

    Raises:
        CheckpointError: When it lacks weights that train here.
    """
    if average is None or record.average is None:
        return AveragePlan(average, {}, None)
    targets = average_tensors(average, weights)
    missing = sorted(name for name in targets if name not in record.tensors)
    if missing:
        raise CheckpointError(
            "The checkpoint does not average the same weights",
            expected=f"averages of {len(targets)} parameters that train",
            got=f"missing: {join_names(missing)}",
            fix="freeze parameters as before, or leave ema out of the strategy to begin without it",
        )
    return AveragePlan(average, targets, record.average)


# --- One record of a model of which ranks hold different parts by name, as pipeline ranks do


class Others(NamedTuple):
    """Names that other ranks hold and this one does not."""

    entries: frozenset[str] = frozenset()
    """Entries of the model."""
    updated: frozenset[str] = frozenset()
    """Parameters that the optimizer updates."""


def names_on_rank(entries: ModelEntries, optimizer: Optimizer | None) -> tuple[list[str], list[str]]:
    """Return this rank's entries of the model, and the parameters that its optimizer updates.

    Raises:
        CheckpointError: When it updates parameters that are not in the model.
    """
    own = [*entries.tensors, *entries.values]
    if optimizer is None:
        return own, []
    inner = inner_optimizer(optimizer)
    names = _names(inner, updatable(entries, optimizer))
    return own, [names[id(p)] for group in inner.param_groups for p in group["params"]]


def names_of_others(
    entries: Iterable[str], updated: Iterable[str], stored: Sequence[str], stored_updated: Sequence[str]
) -> Others:
    """Return those of the stored names that only other ranks hold; collective, one all-reduce of a flag per name.

    Args:
        entries: This rank's names in the model.
        updated: The parameters that its optimizer updates.
        stored: Names of a model, the same on every rank.
        stored_updated: Parameters of an optimizer, the same on every rank.
    """
    own, own_updated = frozenset(entries), frozenset(updated)
    nowhere = smallest([*(name not in own for name in stored), *(name not in own_updated for name in stored_updated)])
    held = [name for name, absent in zip(stored, nowhere, strict=False) if not absent]
    held_updated = [n for n, absent in zip(stored_updated, nowhere[len(stored) :], strict=True) if not absent]
    return Others(frozenset(held) - own, frozenset(held_updated) - own_updated)


def stored_names(record: Record) -> tuple[list[str], list[str]]:
    """Return the names of the model, and the parameters that optimizers update, of a checkpoint."""
    tensors = [name.removeprefix("model.") for name in record.tensors if name.startswith("model.")]
    replicas = record.outer.replicas if record.outer is not None else []
    optimizers = [record.optimizer, *(replica.optimizer for replica in replicas)]
    return [*tensors, *record.model_values], updated_names(each for each in optimizers if each is not None)


def updated_names(records: Iterable[OptimizerRecord]) -> list[str]:
    """Return the parameters that any of some optimizers updates, each once."""
    return list(dict.fromkeys(name for record in records for group in record.groups for name in group.parameters))


def refuse_parts(names: Iterable[str], what: str) -> None:
    """Refuse to write or fill one rank's part as if it were the whole; collective, one all-reduce if there are none.

    Raises:
        CheckpointError: On every rank, when ranks hold tensors of different names.
    """
    own = sorted(names)
    every: list[list[str]] = [each for _, each in gather_distinct(own, repr(own))]
    if len(every) > 1:
        apart = sorted(set().union(*every) - set(every[0]).intersection(*every))
        raise CheckpointError(
            f"{what} does not join what ranks hold under names of their own",
            expected="the same names on every rank",
            got=f"listed experts or pipeline stages, such as {join_names(apart, 3)}",
            fix="use a CheckpointStore, which does",
        )


def united(record: Record) -> Record:
    """Unite the records of all ranks; collective, equal on every rank."""
    own = (record.tensors, record.model_values, record.optimizer)
    return united_records(record, [each for _, each in gather_distinct(own, repr(sorted(record.tensors)))])


def united_records(
    record: Record, every: Sequence[tuple[dict[str, TensorRecord], dict[str, Any], OptimizerRecord | None]]
) -> Record:
    """Return a record with tensors, plain values and optimizers of all ranks."""
    if len(every) == 1:
        return record
    optimizers = [optimizer for _, _, optimizer in every if optimizer is not None]
    return dataclasses.replace(
        record,
        tensors={name: tensor for tensors, _, _ in every for name, tensor in tensors.items()},
        model_values={name: value for _, values, _ in every for name, value in values.items()},
        optimizer=united_optimizer(optimizers) if optimizers else None,
    )


def united_optimizer(every: Sequence[OptimizerRecord]) -> OptimizerRecord:
    """Unite the optimizers of all ranks.

    Groups of equal hyperparameters become one group; a parameter that several ranks update is in it once.
    """
    groups: list[GroupRecord] = []
    for record in every:
        for group in record.groups:
            same = next((known for known in groups if known.values == group.values), None)
            if same is None:
                groups.append(GroupRecord(list(group.parameters), group.values))
            else:
                same.parameters.extend(name for name in group.parameters if name not in same.parameters)
    return OptimizerRecord(
        every[0].kind,
        groups,
        {name: keys for record in every for name, keys in record.tensor_keys.items()},
        {name: values for record in every for name, values in record.values.items()},
    )
