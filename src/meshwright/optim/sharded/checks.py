"""Checks of what every group of a sharded optimizer has, and words for what an optimizer's own numbers must be."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.errors import ConfigError, ModelError
from meshwright.optim.layouts import HALF_TYPES

_HALF_UPDATES = ("master", "stochastic")


def check_group(group: dict[str, Any]) -> None:
    """Refuses a way of updating half precision that there is none of, and parameters of other types.

    Raises:
        ConfigError: For ``half_update``.
        ModelError: For parameters.
    """
    if group["half_update"] not in _HALF_UPDATES:
        raise bad_value("half_update", group["half_update"], "'master' or 'stochastic'")
    for parameter in group["params"]:
        if parameter.dtype not in (torch.float32, *HALF_TYPES):
            raise ModelError(
                "A parameter has a type that this optimizer does not update",
                expected="torch.float32, torch.float16 or torch.bfloat16",
                got=f"{parameter.dtype}, of shape {tuple(parameter.shape)}",
                fix="convert the model",
            )
        if parameter.dtype == torch.float16 and group["half_update"] == "stochastic":
            raise ModelError(
                "A float16 parameter cannot be rounded at random: its range would clip what bfloat16 keeps",
                expected="torch.bfloat16 parameters with half_update='stochastic'",
                got=f"float16, of shape {tuple(parameter.shape)}",
                fix="use half_update='master'",
            )


def bad_value(name: str, value: Any, expected: str) -> ConfigError:
    """The error for a hyperparameter out of range."""
    return ConfigError(f"{name} is out of range", expected=expected, got=repr(value), fix=f"choose another {name}")


def check_at_least_zero(group: dict[str, Any], *names: str) -> None:
    """Refuses negative or undefined numbers.

    Raises:
        ConfigError: Naming the first.
    """
    for name in names:
        if not float(group[name]) >= 0:
            raise bad_value(name, group[name], "0 or more")


def check_betas(group: dict[str, Any], count: int) -> None:
    """Refuses decay rates that are not ``count`` numbers from 0 to below 1.

    Raises:
        ConfigError: With the rates.
    """
    betas = group["betas"]
    if len(betas) != count or not all(0 <= float(beta) < 1 for beta in betas):
        raise bad_value("betas", betas, f"{count} numbers from 0 to below 1")
