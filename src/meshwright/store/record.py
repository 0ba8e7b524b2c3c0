"""``state.json``: everything of a checkpoint that is not a tensor, and the list of all tensors."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.errors import CheckpointError
from meshwright.store.plain import dtype_name

RECORD = "state.json"
_SCHEMA = 1


class TensorRecord(NamedTuple):
    """Global shape and type of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class GroupRecord:
    """A parameter group: which parameters (by model name) have which hyperparameters (in JSON types)."""

    parameters: list[str]
    values: dict[str, Any]


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer without its tensors."""

    kind: str
    groups: list[GroupRecord]
    tensor_keys: dict[str, list[str]]
    """Per parameter name, the states that are stored as tensors."""
    values: dict[str, dict[str, Any]]
    """Per parameter name, the states that are not tensors, in JSON types."""


@dataclass(frozen=True)
class Record:
    """The contents of ``state.json``."""

    step: int
    samples_seen: int
    world_size: int
    strategy: str
    extra: Any
    tensors: dict[str, TensorRecord]
    model_values: dict[str, Any]
    optimizer: OptimizerRecord | None
    lr_scheduler: Any
    scaler: Any

    def to_json(self) -> str:
        """JSON text, with the versions that wrote it."""
        versions = {"torch": str(torch.__version__), "meshwright": _own_version()}
        return json.dumps({"schema": _SCHEMA, **versions, **dataclasses.asdict(self)}, indent=1) + "\n"


def _own_version() -> str:
    try:
        return importlib.metadata.version("meshwright")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


def tensor_records(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorRecord]:
    """Global shapes and types of tensors."""
    return {name: TensorRecord(tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items()}


def read_record(directory: Path) -> Record:
    """Reads the record of a checkpoint whose files are already verified.

    Raises:
        CheckpointError: When it is of another schema or not what its schema says.
    """
    path = directory / RECORD
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        schema = found.pop("schema")
        if schema != _SCHEMA:
            raise CheckpointError(
                f"{path} is of an unknown schema",
                expected=str(_SCHEMA),
                got=repr(schema),
                fix="load it with the version of Meshwright that wrote it",
            )
        return _parsed(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read",
            expected=f"JSON of schema {_SCHEMA}",
            got=f"{type(error).__name__}: {error}",
            fix="copy the checkpoint again from its source, or name an older one to resume from",
        ) from error


def _parsed(found: dict[str, Any]) -> Record:
    fields = {field.name: found[field.name] for field in dataclasses.fields(Record)}
    fields["tensors"] = {name: TensorRecord(tuple(shape), dtype) for name, (shape, dtype) in found["tensors"].items()}
    if found["optimizer"] is not None:
        optimizer = dict(found["optimizer"])
        optimizer["groups"] = [GroupRecord(**group) for group in optimizer["groups"]]
        fields["optimizer"] = OptimizerRecord(**optimizer)
    return Record(**fields)
