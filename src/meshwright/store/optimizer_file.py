"""Save and load an optimizer alone, by parameter names, for any layout of ranks.

A file is torch's full state dict, by parameter names; a folder holds safetensors files, and the rest in their index.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import CheckpointError
from meshwright.nn import part_of_whole
from meshwright.optim import GuardedOptimizer, OuterOptimizer, inner_optimizer
from meshwright.runtime import broadcast_object, rank, require_distributed, same_on_every_rank, wait_for_all_ranks
from meshwright.runtime.agreement import gather_distinct
from meshwright.store.entries import from_plain, in_model_order, model_entries, to_plain, to_rank_order_, unwrapped
from meshwright.store.folder import is_folder, read_folder, write_folder
from meshwright.store.manifest import GroupRecord, OptimizerRecord, TensorRecord, tensor_records
from meshwright.store.optimizer_state import (
    OptimizerPlan,
    capture_optimizer,
    names_of_others,
    names_on_rank,
    plan_optimizer,
    refuse_parts,
    state_name,
    united_optimizer,
    updatable,
    updated_names,
)
from meshwright.store.tensor_files import failed_before, make_folder, read_file, wait_for_saves, write_file, write_later
from meshwright.store.transfer import OwnedTensor, collect_named, owned_by_ranks, spread, spread_owned


def save_optimizer(
    optimizer: Optimizer,
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    folder: bool = False,
    prefix: str | None = None,
    shard_bytes: int = 2**30,
    non_blocking: bool = False,
) -> None:
    """Write states, hyperparameters, fp32 master weights and loss scale of an optimizer; collective.

    A file holds what torch's ``get_optimizer_state_dict`` calls a full state dict (states and groups by parameter
    names), read with ``weights_only=True``. A folder holds safetensors files with an index.

    Args:
        optimizer: Over ``model``'s parameters; a GuardedOptimizer too.
        model: Gives the names.
        path: The file, or the folder.
        folder: Write a folder.
        prefix: Of the names of the folder's files.
        shard_bytes: Largest size of a file in the folder.
        non_blocking: Write in the background; see :func:`meshwright.store.save`.

    Raises:
        CheckpointError: On every rank, when it updates parameters that are not in the model, or writing failed.
    """
    require_distributed("save_optimizer")
    wait_for_all_ranks("save_optimizer")
    target = Path(path)
    non_blocking = not failed_before() and non_blocking
    with same_on_every_rank():
        tensors, contents = _capture(optimizer, model)
    part = part_of_whole(unwrapped(model))
    owners: dict[str, OwnedTensor] = {}
    if part is None:
        refuse_parts(tensors, "save_optimizer")
    else:
        owners = owned_by_ranks(tensors)
        contents = _united_contents(contents, part.names)

    def gather(name: str, to: int = 0) -> torch.Tensor | None:
        return collect_named(name, tensors, owners, to)

    outlines = {name: owner.empty("meta") for name, owner in owners.items()} or tensors
    if folder:
        stem = f"{prefix}.{INDEX_KEY}" if prefix else INDEX_KEY
        metadata = {INDEX_KEY: dataclasses.asdict(contents)}
        options: dict[str, Any] = {"shard_bytes": shard_bytes, "non_blocking": non_blocking, "gather": gather}
        write_folder(outlines, target, stem, metadata=metadata, **options)
        return
    with same_on_every_rank():
        if rank() == 0:
            make_folder(target.parent)
    whole = {name: gather(name) for name in outlines}
    with same_on_every_rank():
        if rank() == 0:
            (write_later if non_blocking else write_file)(target, to_torch_format(whole, contents))


def _capture(optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, torch.Tensor], OptimizerContents]:
    _refuse_replicas(optimizer)
    entries = model_entries(model)
    weights = updatable(entries, optimizer)
    tensors, record = capture_optimizer(inner_optimizer(optimizer), weights)
    tensors |= {master_name(n): weight for n, weight in weights.items() if weight is not entries.tensors[n]}
    tensors = in_model_order(entries, tensors)
    updated = {name for group in record.groups for name in group.parameters}
    scaler = optimizer.scaler if isinstance(optimizer, GuardedOptimizer) else None
    return tensors, OptimizerContents(
        record,
        tensor_records({name: tensor for name, tensor in weights.items() if name in updated}),
        to_plain(scaler.state_dict(), "The loss scaler's state") if scaler is not None else None,
    )


def _united_contents(contents: OptimizerContents, order: Sequence[str]) -> OptimizerContents:
    """Unite the contents of all ranks' optimizers, with parameters in the order of the whole model; collective."""
    every: list[OptimizerContents] = [each for _, each in gather_distinct(contents, repr(contents))]
    record = united_optimizer([each.record for each in every])
    place = {name: number for number, name in enumerate(order)}
    for group in record.groups:
        group.parameters.sort(key=lambda name: place.get(name, len(place)))
    weights = {name: weight for each in every for name, weight in each.weights.items()}
    return OptimizerContents(record, weights, contents.scaler)


def load_optimizer(optimizer: Optimizer, model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load what :func:`save_optimizer` wrote, in place and in whatever layout the model has now; collective.

    Only rank 0 reads. Master weights that the file holds go into the optimizer's, or into fp32 parameters where it has
    none, so weights go on as exactly as they were.

    Raises:
        CheckpointError: On every rank, when it is absent, damaged, or of another optimizer or model. The optimizer is
            then as it was.
    """
    require_distributed("load_optimizer")
    wait_for_all_ranks("load_optimizer")
    found: dict[str, torch.Tensor] = {}
    contents: OptimizerContents | None = None
    with same_on_every_rank():
        _refuse_replicas(optimizer)
        wait_for_saves()
        if rank() == 0:
            found, contents = read_optimizer(Path(path))
    stored, contents = broadcast_object((tensor_records(found), contents))
    in_parts = part_of_whole(unwrapped(model)) is not None
    with same_on_every_rank():
        names = names_on_rank(model_entries(model), optimizer)
    others = names_of_others(*names, [], updated_names([contents.record])).updated if in_parts else frozenset[str]()
    with same_on_every_rank():
        plan, targets = _plan(optimizer, model, contents, stored, others)
    with torch.no_grad():
        if in_parts:
            for name, each in owned_by_ranks(targets).items():
                spread_owned(found.get(name), targets.get(name), each)
        else:
            for name, target in targets.items():
                spread(found.get(name), target)
    to_rank_order_(model_entries(model), targets)
    _commit(optimizer, plan, contents)


def _plan(
    optimizer: Optimizer,
    model: nn.Module,
    contents: OptimizerContents,
    stored: Mapping[str, TensorRecord],
    others: frozenset[str],
) -> tuple[OptimizerPlan, dict[str, torch.Tensor]]:
    weights = updatable(model_entries(model), optimizer)
    here = tensor_records(weights)
    saved = {name: contents.weights.get(name, here[name]) for name in here}
    other = [name for name in here if here[name].shape != saved[name].shape]
    if other:
        raise CheckpointError(
            "The optimizer's file is of another model",
            expected=f"{other[0]} of shape {here[other[0]].shape}",
            got=str(saved[other[0]].shape),
            fix="build the model it was saved from",
        )
    tensors = {**stored, **{f"model.{name}": record for name, record in saved.items()}}
    plan = plan_optimizer(inner_optimizer(optimizer), weights, contents.record, tensors, others)
    masters = {
        master_name(name): tensor
        for name, tensor in weights.items()
        if master_name(name) in stored and tensor.dtype == torch.float32
    }
    return plan, plan.targets | masters


def _refuse_replicas(optimizer: Optimizer) -> None:
    """Refuse an outer optimizer: one file would lose the states of other replicas, and the global weights."""
    if isinstance(optimizer, OuterOptimizer):
        raise CheckpointError(
            "An outer optimizer does not fit into one optimizer file: every replica has states of its own",
            expected="an optimizer of one model",
            got=type(optimizer).__name__,
            fix="save with a CheckpointStore, or every rank's own optimizer.state_dict()",
        )


def _commit(optimizer: Optimizer, plan: OptimizerPlan, contents: OptimizerContents) -> None:
    plan.commit()
    if not isinstance(optimizer, GuardedOptimizer):
        return
    if optimizer.master is not None:
        optimizer.master.write_back()
    if optimizer.scaler is not None and contents.scaler is not None:
        optimizer.scaler.load_state_dict(from_plain(contents.scaler))


# --- The formats: torch's full state dict in a file, tensors and an index in a folder

INDEX_KEY = "optimizer"


@dataclass(frozen=True)
class OptimizerContents:
    """Everything that is stored beside the tensors."""

    record: OptimizerRecord
    weights: dict[str, TensorRecord]
    """Shapes and types of the tensors it updates: parameters, or the masters of those that have one."""
    scaler: dict[str, Any] | None


def master_name(parameter: str) -> str:
    """Return the stored name of a parameter's fp32 master weight."""
    return f"optim.master.{parameter}"


def to_torch_format(tensors: Mapping[str, Any], contents: OptimizerContents) -> dict[str, Any]:
    """Build ``{"state": {name: {key: value}}, "param_groups": [{"params": [name, …], …}], …}`` of whole tensors."""
    record = contents.record
    state = {
        name: {**{key: tensors[state_name(name, key)] for key in keys}, **_decoded(record.values[name])}
        for name, keys in record.tensor_keys.items()
    }
    masters = {name: tensors[master_name(name)] for name in contents.weights if master_name(name) in tensors}
    return {
        "state": state,
        "param_groups": [{"params": group.parameters, **_decoded(group.values)} for group in record.groups],
        "master": masters,
        "scaler": from_plain(contents.scaler),
        "kind": record.kind,
        "weights": {name: (list(shape), dtype) for name, (shape, dtype) in contents.weights.items()},
    }


def _decoded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: from_plain(value) for key, value in values.items()}


def read_optimizer(path: Path) -> tuple[dict[str, torch.Tensor], OptimizerContents]:
    """Read the tensors and the contents of a file or folder of :func:`meshwright.store.save_optimizer`.

    Raises:
        CheckpointError: When it is absent, damaged, or holds something else.
    """
    try:
        if is_folder(path):
            tensors, metadata = read_folder(path, INDEX_KEY)
            return tensors, _contents(**metadata[INDEX_KEY])
        return _from_torch_format(read_file(path))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} holds no optimizer",
            expected="what save_optimizer writes",
            got=f"{type(error).__name__}: {error}",
            fix="check the path",
        ) from error


def _contents(record: dict[str, Any], weights: dict[str, Any], scaler: Any) -> OptimizerContents:
    groups = [GroupRecord(**group) for group in record["groups"]]
    described = {name: TensorRecord(tuple(shape), dtype) for name, (shape, dtype) in weights.items()}
    return OptimizerContents(OptimizerRecord(**{**record, "groups": groups}), described, scaler)


def _from_torch_format(found: dict[str, Any]) -> tuple[dict[str, torch.Tensor], OptimizerContents]:
    tensors = {master_name(name): master for name, master in found["master"].items()}
    keys: dict[str, list[str]] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, state in found["state"].items():
        own = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        tensors |= {state_name(name, key): value for key, value in own.items()}
        keys[name] = list(own)
        values[name] = {key: to_plain(value, f"{key} of {name}") for key, value in state.items() if key not in own}
    groups = [
        {"parameters": group["params"], "values": to_plain({k: v for k, v in group.items() if k != "params"}, "group")}
        for group in found["param_groups"]
    ]
    record = {"kind": found["kind"], "groups": groups, "tensor_keys": keys, "values": values}
    return tensors, _contents(record, found["weights"], to_plain(found["scaler"], "scaler"))
