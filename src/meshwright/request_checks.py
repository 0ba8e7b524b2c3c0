"""Checks of a request's model and keyword arguments, before anything is changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from meshwright.errors import ConfigError, ModelError, did_you_mean
from meshwright.nn import check_initialized


def check_model(model: nn.Module, device: torch.device) -> None:
    """Refuses what is not a plain model with values, on the job's device or the CPU.

    Raises:
        ModelError: Saying what it is instead.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            "The model is not a module",
            expected="a torch.nn.Module",
            got=type(model).__name__,
            fix="pass the model itself, built",
        )
    check_initialized(model)
    wrapped = next(
        (m for m in model.modules() if isinstance(m, DistributedDataParallel | DataParallel | FSDPModule)), None
    )
    sharded = next((name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)), None)
    if wrapped is not None or sharded is not None:
        raise ModelError(
            "The model is already distributed",
            expected="a plain nn.Module",
            got=f"{type(wrapped).__name__ if wrapped is not None else sharded} inside {type(model).__name__}",
            fix="pass the model as it was before wrapping; the strategy wraps it",
        )
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if not devices <= {device, torch.device("cpu")} or len(devices) > 1:
        meta = (
            "parameters on meta have no values. Build the model outside torch.device('meta'), or fill it: "
            "model.to_empty(device='cpu'), then load_state_dict. One that no machine can hold whole is built "
            "in shards: see DistributedModule"
        )
        raise ModelError(
            "The model is on a wrong device",
            expected=f"all parameters and buffers on {device}"
            + ("" if device.type == "cpu" else ", or all on the CPU"),
            got=", ".join(sorted(map(str, devices))),
            fix=meta if torch.device("meta") in devices else f"call model.to({str(device)!r}) before",
        )


def check_keywords(option: str, function: Callable[..., Any], given: Mapping[str, Any] | None) -> None:
    """Refuses keyword arguments that the function cannot take, before the model is changed."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature: its own error will do
        return
    names = [name for name, p in signature.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return
    for key in given or {}:
        if key not in names:
            raise ConfigError(
                f"{option} has an unknown key {key!r}{did_you_mean(key, names)}",
                expected=f"keyword arguments of {getattr(function, '__name__', function)}",
                got=repr(key),
                fix="correct the key or leave it out",
            )
