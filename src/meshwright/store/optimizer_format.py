"""How an optimizer lies in a file (torch's full state dict, by parameter names) and in a folder's index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.errors import CheckpointError
from meshwright.store.file_format import read_file
from meshwright.store.folder import is_folder, read_folder
from meshwright.store.optimizer import state_name
from meshwright.store.plain import from_plain, to_plain
from meshwright.store.record import GroupRecord, OptimizerRecord, TensorRecord

INDEX_KEY = "optimizer"


@dataclass(frozen=True)
class OptimizerContents:
    """What is stored beside the tensors."""

    record: OptimizerRecord
    weights: dict[str, TensorRecord]
    """Shapes and types of the tensors it updates: parameters, or the masters of those that have one."""
    scaler: dict[str, Any] | None


def master_name(parameter: str) -> str:
    """The stored name of a parameter's fp32 master weight."""
    return f"optim.master.{parameter}"


def to_torch_format(tensors: Mapping[str, Any], contents: OptimizerContents) -> dict[str, Any]:
    """``{"state": {name: {key: value}}, "param_groups": [{"params": [name, …], …}], …}``, with whole tensors."""
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
    """Reads the tensors and the rest of what :func:`meshwright.store.save_optimizer` wrote.

    Raises:
        CheckpointError: When it is absent, damaged or something else.
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
        kept = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        tensors |= {state_name(name, key): value for key, value in kept.items()}
        keys[name] = list(kept)
        values[name] = {key: to_plain(value, f"{key} of {name}") for key, value in state.items() if key not in kept}
    groups = [
        {"parameters": group["params"], "values": to_plain({k: v for k, v in group.items() if k != "params"}, "group")}
        for group in found["param_groups"]
    ]
    record = {"kind": found["kind"], "groups": groups, "tensor_keys": keys, "values": values}
    return tensors, _contents(record, found["weights"], to_plain(found["scaler"], "scaler"))
