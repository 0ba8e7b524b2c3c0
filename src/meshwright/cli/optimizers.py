"""The optimizer of a training file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.cli.config import OptimizerTable
from meshwright.cli.references import resolve_reference
from meshwright.errors import ConfigError, did_you_mean, join_names
from meshwright.optim import (
    CAME,
    Adafactor,
    GaLoreAdamW,
    GaLoreAdamW8bit,
    Lamb,
    Muon,
    get_galore_param_groups,
    muon_param_groups,
)

_KEYS = ("weight_decay", "betas", "eps", "momentum")


@dataclass(frozen=True)
class NamedOptimizer:
    """What a training file's optimizer stands for."""

    build: Callable[..., Optimizer]
    arguments: dict[str, Any] = field(default_factory=dict)
    groups: Callable[..., list[dict[str, Any]]] | None = None
    """``groups(model, **own)`` makes parameter groups; keywords of its own are taken out of ``args``."""


_KNOWN: dict[str, NamedOptimizer] = {
    # Fused AdamW is one kernel per update instead of a dozen, on the CPU too.
    "adamw": NamedOptimizer(torch.optim.AdamW, {"fused": True}),
    "sgd": NamedOptimizer(torch.optim.SGD),
    "lamb": NamedOptimizer(Lamb),
    # A training file always has a rate; relative steps would contradict it.
    "adafactor": NamedOptimizer(Adafactor, {"relative_step": False, "scale_parameter": False}),
    "came": NamedOptimizer(CAME),
    "galore": NamedOptimizer(GaLoreAdamW, groups=get_galore_param_groups),
    "galore_8bit": NamedOptimizer(GaLoreAdamW8bit, groups=get_galore_param_groups),
    "muon": NamedOptimizer(Muon, groups=muon_param_groups),
}


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer with all that ``accelerate`` is told of it."""

    build: Callable[..., Optimizer]
    arguments: dict[str, Any]
    param_func: Callable[[nn.Module], list[dict[str, Any]]] | None


def optimizer_of(table: OptimizerTable) -> OptimizerChoice:
    """The optimizer's class, its keyword arguments and how it groups parameters.

    Raises:
        ConfigError: When there is no such class, or it does not take a key that is set.
    """
    known = _KNOWN[table.name] if table.name in _KNOWN else NamedOptimizer(_referred(table.name))
    given = {key: value for key in _KEYS if (value := getattr(table, key)) is not None}
    of_groups = _own_keywords(known.groups) & table.args.keys()
    arguments = {key: value for key, value in table.args.items() if key not in of_groups}
    where = {key: f"optimizer.{key}" for key in given} | {key: f"optimizer.args.{key}" for key in arguments}
    _check_keys(table.name, known.build, where)
    options = {key: table.args[key] for key in of_groups}
    if known.groups is get_galore_param_groups:
        options["weight_decay"] = given.get("weight_decay", 0.0)
    groups = known.groups
    return OptimizerChoice(
        known.build,
        {"lr": table.lr, **known.arguments, **given, **arguments},
        None if groups is None else lambda model: groups(model, **options),
    )


def _referred(name: str) -> Callable[..., Optimizer]:
    if ":" in name:
        return resolve_reference(name, "optimizer.name")
    raise ConfigError(
        f"Unknown optimizer {name!r}{did_you_mean(name, _KNOWN)}",
        expected=f"{join_names(_KNOWN)}, or 'module:Class'",
        got=f"optimizer.name = {name!r}",
        fix="correct the name",
    )


def _own_keywords(groups: Callable[..., Any] | None) -> set[str]:
    if groups is None:
        return set()
    return set(list(inspect.signature(groups).parameters)[1:]) - {"weight_decay", "decay"}


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
