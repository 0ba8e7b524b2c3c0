"""Modules that functions use beside the model, such as a loss with statistics, put back as they were."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.nn import KeptAttributes
from meshwright.optim import local_tensor


@contextlib.contextmanager
def kept_modules(modules: Iterable[nn.Module], model: nn.Module) -> Iterator[None]:
    """Puts attributes, tensors and gradients of modules back as they were; the values wait in host memory.

    Args:
        modules: With those inside of them. One that is sharded stays as it is: where its tensors are changes by itself.
        model: Gets gradients and attributes back alone: nobody trains it meanwhile, though a loss may read it.
    """
    modules = [each for each in modules if not any(isinstance(inside, FSDPModule) for inside in each.modules())]
    attributes, own = KeptAttributes(), set(model.parameters())
    every = {each: None for module in (*modules, model) for each in module.modules()}
    for module in every:
        attributes.note(module)
    parameters = {each: each.grad for module in every for each in module.parameters(recurse=False)}
    tensors = [each for each in (*parameters, *(b for m in modules for b in m.buffers())) if each not in own]
    values = [(tensor, _host_copy(tensor)) for tensor in tensors]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        attributes.put_back()
        with torch.no_grad():
            for tensor, value in values:
                local_tensor(tensor).copy_(value)
        for parameter, gradient in parameters.items():
            parameter.grad = gradient


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor.detach()).to("cpu", copy=True)


def modules_used_by(functions: Iterable[Any]) -> list[nn.Module]:
    """The modules that functions are, belong to, are given beforehand, close over, or name; so of functions they use.

    Args:
        functions: Called with a batch or an output: functions, methods, modules, partial functions.
    """
    found: dict[nn.Module, None] = {}
    met: set[int] = set()
    waiting = list(functions)
    while waiting:
        each = waiting.pop()
        if isinstance(each, nn.Module):
            found[each] = None
        elif id(each) not in met:
            met.add(id(each))
            waiting.extend(_used_by(each))
    return list(found)


def _used_by(function: Any) -> list[Any]:
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values()]
    if isinstance(function, types.MethodType):
        owned = [each for each in vars(function.__self__).values() if isinstance(each, nn.Module)]
        return [function.__func__, *owned, *([function.__self__] if isinstance(function.__self__, nn.Module) else [])]
    if not isinstance(function, types.FunctionType):
        return []
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    closed = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            closed.append(cell.cell_contents)
    # Functions of other files are libraries', which keep nothing that trains.
    same = [each for each in named if getattr(each, "__globals__", None) is function.__globals__]
    return [*closed, *same, *(each for each in named if isinstance(each, nn.Module))]
