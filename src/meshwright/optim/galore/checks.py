"""Refusals of projections that cannot be."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.errors import ModelError
from meshwright.optim.galore.projection import PROJECTION_TYPES
from meshwright.optim.galore.projector import METHODS
from meshwright.optim.sharded import bad_value, check_at_least_zero


def check_projection(group: dict[str, Any]) -> None:
    """Refuses numbers out of range, and parameters that have no such projection.

    Raises:
        ConfigError: Naming the hyperparameter.
        ModelError: Naming the parameter.
    """
    for name in ("rank", "update_proj_gap"):
        if not isinstance(group[name], int) or group[name] < 1:
            raise bad_value(name, group[name], "a whole number from 1")
    check_at_least_zero(group, "scale")
    if group["proj_type"] not in PROJECTION_TYPES:
        raise bad_value("proj_type", group["proj_type"], ", ".join(map(repr, PROJECTION_TYPES)))
    if group["svd"] not in METHODS:
        raise bad_value("svd", group["svd"], ", ".join(map(repr, METHODS)))
    for index, parameter in enumerate(group["params"]):
        _check_shape(parameter, _name(group, index), group["rank"])


def _name(group: dict[str, Any], index: int) -> str:
    names = group.get("param_names")
    return repr(names[index]) if names else f"number {index} of its group"


def _check_shape(parameter: torch.Tensor, name: str, rank: int) -> None:
    if parameter.ndim < 2:
        raise ModelError(
            f"The parameter {name} is no matrix: it cannot be projected",
            expected="parameters of 2 or more dims in groups with a rank",
            got=f"shape {tuple(parameter.shape)}",
            fix="put it into a group without rank, as get_galore_param_groups does",
        )
    if min(parameter.shape[-2:]) < rank:
        raise ModelError(
            f"The parameter {name} is smaller than the rank, and has no more singular vectors than its shorter side",
            expected=f"matrices of at least {rank} × {rank}",
            got=f"shape {tuple(parameter.shape)} with rank={rank}",
            fix="choose a smaller rank, or put it into a group without rank",
        )
