"""Tensors that a model has under several names, and a file under one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright.errors import CheckpointError
from meshwright.store.entries import stored_name


def tied_names(raw: Mapping[str, Any]) -> dict[str, list[str]]:
    """For every name of a tied tensor its other names.

    Args:
        raw: A state dict with live tensors.
    """
    groups: dict[int, list[str]] = {}
    for name, value in raw.items():
        if isinstance(value, torch.Tensor):
            groups.setdefault(id(value), []).append(stored_name(name))
    return {name: [each for each in group if each != name] for group in groups.values() for name in group}


def check_tied(path: Path, found: Mapping[str, Any], tied: Mapping[str, Sequence[str]]) -> None:
    """Refuses a file with several tensors for what is one in the model: all but one would be lost.

    Raises:
        CheckpointError: Naming the first two that differ.
    """
    for name, others in tied.items():
        for other in others:
            if name < other and name in found and other in found and not _equal(found[name], found[other]):
                raise CheckpointError(
                    f"{path} does not fit the model; nothing was loaded",
                    expected=f"one tensor for {name} and {other}, which the model ties",
                    got="two that differ",
                    fix="build the model with untied weights, or pass strict=False to load the first",
                )


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)
