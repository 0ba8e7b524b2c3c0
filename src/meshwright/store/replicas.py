"""Replicas that train on their own, in a checkpoint: what is equal once, and what each has of its own under its number.

``model.NAME``                       global weights (in warm-up: replica 0's), which any strategy loads
``outer.state.NAME.KEY``             the outer optimizer
``outer.landed.NAME``                averaged pseudo-gradients that were sent and not applied yet
``replica.R.model.NAME``             weights, unless all replicas hold the global ones; buffers
``replica.R.optim.state.NAME.KEY``   the inner optimizer
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright import runtime
from meshwright.errors import CheckpointError
from meshwright.optim import OuterOptimizer
from meshwright.optim.clip import local_tensor
from meshwright.optim.layouts import wrapped_like
from meshwright.optim.outer.state import check_flags, flags_of, load_flags, own_flags_of
from meshwright.store.optimizer import OptimizerPlan, capture_optimizer, plan_optimizer
from meshwright.store.record import OptimizerRecord, OuterRecord, Record, ReplicaRecord, TensorRecord, tensor_records
from meshwright.store.shards import load_shards
from meshwright.store.state import TrainingState

_STATE, _OUTER_STATE, _LANDED = "optim.state.", "outer.state.", "outer.landed."


def replica_name(replica: int, name: str) -> str:
    """The stored name of what one replica has of its own."""
    return f"replica.{replica}.{name}"


def begin(state: TrainingState, *, to_load: bool) -> None:
    """Makes global weights, if nobody has yet; collective where there are replicas."""
    if isinstance(state.optim, OuterOptimizer):
        state.optim.synchronizer.start(from_checkpoint=to_load)


@dataclass(frozen=True)
class ReplicaParts:
    """What one rank adds to a checkpoint of replicas."""

    replica: int
    own: ReplicaRecord
    shared: dict[str, TensorRecord]
    outer: OuterRecord


def capture_replicas(
    optimizer: OuterOptimizer,
    weights: Mapping[str, torch.Tensor],
    tensors: dict[str, torch.Tensor],
    record: OptimizerRecord,
    scaler: Any,
) -> tuple[dict[str, torch.Tensor], ReplicaParts]:
    """Divides what a rank holds into what is equal in all replicas and what is its own.

    Args:
        optimizer: Started.
        weights: The model's tensors, or the fp32 copies of those that have one, by name.
        tensors: All tensors of model and inner optimizer, by the names they have without replicas.
        record: The inner optimizer's.
        scaler: Its loss scale, in plain values.

    Returns:
        Tensors by stored name, those this rank shall write, and what they are.
    """
    shared, number = optimizer.synchronizer, optimizer.replicas.rank
    trained = {id(parameter): parameter for parameter in shared.weights.parameters}
    names = {trained[id(tensor)]: name for name, tensor in weights.items() if id(tensor) in trained}
    weight_names = {f"model.{name}" for name in names.values()}
    own = {
        replica_name(number, name): tensor
        for name, tensor in tensors.items()
        if name.startswith(_STATE)
        or (name in weight_names and not shared.replicas_are_equal)
        or (name.startswith("model.") and not isinstance(tensor, nn.Parameter) and name not in weight_names)
    }
    copies, outer = _outer_tensors(optimizer, names)
    # Global weights may be another replica's to write; none may be written for them beside, but in warm-up replica 0's.
    apart = set() if optimizer.in_warmup else weight_names
    firsts = [name for name in tensors if number == 0 and not name.startswith(_STATE) and name not in apart]
    everywhere = {name: tensors[name] for name in firsts} | copies
    parts = ReplicaParts(
        number,
        ReplicaRecord(record, scaler, own_flags_of(shared), tensor_records(own)),
        tensor_records(everywhere),
        OuterRecord(optimizer.num_updates, flags_of(shared), outer, []),
    )
    return everywhere | own, parts


def _outer_tensors(
    optimizer: OuterOptimizer, names: Mapping[torch.Tensor, str]
) -> tuple[dict[str, torch.Tensor], OptimizerRecord]:
    """Global weights, outer states and what is under way, where this rank is to write them."""
    shared = optimizer.synchronizer
    copies = {names[parameter]: copy for parameter, copy in shared.copy.of.items()}
    states, record = capture_optimizer(optimizer.outer, copies)
    if optimizer.replicas.rank != 0 and not optimizer.policy.split:
        return {}, record
    tensors = {_OUTER_STATE + name.removeprefix(_STATE): tensor for name, tensor in states.items()}
    if not optimizer.in_warmup:  # global weights are made when it ends
        tensors |= {f"model.{name}": copy for name, copy in copies.items()}
    for fragment, (views, *_) in shared.settle().items():
        for parameter, view in zip(shared.parameters_of(fragment), views, strict=True):
            if parameter in shared.copy.of:
                tensors[_LANDED + names[parameter]] = wrapped_like(parameter, view)
    return tensors, record


def completed(record: Record, parts: ReplicaParts) -> Record:
    """The record with what all ranks have told; collective."""
    every: list[ReplicaParts] = runtime.gather_objects(parts)
    replicas: dict[int, ReplicaRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    outer = every[0].outer
    for part in every:
        tensors |= part.shared
        known = replicas.setdefault(part.replica, part.own)
        known.tensors.update(part.own.tensors)
        outer.optimizer.tensor_keys.update(part.outer.optimizer.tensor_keys)
        outer.optimizer.values.update(part.outer.optimizer.values)
        _merge_groups(outer.optimizer, part.outer.optimizer)
    outer.replicas.extend(replicas[number] for number in sorted(replicas))
    return record.replaced(tensors=tensors, outer=outer)


def _merge_groups(into: OptimizerRecord, other: OptimizerRecord) -> None:
    """Owners of different parameters have groups of the same hyperparameters."""
    for group, more in zip(into.groups, other.groups, strict=False):
        group.parameters.extend(name for name in more.parameters if name not in group.parameters)


@dataclass(frozen=True)
class ReplicaView:
    """A checkpoint as one replica reads it; one that holds no replicas is read as it is.

    With another number of replicas each takes the mean of all replicas' weights, so that no step of a block that was
    under way is lost, and the inner state of the replica with its number (counted round).
    """

    record: Record
    replica: int
    num_replicas: int

    @property
    def _source(self) -> int:
        return self.replica % len(self._outer.replicas)

    @property
    def _outer(self) -> OuterRecord:
        assert self.record.outer is not None
        return self.record.outer

    @property
    def own(self) -> ReplicaRecord | None:
        """What the checkpoint holds of this replica."""
        return None if self.record.outer is None else self._outer.replicas[self._source]

    @property
    def optimizer(self) -> OptimizerRecord | None:
        """The inner optimizer's record."""
        return self.record.optimizer if self.own is None else self.own.optimizer

    @property
    def scaler(self) -> Any:
        """The loss scale."""
        return self.record.scaler if self.own is None else self.own.scaler

    @property
    def tensors(self) -> dict[str, TensorRecord]:
        """Of model and inner optimizer, by the names they have without replicas."""
        if self.own is None:
            return self.record.tensors
        prefix = replica_name(self._source, "")
        return self.record.tensors | {name.removeprefix(prefix): told for name, told in self.own.tensors.items()}

    def stored_name(self, name: str) -> str:
        """Where a tensor of model or inner optimizer is read from."""
        if self.own is None:
            return name
        own = replica_name(self._source, name)
        return own if own in self.own.tensors else name

    def is_averaged(self, name: str) -> bool:
        """Whether a tensor is to be the mean over the replicas that were."""
        if self.own is None or len(self._outer.replicas) == self.num_replicas:
            return False
        told = self.own.tensors.get(replica_name(self._source, name))
        is_weight = name.startswith("model.") or (name.startswith(_STATE) and name.endswith(".master"))
        return told is not None and is_weight and told.dtype.startswith(("float", "bfloat"))


@torch.no_grad()
def load_means(targets: Mapping[str, torch.Tensor], num_replicas: int, folder: Path) -> None:
    """Fills tensors with means over replicas of a checkpoint, one replica at a time; collective.

    Args:
        targets: By the names they have without replicas; the same on every rank that shares them.
        num_replicas: How many replicas the checkpoint holds.
        folder: The checkpoint's tensors.
    """
    sums = {name: torch.zeros_like(local_tensor(target), dtype=torch.float64) for name, target in targets.items()}
    for replica in range(num_replicas):
        parts = {name: torch.empty_like(target.detach()) for name, target in targets.items()}
        load_shards({replica_name(replica, name): part for name, part in parts.items()}, folder)
        for name, part in parts.items():
            sums[name] += local_tensor(part)
    for name, target in targets.items():
        local_tensor(target.detach()).copy_(sums[name] / num_replicas)


@dataclass(frozen=True)
class OuterPlan:
    """What loading will do to an outer optimizer; nothing is changed until :meth:`commit`."""

    optimizer: OuterOptimizer
    view: ReplicaView
    targets: dict[str, torch.Tensor]
    """Tensors to be filled before ``commit``, by stored name."""
    states: OptimizerPlan | None
    landed: dict[int, list[torch.Tensor]]

    def commit(self) -> None:
        """Takes everything over that is not in the targets."""
        record = self.view.record.outer
        if record is not None and self.states is not None and self.view.own is not None:
            self.states.commit()
            self.optimizer.num_updates = record.num_updates
            load_flags(self.optimizer.synchronizer, record.flags, self.view.own.flags, self.landed)

    def finish(self) -> None:
        """Makes weights and global weights fit each other; collective."""
        shared = self.optimizer.synchronizer
        if self.states is None:
            shared.copy.fill()  # the checkpoint is of one model: the first block begins here
        elif shared.replicas_are_equal:
            shared.take_global()  # no replica had weights of its own


def plan_outer(optimizer: OuterOptimizer, weights: Mapping[str, torch.Tensor], view: ReplicaView) -> OuterPlan:
    """Checks that the stored outer step fits this one, and lists the tensors to fill.

    Raises:
        CheckpointError: When another outer optimizer has written it, or fragments under way do not fit.
    """
    record, shared = view.record.outer, optimizer.synchronizer
    if record is None:
        return OuterPlan(optimizer, view, {}, None, {})
    check_flags(shared, record.flags)
    names = {id(tensor): name for name, tensor in weights.items()}
    copies = {names[id(parameter)]: copy for parameter, copy in shared.copy.of.items()}
    told = {
        _STATE + name.removeprefix(_OUTER_STATE) if name.startswith(_OUTER_STATE) else name: tensor
        for name, tensor in view.record.tensors.items()
        if not name.startswith(_STATE)
    }
    stored = _restricted(record.optimizer, copies)
    states = plan_optimizer(optimizer.outer, copies, stored, told, role="outer optimizer")
    targets: dict[str, torch.Tensor] = {f"model.{name}": copy for name, copy in copies.items()}
    targets |= {_OUTER_STATE + name.removeprefix(_STATE): tensor for name, tensor in states.targets.items()}
    landed: dict[int, list[torch.Tensor]] = {}
    for fragment in map(int, record.flags["under_way"]):
        landed[fragment] = []
        for parameter in shared.parameters_of(fragment):
            room = torch.zeros_like(shared.weights.read(parameter), dtype=_type_of(view, names[id(parameter)]))
            landed[fragment].append(room)
            if parameter in shared.copy.of:
                targets[_LANDED + names[id(parameter)]] = wrapped_like(parameter, room)
    return OuterPlan(optimizer, view, targets, states, landed)


def _type_of(view: ReplicaView, name: str) -> torch.dtype:
    told = view.record.tensors.get(_LANDED + name)
    if told is None:
        raise CheckpointError(
            "The checkpoint was written while fragments were under way, and this run cuts the model otherwise",
            expected=f"an averaged pseudo-gradient of {name}",
            got="none",
            fix="resume with the same fragments as before",
        )
    return torch.float64 if told.dtype == "float64" else torch.float32


def _restricted(record: OptimizerRecord, copies: Mapping[str, object]) -> OptimizerRecord:
    """The part of a record that concerns the parameters whose global weights this rank keeps."""
    groups = [group.of(copies) for group in record.groups]
    keys = {name: keys for name, keys in record.tensor_keys.items() if name in copies}
    values = {name: values for name, values in record.values.items() if name in copies}
    return OptimizerRecord(record.kind, [group for group in groups if group.parameters], keys, values)
