"""The optimizer of a training file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from meshwright.cli.config import OptimizerTable
from meshwright.cli.references import resolve_reference
from meshwright.errors import ConfigError, did_you_mean, join_names

_KEYS = ("weight_decay", "betas", "eps", "momentum")
# Fused AdamW is one kernel per update instead of a dozen, on the CPU too.
_KNOWN: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"fused": True}),
    "sgd": (torch.optim.SGD, {}),
}


def optimizer_of(table: OptimizerTable) -> tuple[Callable[..., Optimizer], dict[str, Any]]:
    """The optimizer's class and its keyword arguments.

    Raises:
        ConfigError: When there is no such class, or it does not take a key that is set.
    """
    if table.name in _KNOWN:
        optimizer, defaults = _KNOWN[table.name]
    else:
        optimizer, defaults = resolve_reference(table.name, "optimizer.name"), {}
    given = {key: value for key in _KEYS if (value := getattr(table, key)) is not None}
    _check_keys(table.name, optimizer, {**{key: f"optimizer.{key}" for key in given}, **_in_args(table)})
    return optimizer, {"lr": table.lr, **defaults, **given, **table.args}


def _in_args(table: OptimizerTable) -> dict[str, str]:
    return {key: f"optimizer.args.{key}" for key in table.args}


def _check_keys(name: str, optimizer: Callable[..., Optimizer], keys: dict[str, str]) -> None:
    parameters = list(inspect.signature(optimizer).parameters.values())[1:]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    known = [each.name for each in parameters]
    for key, where in keys.items():
        if key not in known:
            raise ConfigError(
                f"{name} takes no {key!r}{did_you_mean(key, known)}",
                expected=f"keys from {join_names(known, limit=20)}",
                got=where,
                fix=f"leave {where} out",
            )
