"""``state.json``: everything of a checkpoint that is not a tensor, and the list of all tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter

from meshwright.errors import CheckpointError, MeshwrightError
from meshwright.store.manifest import check_link
from meshwright.store.plain import dtype_name, from_plain

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

    def of(self, names: Container[str]) -> GroupRecord:
        """The same group with some of its parameters."""
        return GroupRecord([name for name in self.parameters if name in names], self.values)


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
class ReplicaRecord:
    """What one of several replicas has of its own."""

    optimizer: OptimizerRecord
    """The inner one."""
    scaler: Any
    flags: dict[str, Any]
    tensors: dict[str, TensorRecord]
    """By stored name."""


@dataclass(frozen=True)
class OuterRecord:
    """Replicas that synchronise every so many steps."""

    num_updates: int
    flags: dict[str, Any]
    optimizer: OptimizerRecord
    """The outer one; its parameters are the global weights."""
    replicas: list[ReplicaRecord]


@dataclass(frozen=True)
class SpikeRecord:
    """The losses that a spike is told by."""

    losses: list[float]
    in_a_row: int


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
    outer: OuterRecord | None = None
    average: dict[str, int] | None = None
    """Counts of the moving average of the weights, whose tensors are ``average.NAME``."""

    spikes: SpikeRecord | None = None

    def replaced(self, **changes: Any) -> Record:
        """The same record with some fields changed."""
        return dataclasses.replace(self, **changes)

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


_RECORD = TypeAdapter(Record)


def read_record(directory: Path) -> Record:
    """Reads the record of a checkpoint whose files are already verified.

    Raises:
        CheckpointError: When it is of another schema or not what its schema says.
    """
    path = directory / RECORD
    try:
        check_link(directory, RECORD)
        if not path.is_file():
            raise ValueError("no file")  # but a pipe, or a device that never ends
        found: dict[str, Any] = json.loads(path.read_bytes())
        schema = found.pop("schema")
        if schema != _SCHEMA:
            raise CheckpointError(
                f"{path} is of an unknown schema",
                expected=str(_SCHEMA),
                got=repr(schema),
                fix="load it with the version of Meshwright that wrote it",
            )
        return _parsed(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read",
            expected=f"JSON of schema {_SCHEMA}",
            got=f"{type(error).__name__}: {error}",
            fix="copy the checkpoint again from its source, or name an older one to resume from",
        ) from error


def _parsed(found: dict[str, Any]) -> Record:
    record = _RECORD.validate_python(found)
    for value in (record.extra, record.model_values, record.lr_scheduler, record.scaler):
        from_plain(value)  # what cannot be decoded is found before anything is loaded
    return record


@contextlib.contextmanager
def consistent(directory: Path) -> Iterator[None]:
    """Turns what happens where parts of a record do not agree with each other into a CheckpointError.

    Only a record that somebody else has written can be like that: it is verified, and its types are checked.
    """
    try:
        yield
    except MeshwrightError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, MemoryError) as error:
        raise CheckpointError(
            f"{directory / RECORD} contradicts itself or the run that it is loaded into",
            expected="the record that Meshwright has written with these tensors",
            got=f"{type(error).__name__}: {error}",
            fix="copy the checkpoint again from its source, or name an older one to resume from",
        ) from error
