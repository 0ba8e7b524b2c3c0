"""Refuse what would train wrongly without a word: ranks that train differently, and parameters that came too late."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright.errors import ModelError
from meshwright.optim.guarded_step import parameters_in
from meshwright.runtime import world_size
from meshwright.store.entries import stored_name, unwrapped

if TYPE_CHECKING:
    from meshwright.methods import Job

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NO_HYPERPARAMETERS = ("params", "param_names", "differentiable")  # torch adds the last when an optimizer is copied
_FEW = 16  # numbers of a tensor that are worth comparing


def value_text(value: Any) -> str:
    """Return a value as text that is equal for equal values in different processes.

    Functions and classes are named, tensors of a few numbers are written out, and of devices only the type is.
    """
    if isinstance(value, functools.partial):
        return f"{value_text(value.func)}({value_text([*value.args, value.keywords])})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{value_text(key)}: {value_text(each)}" for key, each in value.items())) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(value_text, value))) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, torch.Tensor):
        few = value.numel() <= _FEW and not value.is_meta and not isinstance(value, DTensor)
        return f"{value.detach().tolist()}" if few else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, torch.device):
        return value.type
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return _ADDRESS.sub("", repr(value))


def optimizer_text(optimizer: Optimizer | None, groups: bool = True) -> str:
    """Return the hyperparameters of an optimizer as :func:`value_text` writes them.

    Args:
        optimizer: Any torch optimizer, or None.
        groups: Whether to write those of each of its groups; else its defaults.
    """
    if optimizer is None:
        return "none"
    every: Sequence[Mapping[str, Any]] = optimizer.param_groups if groups else (optimizer.defaults,)
    own = [{key: value for key, value in group.items() if key not in _NO_HYPERPARAMETERS} for group in every]
    return f"{type(optimizer).__name__} with {value_text(own)}"


def built_text(optimizer: Optimizer | None, job: Job) -> str:
    """Return the text of the optimizer that was built for a job.

    Ranks that hold different layers, or different experts, may have different groups.
    """
    return optimizer_text(optimizer, groups=job.pipeline is None and job.experts is None)


class KnownParameters:
    """The parameters of a model as its strategy has left it: the optimizer updates these, and ranks average them.

    A layer that is put into the model later would never train, or train differently on every rank.

    Args:
        model: The model, after all methods were applied.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._known = {id(each): (weakref.ref(each), each.shape) for each in model.parameters()}
        self._optimizer: Callable[[], Optimizer | None] = lambda: None

    def follow(self, optimizer: Optimizer) -> None:
        """Note the optimizer of the model: on one rank it may be given further parameters."""
        self._optimizer = weakref.ref(optimizer)

    def __call__(self) -> None:
        """Refuse a model with gradients, or shapes, that it did not have before.

        Gathered weights of FSDP2, which are others than its shards, have no gradients of their own.

        Raises:
            ModelError: Naming the first such parameter.
        """
        model = self._model()
        if model is None:
            return
        for parameter in parameters_in(model):
            known, shape = self._known.get(id(parameter), (None, torch.Size()))
            if known is not None and known() is parameter:
                if parameter.shape != shape:
                    raise _late(model, parameter, shape)
            elif parameter.grad is not None and not self._is_added(parameter):
                raise _late(model, parameter, None)

    def _is_added(self, parameter: torch.Tensor) -> bool:
        optimizer = self._optimizer()
        if optimizer is None or world_size() > 1:
            return False
        return any(parameter is each for group in optimizer.param_groups for each in group["params"])


def _late(model: nn.Module, parameter: torch.Tensor, before: torch.Size | None) -> ModelError:
    named = unwrapped(model).named_parameters()
    name = next((stored_name(name) for name, each in named if each is parameter), "a parameter")
    got = f"{name} of shape {tuple(parameter.shape)}"
    return ModelError(
        "The model has changed since accelerate, and its optimizer and gradient averages know the parameters of then",
        expected="the parameters that the model had in accelerate"
        if before is None
        else f"{name} of shape {tuple(before)}, as in accelerate",
        got=f"{got}, put into the model later" if before is None else got,
        fix="replace or resize layers before accelerate; for a model that trains already, save its weights, build it "
        "anew with the change, load them, and accelerate that",
    )
