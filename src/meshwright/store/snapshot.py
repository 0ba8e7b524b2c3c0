"""A training state as named tensors plus a record, and the way back; nothing here touches files."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from meshwright.errors import CheckpointError, join_names
from meshwright.nn.fp8 import is_scaling_state
from meshwright.optim import OuterOptimizer, average_of, guard_of, inner_optimizer, spike_watch_of
from meshwright.optim.loaded import restoring
from meshwright.store.average import AveragePlan, average_counts, average_tensors, plan_average
from meshwright.store.entries import ModelEntries, model_entries
from meshwright.store.optimizer import (
    OptimizerPlan,
    capture_optimizer,
    masters_by_name,
    plan_optimizer,
    updated_names,
)
from meshwright.store.plain import dtype_named, from_plain, to_plain
from meshwright.store.rank_order import check_orders, in_model_order, to_rank_order_
from meshwright.store.record import Record, SpikeRecord, TensorRecord, tensor_records
from meshwright.store.replicas import OuterPlan, ReplicaParts, ReplicaView, capture_replicas, plan_outer
from meshwright.store.scheduler_file import restore_scheduler
from meshwright.store.state import TrainingState
from meshwright.store.union import Others


@dataclass(frozen=True)
class Snapshot:
    """What is written: live tensors by stored name, and the record."""

    tensors: dict[str, torch.Tensor]
    record: Record
    replica: ReplicaParts | None = None
    """Where there are replicas: what this rank holds; :func:`meshwright.store.replicas.completed` adds the others'."""


def capture(state: TrainingState, world_size: int) -> Snapshot:
    """Names everything in a training state.

    Raises:
        CheckpointError: When something in it cannot be stored.
    """
    entries = model_entries(state.model)
    weights = entries.tensors | masters_by_name(state.optim, entries.tensors)
    left_out = _left_out(state, entries)
    tensors = {f"model.{name}": tensor for name, tensor in weights.items() if name not in left_out}
    optimizer = None
    if state.optim is not None:
        states, optimizer = capture_optimizer(inner_optimizer(state.optim), weights)
        tensors |= states
    average = average_of(state.optim)
    tensors |= average_tensors(average, weights)
    scheduler, scaler, spikes = state.lr_scheduler, _scaler(state), spike_watch_of(state.optim)
    record = Record(
        step=state.step,
        samples_seen=state.samples_seen,
        world_size=world_size,
        strategy=state.strategy,
        extra=to_plain(state.extra, "extra"),
        tensors=tensor_records(tensors),
        model_values=entries.values,
        optimizer=optimizer,
        lr_scheduler=_scheduler_record(scheduler) if scheduler is not None else None,
        scaler=to_plain(scaler.state_dict(), "The loss scaler's state") if scaler is not None else None,
        average=average_counts(average),
        spikes=SpikeRecord(**spikes.state_dict()) if spikes is not None else None,
    )
    if not isinstance(state.optim, OuterOptimizer):
        return Snapshot(in_model_order(entries, tensors), record)
    assert optimizer is not None, "there is an optimizer"
    tensors, parts = capture_replicas(state.optim, weights, tensors, optimizer, record.scaler)
    return Snapshot(in_model_order(entries, tensors), record, parts)


def _scheduler_record(scheduler: LRScheduler) -> dict[str, Any]:
    # Any scheduler takes any state dict without a word: the kind is what tells them apart.
    return {"kind": type(scheduler).__name__, "state": to_plain(scheduler.state_dict(), "The lr_scheduler's state")}


def _scaler(state: TrainingState) -> torch.amp.GradScaler | None:
    guard = guard_of(state.optim)
    scaler = guard.scaler if guard is not None else None
    return scaler if scaler is not None and scaler.is_enabled() else None


@dataclass(frozen=True)
class Restoration:
    """What loading will do to a training state, checked; nothing is changed before ``targets`` are filled."""

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

    def commit(self) -> None:
        """Hands over everything that is not in the targets themselves."""
        state, record = self.state, self.record
        to_rank_order_(self.entries, self.targets | self.averaged)
        guard = guard_of(state.optim)
        if guard is not None and guard.master is not None:
            guard.master.write_back()
        # Without its optimizer, one that follows the model must hear of the weights.
        with restoring() if state.optim is not None else contextlib.nullcontext():
            self.entries.load(record.model_values)
        if self.optimizer is not None:
            self.optimizer.commit()
        self.average.commit()
        if self.outer is not None:
            self.outer.commit()
        if state.lr_scheduler is not None:
            restore_scheduler(state.lr_scheduler, from_plain(record.lr_scheduler["state"]))
        scaler = _scaler(state)
        if scaler is not None and self.view.scaler is not None:  # a run that starts to scale keeps its first scale
            scaler.load_state_dict(from_plain(self.view.scaler))
        spikes = spike_watch_of(state.optim)
        if spikes is not None and record.spikes is not None:
            spikes.load_state_dict(dataclasses.asdict(record.spikes))
        state.step, state.samples_seen, state.extra = record.step, record.samples_seen, from_plain(record.extra)


def names_held(state: TrainingState) -> tuple[list[str], list[str]]:
    """This rank's entries of the model, and the parameters that its optimizer updates."""
    entries = model_entries(state.model)
    names = [*entries.tensors, *entries.values]
    if state.optim is None:
        return names, []
    weights = entries.tensors | masters_by_name(state.optim, entries.tensors)
    return names, updated_names(inner_optimizer(state.optim), weights)


def plan_restore(state: TrainingState, record: Record, others: Others | None = None) -> Restoration:
    """Checks that a checkpoint fits a training state, and lists the tensors to fill.

    Args:
        state: Live objects.
        record: Of the checkpoint.
        others: What other ranks hold of the model; None: all hold the same.

    Raises:
        CheckpointError: Naming every missing, unknown or misshapen entry; the state is untouched.
    """
    entries = model_entries(state.model)
    weights = entries.tensors | masters_by_name(state.optim, entries.tensors)
    left_out = _left_out(state, entries)
    targets = {f"model.{name}": tensor for name, tensor in weights.items() if name not in left_out}
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
        own |= outer.targets  # in place of weights that are the global ones: these are taken over from there
    return Restoration(state, record, entries, own, optimizer, average, view, outer, averaged)


def _left_out(state: TrainingState, entries: ModelEntries) -> set[str]:
    """The frozen parameters, where they are neither saved nor loaded."""
    if state.frozen:
        return set()
    return {name for name, each in entries.tensors.items() if isinstance(each, nn.Parameter) and not each.requires_grad}


def _check_model(entries: ModelEntries, record: Record, others: Others, left_out: set[str]) -> None:
    stored = {name.removeprefix("model."): told for name, told in record.tensors.items() if name.startswith("model.")}
    wanted, given = entries.tensors.keys() | entries.values.keys(), stored.keys() | record.model_values.keys()
    missing = sorted(name for name in wanted - given - left_out if not is_scaling_state(name))
    unknown = sorted(name for name in given - wanted - others.entries if not is_scaling_state(name))
    misshapen = [
        f"{name} ({_described(told)} instead of {_described(now)})"
        for name, now in tensor_records(entries.tensors).items()
        if (told := stored.get(name)) is not None and not _fits(now, told)
    ]
    if missing or unknown or misshapen:
        raise CheckpointError(
            "The checkpoint is of another model",
            expected=f"the {len(wanted)} entries of {type(entries.module).__name__}",
            got=f"missing: {join_names(missing)}; unknown: {join_names(unknown)}; misshapen: {join_names(misshapen)}",
            fix="build the model with the configuration it was trained with",
        )


def _fits(now: TensorRecord, told: TensorRecord) -> bool:
    # Precision may change between runs; a float read into an integer would lose its meaning.
    same_kind = dtype_named(now.dtype).is_floating_point == dtype_named(told.dtype).is_floating_point
    return now.shape == told.shape and same_kind


def _described(record: TensorRecord) -> str:
    return f"{record.dtype}{list(record.shape)}"


def _check_parts(state: TrainingState, record: Record) -> None:
    absent = [
        name
        for name, wanted, stored in (
            ("optim", state.optim, record.optimizer),
            ("lr_scheduler", state.lr_scheduler, record.lr_scheduler),
        )
        if wanted is not None and stored is None
    ]
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
