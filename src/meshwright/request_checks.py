"""Checks of a request's model and keyword arguments, before anything is changed."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from meshwright.cost import Cluster
from meshwright.errors import ConfigError, ModelError, did_you_mean
from meshwright.loss.kinds import is_loss_func
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
    """Refuses keyword arguments that the function cannot take beside its first, before the model is changed."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature: its own error will do
        return
    names = [name for name, p in signature.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for key in given or {}:
        if key not in names and not takes_any:
            raise ConfigError(
                f"{option} has an unknown key {key!r}{did_you_mean(key, names)}",
                expected=f"keyword arguments of {getattr(function, '__name__', function)}",
                got=repr(key),
                fix="correct the key or leave it out",
            )
    try:
        signature.bind(None, **(given or {}))
    except TypeError as error:
        raise ConfigError(
            f"{option} does not fit {getattr(function, '__name__', function)}: {error}",
            expected=f"{option} for {signature}",
            got=repr(dict(given or {})),
            fix="add what is missing",
        ) from error
    if isinstance(function, type) and issubclass(function, Optimizer) and function.__module__.startswith("torch."):
        _check_values(option, function, given or {})


def _check_values(option: str, optim_func: type[Optimizer], given: Mapping[str, Any]) -> None:
    """Refuses values of a wrong kind for torch's optimizers, which fail in the middle of a comparison.

    Raises:
        ConfigError: Naming an argument without which the optimizer can be built.
    """
    wrong = _type_error(optim_func, given)
    for key in given if wrong is not None else ():
        if _type_error(optim_func, {name: value for name, value in given.items() if name != key}) is None:
            raise ConfigError(
                f"{option} has a value for {key!r} that {optim_func.__name__} cannot use",
                expected="a value of the kind that its documentation names, such as a number",
                got=f"{type(given[key]).__name__} {given[key]!r:.80} ({wrong})",
                fix="correct the value",
            ) from wrong


def _type_error(optim_func: Callable[..., Any], given: Mapping[str, Any]) -> TypeError | None:
    try:
        optim_func([nn.Parameter(torch.zeros(1))], **given)
    except TypeError as error:
        return error
    except Exception:  # says what it objects to itself
        return None
    return None


def check_lr_scheduler(scheduler: Any, given: Mapping[str, Any] | None = None) -> None:
    """Refuses a scheduler, or what builds one from ``given``, that an optimizer step alone cannot move.

    Raises:
        ConfigError: When its ``step`` needs an argument, as ReduceLROnPlateau's does, or it cannot take what is given.
    """
    if callable(scheduler):
        check_keywords("lr_scheduler_args", scheduler, given)
    kind = scheduler if isinstance(scheduler, type) else type(scheduler)
    step = getattr(kind, "step", None)
    if not callable(step):  # a function that builds one: looked at when it has
        return
    try:
        inspect.signature(step).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"{kind.__name__} cannot be stepped after every optimizer step",
            expected="an lr_scheduler_cls whose step() needs nothing but the number of steps",
            got=f"step{inspect.signature(step)}: {error}",
            fix="build it over result.optim, and call its step with a validation loss that is equal on every rank "
            "(result.evaluate returns one)",
        ) from error


def check_rates(optimizer: Any) -> None:
    """Refuses an optimizer without learning rates beside a scheduler.

    Raises:
        ConfigError: For one that chooses its steps itself, as ``Adafactor`` with ``relative_step`` does.
    """
    if any(group.get("lr", 0.0) is None for group in getattr(optimizer, "param_groups", ())):
        raise ConfigError(
            f"{type(optimizer).__name__} has no learning rate that an lr_scheduler_cls could change",
            expected="an optimizer with an lr",
            got="lr=None",
            fix="leave the scheduler out, or give an lr (to Adafactor with relative_step=False)",
        )


def check_amounts(num_micro_batches: int | None, max_grad_norm: float | None) -> None:
    """Refuses numbers that are none of micro-batches, or no norm.

    Raises:
        ConfigError: Naming the argument.
    """
    if num_micro_batches is not None and num_micro_batches < 1:
        raise ConfigError(
            "num_micro_batches is not a count",
            expected="1 or more",
            got=repr(num_micro_batches),
            fix="use 1 to train on whole batches",
        )
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ConfigError(
            "max_grad_norm is not a norm",
            expected="a number above 0, or None",
            got=repr(max_grad_norm),
            fix="use None to measure the norm without clipping",
        )


def check_kinds(given: Mapping[str, Any]) -> None:
    """Refuses values of a wrong kind before anything is predicted or changed.

    Args:
        given: Arguments of ``accelerate`` by name; those that are not listed here are checked elsewhere.

    Raises:
        ConfigError: Naming the argument.
    """
    for name, (is_right, expected, fix) in _KINDS.items():
        value = given.get(name)
        if value is not None and not is_right(value):
            raise ConfigError(
                f"{name} is of a wrong kind", expected=expected, got=f"{type(value).__name__} {value!r:.80}", fix=fix
            )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_Kind = tuple[Callable[[Any], bool], str, str]
_KINDS: dict[str, _Kind] = {
    "optim_func": (
        lambda value: callable(value) or isinstance(value, Optimizer),
        "an optimizer's class, a function that builds one, or an optimizer",
        "pass torch.optim.AdamW, and its arguments as optim_args",
    ),
    "loss_func": (
        is_loss_func,
        "a function of the model's input and its output",
        'pass lambda inputs, output: F.cross_entropy(output, inputs["labels"]), or what of the input is the target',
    ),
    "loss_weight": (
        callable,
        "a function of a model input",
        'pass lambda inputs: (inputs["labels"] != -100).sum(), or another count',
    ),
    "prepare_input": (callable, "a function of a batch and a device", "leave it out to move tensors to the device"),
    "optim_param_func": (callable, "a function of the model", "return parameter groups from it"),
    "lr_scheduler_cls": (callable, "a scheduler's class", "pass torch.optim.lr_scheduler.StepLR, or another"),
    "dataset": (
        lambda value: not isinstance(value, DataLoader),
        "a dataset: every rank gets a loader of its own part",
        "pass loader.dataset, and the loader's arguments as dataloader_args",
    ),
    "max_grad_norm": (_is_number, "a number above 0, or None", "use None to measure the norm without clipping"),
    "num_micro_batches": (_is_count, "a whole number, 1 or more", "use 1 to train on whole batches"),
    "excluded": (lambda value: not isinstance(value, str), "a list of names of methods", "put the name into a list"),
    "included": (lambda value: not isinstance(value, str), "a list of names of methods", "put the name into a list"),
    "cluster": (
        lambda value: isinstance(value, str | os.PathLike | Cluster),
        "a cluster file, the name of a preset, or a Cluster",
        "name the file that meshwright calibrate has written, or leave it out",
    ),
    "batch_size": (_is_count, "a whole number of samples over all ranks", "correct it"),
}
