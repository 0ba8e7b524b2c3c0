"""Run modules with other tensors in place of their parameters and buffers, and restore the state they hold."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from meshwright.errors import ModelError
from meshwright.nn.module_structure import part_of_whole
from meshwright.runtime.torch_internals.fake_tensors import FakeTensor
from meshwright.runtime.torch_internals.modules import buffers_of, parameters_of


def call_with(
    module: nn.Module, state: Mapping[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> Any:
    """Call a module with other tensors, and give it its own back; attributes are put back as they were, too.

    ``torch.func.functional_call`` by itself takes a module that lies in several places once for each of them, and
    gives it the lent tensors back as its own the second time.

    Args:
        module: Called.
        state: By the names of ``named_parameters`` and ``named_buffers``; where a tensor lies in several places, its
            first name stands for all. Tensors that have no name here stay.
        args: Of the call.
        kwargs: Of the call.
    """
    lent = {
        id(tensor): state[name]
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if name in state
    }
    places = {
        f"{path}.{name}" if path else name: lent[id(tensor)]
        for path, each in module.named_modules()  # every module once
        for name, tensor in (*parameters_of(each).items(), *buffers_of(each).items())
        if id(tensor) in lent
    }
    before = SavedAttributes()
    for each in module.modules():
        before.note(each)
    try:
        return torch.func.functional_call(module, places, args, kwargs, tie_weights=False)
    finally:
        before.put_back()


def run_with(
    run: Callable[[nn.Module, Any], Any], model: nn.Module, state: Mapping[str, torch.Tensor], inputs: Any
) -> Any:
    """``run(model, inputs)`` with other tensors in the model, as :func:`call_with` lends them.

    For passes without data. What modules hold beside parameters and buffers, and all that modules outside of the model
    hold, such as a loss with weights of its own, stands aside for tensors without data, and comes back as it was: a
    pass runs on one rank alone, and none of it may be seen in training.

    Raises:
        ModelError: When a model runs in it that is distributed already, such as a teacher in the loss. What it gathers
            would stay with it: tensors without data, and on this rank alone where only one predicts; or this rank would
            wait for others.
    """
    before, own, met = SavedAttributes(), set(model.modules()), set[nn.Module]()

    def enter(module: nn.Module, args: Any) -> None:
        if module in met:
            return
        _refuse_distributed(module)
        met.add(module)
        if module not in own:
            before.note(module)
        _stand_in(module)

    hook = register_module_forward_pre_hook(enter)
    try:
        with forgotten_results(model):
            return call_with(_Run(run, model), {f"model.{name}": tensor for name, tensor in state.items()}, (inputs,))
    finally:
        hook.remove()
        before.put_back()


def _stand_in(module: nn.Module) -> None:
    """Tensors that are not lent yet make way for tensors without data, where such are made."""
    places: tuple[dict[str, Any], ...] = (vars(module), parameters_of(module), buffers_of(module))
    for place in places:
        for name, tensor in place.items():
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
                place[name] = tensor.detach().requires_grad_(tensor.requires_grad)


def _refuse_distributed(module: nn.Module) -> None:
    asks = isinstance(module, DistributedDataParallel) and module.will_sync_module_buffers()
    if isinstance(module, FSDPModule) or part_of_whole(module) is not None or asks:
        raise ModelError(
            "another model runs in it whose ranks need each other, which a pass without data cannot run",
            expected="a model and a loss of plain modules",
            got=type(module).__name__,
            fix="train on: only predictions miss it",
        )


class _Run(nn.Module):
    """A function of a model as a module, since tensors are lent to one for the time of a call."""

    def __init__(self, run: Callable[[nn.Module, Any], Any], model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._run = run

    def forward(self, inputs: Any) -> Any:
        """Run it."""
        return self._run(self.model, inputs)


# --- What modules hold, taken down and put back: attributes such as counters and masks, and what functions cache.

_CONTAINERS = (dict, list, set, collections.OrderedDict, collections.defaultdict, collections.deque)


class SavedAttributes:
    """Of modules, what their attributes were; plain containers in them are followed, however deep."""

    def __init__(self) -> None:
        self._contents: dict[int, tuple[Any, Any]] = {}  # by identity; holding the containers keeps that theirs

    def note(self, module: nn.Module) -> None:
        """Take down a module's own attributes, parameters, buffers and hooks; not what its tensors hold."""
        self._note(vars(module))

    def put_back(self) -> None:
        """Give every container what it held; those that still do are left alone."""
        for container, content in self._contents.values():
            if _items(container) != _items(content):
                container.clear()
                (container.extend if isinstance(container, list | collections.deque) else container.update)(content)

    def _note(self, value: Any) -> None:
        if type(value) not in _CONTAINERS or id(value) in self._contents:
            return
        self._contents[id(value)] = (value, copy.copy(value))
        for each in value.values() if isinstance(value, dict) else value:
            self._note(each)


def _items(container: Any) -> list[tuple[int, int]]:
    """By identity: tensors have no one truth."""
    pairs = container.items() if isinstance(container, dict) else ((each, None) for each in container)
    return [(id(key), id(value)) for key, value in pairs]


@contextlib.contextmanager
def forgotten_results(model: nn.Module) -> Iterator[None]:
    """Clear the caches of functions (``functools.lru_cache``, ``cache``) that take anything up in the block.

    Args:
        model: Functions are sought in its classes, in the files of these, and in the program that runs.
    """
    caches = _caches(model)
    misses = [each.cache_info().misses for each in caches]
    try:
        yield
    finally:
        for cache, before in zip(caches, misses, strict=True):
            if cache.cache_info().misses != before:
                cache.cache_clear()


def _caches(model: nn.Module) -> list[functools._lru_cache_wrapper[Any]]:
    classes = {parent for module in model.modules() for parent in type(module).__mro__}
    own = {each for each in classes if not f"{each.__module__}.".startswith(("torch.", "builtins."))}
    files = [sys.modules.get(name) for name in {"__main__", *(each.__module__ for each in own)}]
    places = [dict(vars(each)) for each in (*own, *files) if each is not None]
    found = (value for place in places for value in place.values() if isinstance(value, functools._lru_cache_wrapper))
    return list(dict.fromkeys(found))
