"""Checks of hyperparameters, parameters and gradients that our optimizers share."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.errors import ConfigError, ModelError
from meshwright.optim.dtensors import HALF_TYPES


def bad_value(name: str, value: Any, expected: str) -> ConfigError:
    """Return the error for a hyperparameter out of range."""
    return ConfigError(f"{name} is out of range", expected=expected, got=repr(value), fix=f"choose another {name}")


def check_at_least_zero(group: dict[str, Any], *names: str) -> None:
    """Refuse hyperparameters that are negative or not a number.

    Raises:
        ConfigError: Naming the first.
    """
    for name in names:
        if not float(group[name]) >= 0:
            raise bad_value(name, group[name], "0 or more")


def check_betas(group: dict[str, Any], count: int) -> None:
    """Refuse decay rates that are not ``count`` numbers from 0 to below 1.

    Raises:
        ConfigError: With the rates.
    """
    betas = group["betas"]
    if len(betas) != count or not all(0 <= float(beta) < 1 for beta in betas):
        raise bad_value("betas", betas, f"{count} numbers from 0 to below 1")


def check_types(group: dict[str, Any]) -> None:
    """Refuse parameters of other types than fp32, fp16 and bf16.

    Raises:
        ModelError: With the first.
    """
    for parameter in group["params"]:
        if parameter.dtype not in (torch.float32, *HALF_TYPES):
            raise ModelError(
                "A parameter has a type that this optimizer does not update",
                expected="torch.float32, torch.float16 or torch.bfloat16",
                got=f"{parameter.dtype}, of shape {tuple(parameter.shape)}",
                fix="convert the model, or use torch.optim.AdamW",
            )


def check_dense(parameter: torch.Tensor) -> None:
    """Refuse a sparse gradient.

    Raises:
        ModelError: With its layout.
    """
    gradient = parameter.grad
    if gradient is not None and gradient.layout != torch.strided:
        raise ModelError(
            "A gradient is sparse",
            expected="dense gradients",
            got=f"{gradient.layout} for a parameter of shape {tuple(parameter.shape)}",
            fix="build the embedding with sparse=False, or give it to torch.optim.SparseAdam, stepped by itself",
        )
