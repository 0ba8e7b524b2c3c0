"""Name a training state as tensors and a record, with or without replicas, and plan the way back; no files.

:func:`capture` is what a save writes. :func:`plan_restore` is what a load checks before it changes anything: tensors to
fill in place, and a :meth:`Restoration.commit` for all that is not a tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.errors import CheckpointError, join_names
from meshwright.nn import fp32_buffers
from meshwright.nn.fp8 import is_scaling_state
from meshwright.optim import OuterOptimizer, average_of, guard_of, inner_optimizer, spike_watch_of
from meshwright.optim.dtensors import local_tensor, wrapped_like
from meshwright.optim.loaded_weights import restoring
from meshwright.optim.outer.synchronizer import check_flags, flags_of, load_flags, own_flags_of
from meshwright.runtime.agreement import gather_distinct
from meshwright.store.entries import (
    ModelEntries,
    TrainingState,
    check_orders,
    dtype_named,
    from_plain,
    in_model_order,
    model_entries,
    to_plain,
    to_rank_order_,
)
from meshwright.store.manifest import (
    Describe,
    OptimizerRecord,
    OuterRecord,
    Record,
    ReplicaRecord,
    SpikeRecord,
    TensorRecord,
    tensor_records,
)
from meshwright.store.optimizer_state import (
    AveragePlan,
    OptimizerPlan,
    Others,
    average_counts,
    average_tensors,
    capture_optimizer,
    finest,
    plan_average,
    plan_optimizer,
    united_optimizer,
)
from meshwright.store.scheduler_file import restore_scheduler
from meshwright.store.stored_shards import load_shards
from meshwright.store.stored_tensors import StoredTensor


@dataclass(frozen=True)
class Snapshot:
    """Live tensors of a training state by stored name, and the record of the rest."""

    tensors: dict[str, torch.Tensor]
    record: Record
    replica: ReplicaParts | None = None
    """This rank's part where there are replicas; :func:`completed` adds the others'."""


def capture(
    state: TrainingState, world_size: int, *, alone: bool = False, records: Describe = tensor_records
) -> Snapshot:
    """Name everything in a training state.

    Args:
        state: Live objects.
        world_size: Number of ranks.
        alone: Whether this rank is to be restored from what it captures here, without what other replicas have.
        records: Describes tensors.

    Raises:
        CheckpointError: When something in it cannot be stored.
    """
    state.settle()
    entries = model_entries(state.model)
    weights = finest(entries, state.optim)
    left_out = _left_out(state, entries)
    tensors = {f"model.{name}": tensor for name, tensor in weights.items() if name not in left_out}
    optimizer = None
    if state.optim is not None:
        states, optimizer = capture_optimizer(inner_optimizer(state.optim), weights)
        tensors |= states
    average = average_of(state.optim)
    tensors |= average_tensors(average, weights)
    scheduler, scaler, spikes = state.lr_scheduler, _scaler(state), spike_watch_of(state.optim)
    schedule: Any = None
    if scheduler is not None:  # any scheduler takes any state dict without an error: the kind tells them apart
        state_dict = to_plain(scheduler.state_dict(), "The lr_scheduler's state")
        schedule = {"kind": type(scheduler).__name__, "state": state_dict}
    record = Record(
        step=state.step,
        samples_seen=state.samples_seen,
        world_size=world_size,
        strategy=state.strategy,
        extra=to_plain(state.extra, "extra"),
        tensors=records(tensors),
        model_values=entries.values,
        optimizer=optimizer,
        lr_scheduler=schedule,
        scaler=to_plain(scaler.state_dict(), "The loss scaler's state") if scaler is not None else None,
        average=average_counts(average),
        spikes=SpikeRecord(**spikes.state_dict()) if spikes is not None else None,
    )
    if not isinstance(state.optim, OuterOptimizer):
        return Snapshot(in_model_order(entries, tensors), record)
    assert optimizer is not None, "there is an optimizer"
    tensors, parts = capture_replicas(state.optim, weights, tensors, optimizer, record.scaler, alone=alone)
    return Snapshot(in_model_order(entries, tensors), record, parts)


def _scaler(state: TrainingState) -> torch.amp.GradScaler | None:
    guard = guard_of(state.optim)
    scaler = guard.scaler if guard is not None else None
    return scaler if scaler is not None and scaler.is_enabled() else None


@dataclass(frozen=True)
class Restoration:
    """The checked restoration of a training state; nothing changes before ``targets`` are filled."""

    state: TrainingState
    record: Record
    entries: ModelEntries
    targets: dict[str, torch.Tensor]
    """Tensors to fill before :meth:`commit`, by stored name."""
    optimizer: OptimizerPlan | None
    average: AveragePlan
    view: ReplicaView
    outer: OuterPlan | None
    averaged: dict[str, torch.Tensor]
    """Tensors to fill with means over the checkpoint's replicas, by the names they have without replicas."""
    beside: list[tuple[torch.Tensor, torch.Tensor]]
    """Buffers, and the fp32 values that are filled in their place."""

    def commit(self) -> None:
        """Restore everything else, after the targets were filled."""
        state, record = self.state, self.record
        to_rank_order_(self.entries, self.targets | self.averaged)
        # The masters were filled; the weights are rounded from them.
        guard = guard_of(state.optim)
        if guard is not None and guard.master is not None:
            guard.master.write_back()
        for buffer, value in self.beside:
            buffer.copy_(value)
        # An optimizer that is not restored here is to follow the new weights.
        with restoring() if state.optim is not None else contextlib.nullcontext():
            self.entries.load(record.model_values)
        if self.optimizer is not None:
            self.optimizer.commit()
        self.average.commit()
        if self.outer is not None:
            self.outer.commit()
        # After the optimizer, whose groups hold the rates.
        if state.lr_scheduler is not None:
            restore_scheduler(state.lr_scheduler, from_plain(record.lr_scheduler["state"]))
        scaler = _scaler(state)
        if scaler is not None and self.view.scaler is not None:  # without a stored scale, the first one stays
            scaler.load_state_dict(from_plain(self.view.scaler))
        spikes = spike_watch_of(state.optim)
        if spikes is not None and record.spikes is not None:
            spikes.load_state_dict(dataclasses.asdict(record.spikes))
        state.step, state.samples_seen, state.extra = record.step, record.samples_seen, from_plain(record.extra)


def plan_restore(state: TrainingState, record: Record, others: Others | None = None) -> Restoration:
    """Check that a checkpoint fits a training state, and list the tensors to fill.

    Args:
        state: Live objects.
        record: The checkpoint's record.
        others: Names that only other ranks hold; None: all hold the same.

    Raises:
        CheckpointError: Naming every missing, unknown or misshapen entry; the state is untouched.
    """
    entries = model_entries(state.model)
    weights = finest(entries, state.optim)
    left_out = _left_out(state, entries)
    targets = {_weights_name(name, state, record): each for name, each in weights.items() if name not in left_out}
    others = others or Others()
    _check_model(entries, record, others, left_out)
    _check_parts(state, record)
    outer_optimizer = state.optim if isinstance(state.optim, OuterOptimizer) else None
    replicas = outer_optimizer.replicas if outer_optimizer is not None else None
    view = ReplicaView(record, replicas.rank if replicas else 0, replicas.size if replicas else 1)
    # Scales that the checkpoint does not have, of a run without fp8, start from scratch.
    targets = {n: tensor for n, tensor in targets.items() if n in view.tensors or not is_scaling_state(n)}
    optimizer, outer = None, None
    if state.optim is not None and view.optimizer is not None:
        optimizer = plan_optimizer(inner_optimizer(state.optim), weights, view.optimizer, view.tensors, others.updated)
        targets |= optimizer.targets
    average = plan_average(average_of(state.optim), weights, record)
    targets |= average.targets
    check_orders(entries, targets)
    averaged = {name: tensor for name, tensor in targets.items() if view.is_averaged(name)}
    own = {view.stored_name(name): tensor for name, tensor in targets.items() if name not in averaged}
    if outer_optimizer is not None:
        outer = plan_outer(outer_optimizer, weights, view)
        own |= outer.targets  # these replace weights that equal the global ones, which are loaded instead
    beside = [*fp32_buffers(entries.module).values()]
    return Restoration(state, record, entries, own, optimizer, average, view, outer, averaged, beside)


def _weights_name(name: str, state: TrainingState, record: Record) -> str:
    """Return the stored name of what an entry of the model is filled with: buffers have no average.

    Raises:
        CheckpointError: When averages are asked for, and there are none.
    """
    if not state.averaged:
        return f"model.{name}"
    if record.average is None:
        raise CheckpointError(
            "The checkpoint has no moving average of the weights",
            expected="a checkpoint of a run with the method ema",
            got="weights alone",
            fix="leave eval.ema out (--set eval.ema=false)",
        )
    average = f"average.{name}"
    return average if average in record.tensors else f"model.{name}"


def _left_out(state: TrainingState, entries: ModelEntries) -> set[str]:
    """Return the frozen parameters, where they are neither saved nor loaded."""
    if state.frozen:
        return set()
    return {name for name, each in entries.tensors.items() if isinstance(each, nn.Parameter) and not each.requires_grad}


def _check_model(entries: ModelEntries, record: Record, others: Others, left_out: set[str]) -> None:
    stored = {name.removeprefix("model."): each for name, each in record.tensors.items() if name.startswith("model.")}
    wanted, given = entries.tensors.keys() | entries.values.keys(), stored.keys() | record.model_values.keys()
    missing = sorted(name for name in wanted - given - left_out if not is_scaling_state(name))
    unknown = sorted(name for name in given - wanted - others.entries if not is_scaling_state(name))
    misshapen = [
        f"{name} ({_describe(saved)} instead of {_describe(now)})"
        for name, now in tensor_records(entries.tensors).items()
        if (saved := stored.get(name)) is not None and not _fits(now, saved)
    ]
    if missing or unknown or misshapen:
        raise CheckpointError(
            "The checkpoint is of another model",
            expected=f"the {len(wanted)} entries of {type(entries.module).__name__}",
            got=f"missing: {join_names(missing)}; unknown: {join_names(unknown)}; misshapen: {join_names(misshapen)}",
            fix="build the model with the configuration it was trained with",
        )


def _fits(now: TensorRecord, stored: TensorRecord) -> bool:
    # Precision may change between runs; a float read into an integer would lose its meaning.
    same_kind = dtype_named(now.dtype).is_floating_point == dtype_named(stored.dtype).is_floating_point
    return now.shape == stored.shape and same_kind


def _describe(record: TensorRecord) -> str:
    return f"{record.dtype}{list(record.shape)}"


def _check_parts(state: TrainingState, record: Record) -> None:
    parts = {"optim": (state.optim, record.optimizer), "lr_scheduler": (state.lr_scheduler, record.lr_scheduler)}
    absent = [name for name, (wanted, stored) in parts.items() if wanted is not None and stored is None]
    if absent:
        raise CheckpointError(
            "The checkpoint lacks parts of this training state",
            expected="everything that the state holds",
            got=f"no {' and no '.join(absent)}",
            fix="load with these left out of the TrainingState (None); they then start afresh",
        )
    if state.lr_scheduler is not None and record.lr_scheduler["kind"] != type(state.lr_scheduler).__name__:
        raise CheckpointError(
            "The checkpoint was written with another learning-rate scheduler",
            expected=type(state.lr_scheduler).__name__,
            got=record.lr_scheduler["kind"],
            fix="use that scheduler, or leave it out of the TrainingState (None) to start a new schedule",
        )


# --- Replicas that train on their own
#
# What is equal in all replicas is stored once, what each has of its own under its number.
#
# ``model.NAME``                       global weights (in warm-up: replica 0's), which any strategy loads
# ``outer.state.NAME.KEY``             the outer optimizer
# ``outer.landed.NAME``                averaged pseudo-gradients that were sent and are not applied yet
# ``replica.R.model.NAME``             weights, unless all replicas hold the global ones; buffers
# ``replica.R.optim.state.NAME.KEY``   the inner optimizer

_STATE, _OUTER_STATE, _LANDED = "optim.state.", "outer.state.", "outer.landed."


def replica_name(replica: int, name: str) -> str:
    """Return the stored name of a tensor that one replica has of its own."""
    return f"replica.{replica}.{name}"


def begin(state: TrainingState, *, to_load: bool) -> None:
    """Make the global weights, unless they exist; collective where there are replicas."""
    if isinstance(state.optim, OuterOptimizer):
        state.optim.synchronizer.start(from_checkpoint=to_load)


@dataclass(frozen=True)
class ReplicaParts:
    """One rank's contribution to a checkpoint of replicas."""

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
    *,
    alone: bool = False,
) -> tuple[dict[str, torch.Tensor], ReplicaParts]:
    """Divide a rank's tensors into those that are equal in all replicas and those of its own replica.

    Args:
        optimizer: The outer optimizer, with global weights.
        weights: See :func:`updatable`.
        tensors: All tensors of model and inner optimizer, by the names they have without replicas.
        record: The inner optimizer's record.
        scaler: Its loss scale, in plain values.
        alone: See :func:`capture`; what is equal in all replicas is then every replica's.

    Returns:
        The tensors that this rank is to write, by stored name, and their records.
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
    copies, outer = _outer_tensors(optimizer, names, alone=alone)
    # Another replica may write the global weights, so replica 0 writes its own weights in warm-up only.
    apart = set() if optimizer.in_warmup else weight_names
    is_writer = number == 0 or alone
    firsts = [name for name in tensors if is_writer and not name.startswith(_STATE) and name not in apart]
    everywhere = {name: tensors[name] for name in firsts} | copies
    parts = ReplicaParts(
        number,
        ReplicaRecord(record, scaler, own_flags_of(shared), tensor_records(own)),
        tensor_records(everywhere),
        OuterRecord(optimizer.num_updates, flags_of(shared), outer, []),
    )
    return everywhere | own, parts


def _outer_tensors(
    optimizer: OuterOptimizer, names: Mapping[torch.Tensor, str], *, alone: bool
) -> tuple[dict[str, torch.Tensor], OptimizerRecord]:
    """Return global weights, outer states and pseudo-gradients under way, where this rank is to write them."""
    shared = optimizer.synchronizer
    copies = {names[parameter]: copy for parameter, copy in shared.copy.of.items()}
    states, record = capture_optimizer(optimizer.outer, copies)
    if optimizer.replicas.rank != 0 and not optimizer.policy.split and not alone:
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
    """Add the replicas of all ranks to a record; collective."""
    return completed_by(record, [each for _, each in gather_distinct(parts, repr(parts))])


def completed_by(record: Record, every: Sequence[ReplicaParts]) -> Record:
    """Add replicas to a record."""
    replicas: dict[int, list[ReplicaRecord]] = {}
    tensors: dict[str, TensorRecord] = {}
    outer = every[0].outer
    for part in every:
        tensors |= part.shared
        replicas.setdefault(part.replica, []).append(part.own)
        outer.optimizer.tensor_keys.update(part.outer.optimizer.tensor_keys)
        outer.optimizer.values.update(part.outer.optimizer.values)
        _merge_groups(outer.optimizer, part.outer.optimizer)
    outer.replicas.extend(_joined(replicas[number]) for number in sorted(replicas))
    return dataclasses.replace(record, tensors=tensors, outer=outer)


def completed_alone(snapshot: Snapshot, num_replicas: int) -> Record:
    """Return the record from which one rank is restored alone: every replica is recorded as its own."""
    parts = snapshot.replica
    if parts is None:
        return snapshot.record
    outer = dataclasses.replace(parts.outer, replicas=[parts.own] * num_replicas)
    return dataclasses.replace(snapshot.record, tensors=parts.shared, outer=outer)


def _joined(ranks: list[ReplicaRecord]) -> ReplicaRecord:
    """Join what the ranks of one replica hold, each of them a part."""
    if len(ranks) == 1:
        return ranks[0]
    tensors = {name: tensor for rank in ranks for name, tensor in rank.tensors.items()}
    return dataclasses.replace(
        ranks[0], tensors=tensors, optimizer=united_optimizer([rank.optimizer for rank in ranks])
    )


def _merge_groups(into: OptimizerRecord, other: OptimizerRecord) -> None:
    """Add the parameters of another rank's groups; ranks that own different parameters have the same groups."""
    for group, more in zip(into.groups, other.groups, strict=False):
        group.parameters.extend(name for name in more.parameters if name not in group.parameters)


@dataclass(frozen=True)
class ReplicaView:
    """A checkpoint as one replica reads it; one without replicas is read as it is.

    With another number of replicas, each takes the mean of all replicas' weights, so that no step since the last
    synchronisation is lost, and the inner state of the replica with its number, modulo their number.
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
        """Return the checkpoint's record of this replica."""
        return None if self.record.outer is None else self._outer.replicas[self._source]

    @property
    def optimizer(self) -> OptimizerRecord | None:
        """Return the inner optimizer's record."""
        return self.record.optimizer if self.own is None else self.own.optimizer

    @property
    def scaler(self) -> Any:
        """Return the loss scale."""
        return self.record.scaler if self.own is None else self.own.scaler

    @property
    def tensors(self) -> dict[str, TensorRecord]:
        """Return the tensors of model and inner optimizer, by the names they have without replicas."""
        if self.own is None:
            return self.record.tensors
        prefix = replica_name(self._source, "")
        return self.record.tensors | {name.removeprefix(prefix): each for name, each in self.own.tensors.items()}

    def stored_name(self, name: str) -> str:
        """Return the stored name that a tensor of model or inner optimizer is read from."""
        if self.own is None:
            return name
        own = replica_name(self._source, name)
        return own if own in self.own.tensors else name

    def is_averaged(self, name: str) -> bool:
        """Return whether a tensor becomes the mean over the stored replicas."""
        if self.own is None or len(self._outer.replicas) == self.num_replicas:
            return False
        stored = self.own.tensors.get(replica_name(self._source, name))
        is_weight = name.startswith("model.") or (name.startswith(_STATE) and name.endswith(".master"))
        return stored is not None and is_weight and stored.dtype.startswith(("float", "bfloat"))


@torch.no_grad()
def load_means(
    targets: Mapping[str, torch.Tensor], num_replicas: int, folder: Path, stored: Mapping[str, StoredTensor]
) -> None:
    """Fill tensors with means over replicas of a checkpoint, one replica at a time; collective.

    Args:
        targets: By the names they have without replicas; the same on every rank that shares them.
        num_replicas: How many replicas the checkpoint holds.
        folder: The checkpoint's tensors.
        stored: The same, open.
    """
    sums = {name: torch.zeros_like(local_tensor(target), dtype=torch.float64) for name, target in targets.items()}
    for replica in range(num_replicas):
        parts = {name: torch.empty_like(target.detach()) for name, target in targets.items()}
        load_shards({replica_name(replica, name): part for name, part in parts.items()}, folder, stored)
        for name, part in parts.items():
            sums[name] += local_tensor(part)
    for name, target in targets.items():
        local_tensor(target.detach()).copy_(sums[name] / num_replicas)


@dataclass(frozen=True)
class OuterPlan:
    """The checked restoration of an outer optimizer; nothing changes before :meth:`commit`."""

    optimizer: OuterOptimizer
    view: ReplicaView
    targets: dict[str, torch.Tensor]
    """Tensors to be filled before ``commit``, by stored name."""
    states: OptimizerPlan | None
    landed: dict[int, list[torch.Tensor]]

    def commit(self) -> None:
        """Restore everything that is not in the targets."""
        record = self.view.record.outer
        if record is not None and self.states is not None and self.view.own is not None:
            self.states.commit()
            self.optimizer.num_updates = record.num_updates
            load_flags(self.optimizer.synchronizer, record.flags, self.view.own.flags, self.landed)

    def finish(self) -> None:
        """Take the global weights from the weights, or the other way round, where only one was stored; collective."""
        shared = self.optimizer.synchronizer
        if self.states is None:
            shared.copy.fill()  # the checkpoint is of one model: the first block begins here
        elif shared.replicas_are_equal:
            shared.take_global()  # no replica had weights of its own


def plan_outer(optimizer: OuterOptimizer, weights: Mapping[str, torch.Tensor], view: ReplicaView) -> OuterPlan:
    """Check that the stored outer step fits this one, and list the tensors to fill.

    Raises:
        CheckpointError: When another outer optimizer has written it, or fragments under way do not fit.
    """
    record, shared = view.record.outer, optimizer.synchronizer
    if record is None:
        return OuterPlan(optimizer, view, {}, None, {})
    check_flags(shared, record.flags)
    names = {id(tensor): name for name, tensor in weights.items()}
    copies = {names[id(parameter)]: copy for parameter, copy in shared.copy.of.items()}
    tensors = {
        _STATE + name.removeprefix(_OUTER_STATE) if name.startswith(_OUTER_STATE) else name: tensor
        for name, tensor in view.record.tensors.items()
        if not name.startswith(_STATE)
    }
    stored = _restricted(record.optimizer, copies)
    states = plan_optimizer(optimizer.outer, copies, stored, tensors, role="outer optimizer")
    targets: dict[str, torch.Tensor] = {f"model.{name}": copy for name, copy in copies.items()}
    targets |= {_OUTER_STATE + name.removeprefix(_STATE): tensor for name, tensor in states.targets.items()}
    landed: dict[int, list[torch.Tensor]] = {}
    for fragment in map(int, record.flags["under_way"]):
        landed[fragment] = []
        for parameter in shared.parameters_of(fragment):
            gradient = torch.zeros_like(shared.weights.read(parameter), dtype=_type_of(view, names[id(parameter)]))
            landed[fragment].append(gradient)
            if parameter in shared.copy.of:
                targets[_LANDED + names[id(parameter)]] = wrapped_like(parameter, gradient)
    return OuterPlan(optimizer, view, targets, states, landed)


def _type_of(view: ReplicaView, name: str) -> torch.dtype:
    stored = view.record.tensors.get(_LANDED + name)
    if stored is None:
        raise CheckpointError(
            "The checkpoint was written while fragments were under way, and this run cuts the model otherwise",
            expected=f"an averaged pseudo-gradient of {name}",
            got="none",
            fix="resume with the same fragments as before",
        )
    return torch.float64 if stored.dtype == "float64" else torch.float32


def _restricted(record: OptimizerRecord, copies: Mapping[str, object]) -> OptimizerRecord:
    """Restrict a record to the parameters whose global weights this rank keeps."""
    groups = [group.of(copies) for group in record.groups]
    keys = {name: keys for name, keys in record.tensor_keys.items() if name in copies}
    values = {name: values for name, values in record.values.items() if name in copies}
    return OptimizerRecord(record.kind, [group for group in groups if group.parameters], keys, values)
