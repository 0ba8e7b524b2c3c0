"""Run modules with other tensors in place of their parameters and buffers, and restore what they held before."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from meshwright.errors import ModelError
from meshwright.nn.batches import map_tree
from meshwright.nn.fake_results import KnownResults
from meshwright.nn.module_structure import part_of_whole
from meshwright.runtime.torch_internals.fake_tensors import FakeTensor, FakeTensorMode, logger
from meshwright.runtime.torch_internals.modules import buffers_of, parameters_of


def call_with(
    module: nn.Module, state: Mapping[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> Any:
    """Call a module with other tensors; afterwards its own tensors and its attributes are as they were.

    ``torch.func.functional_call`` alone visits a shared module once for each of its places, and the second time
    restores the swapped tensors as if they were the module's own.

    Args:
        module: The module to call.
        state: Tensors by the names of ``named_parameters`` and ``named_buffers``; of a shared tensor by its first name.
            Tensors without an entry stay.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    swapped = {
        id(tensor): state[name]
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if name in state
    }
    places = {
        f"{path}.{name}" if path else name: swapped[id(tensor)]
        for path, each in module.named_modules()  # every module once
        for name, tensor in (*parameters_of(each).items(), *buffers_of(each).items())
        if id(tensor) in swapped
    }
    before = SavedAttributes()
    for each in module.modules():
        before.save(each)
    try:
        return torch.func.functional_call(module, places, args, kwargs, tie_weights=False)
    finally:
        before.restore()


def run_with(
    run: Callable[[nn.Module, Any], Any], model: nn.Module, state: Mapping[str, torch.Tensor], inputs: Any
) -> Any:
    """Return ``run(model, inputs)`` with other tensors in the model, as :func:`call_with` swaps them.

    This is for passes over fake tensors. A pass runs on one rank alone, and must leave no trace in training. So every
    other tensor that a module holds, and all tensors of modules outside the model, such as a loss with weights of its
    own, are replaced by fake ones as well, and restored afterwards.

    Raises:
        ModelError: When the pass runs another model that is distributed already, such as a teacher in the loss: it
            would keep what it gathers, fake tensors, or wait for ranks that do not run this pass.
    """
    before, own, seen = SavedAttributes(), set(model.modules()), set[nn.Module]()

    def enter(module: nn.Module, args: Any) -> None:
        if module in seen:
            return
        _check_not_distributed(module)
        seen.add(module)
        if module not in own:
            before.save(module)
        _replace_by_fakes(module)

    hook = register_module_forward_pre_hook(enter)
    try:
        with cleared_function_caches(model):
            return call_with(_Run(run, model), {f"model.{name}": tensor for name, tensor in state.items()}, (inputs,))
    finally:
        hook.remove()
        before.restore()


def _replace_by_fakes(module: nn.Module) -> None:
    # Under a fake tensor mode, ``detach`` makes a fake tensor of a real one.
    places: tuple[dict[str, Any], ...] = (vars(module), parameters_of(module), buffers_of(module))
    for place in places:
        for name, tensor in place.items():
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
                place[name] = tensor.detach().requires_grad_(tensor.requires_grad)


def _check_not_distributed(module: nn.Module) -> None:
    syncs_buffers = isinstance(module, DistributedDataParallel) and module.will_sync_module_buffers()
    if isinstance(module, FSDPModule) or part_of_whole(module) is not None or syncs_buffers:
        raise ModelError(
            "another model runs in it whose ranks need each other, which a pass without data cannot run",
            expected="a model and a loss of plain modules",
            got=type(module).__name__,
            fix="train on: only predictions miss it",
        )


class _Run(nn.Module):
    """A function of a model as a module, whose tensors can be swapped during a call."""

    def __init__(self, run: Callable[[nn.Module, Any], Any], model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._run = run

    def forward(self, inputs: Any) -> Any:
        return self._run(self.model, inputs)


class FakeTensors:
    """Fake tensors for one pass of a model: with shapes, dtypes and devices, but without data.

    Args:
        device: Device of all of them; None keeps each tensor's own.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor like another tensor, which may be on ``meta``."""
        if self._device is not None and tensor.device.type == "meta":
            with self._mode:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        fake: torch.Tensor = self._mode.from_tensor(tensor.detach())
        return fake if self._device is None else fake.to(self._device)

    def like_all(self, tree: Any) -> Any:
        """Return a tree, such as a model's input, with fake tensors in place of its tensors."""
        return map_tree(lambda leaf: self.like(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Create fake tensors only while the pass runs, and show no warnings: training will show them.

        Nor does torch log the operators that fail: what the caller makes of the exception is said once.
        """
        with warnings.catch_warnings(), _without_grouped_kernels(), self._mode, KnownResults():
            warnings.simplefilter("ignore")
            level = logger.level
            logger.setLevel(logging.CRITICAL)
            try:
                yield
            finally:
                logger.setLevel(level)


@contextlib.contextmanager
def _without_grouped_kernels() -> Iterator[None]:
    """Let transformers' experts run on fake tensors in any precision: their grouped kernel takes bf16 only.

    They save the same tensors for backward without it.
    """
    transformers = sys.modules.get("transformers.integrations.moe")
    if transformers is None or not hasattr(transformers, "_can_use_grouped_mm"):
        yield
        return
    # A mock would keep what it is called with.
    with mock.patch.object(transformers, "_can_use_grouped_mm", _never):
        yield


def _never(*_: Any, **__: Any) -> bool:
    return False


# --- State beside tensors: attributes such as counters and masks, and caches of functions.

_CONTAINERS = (dict, list, set, collections.OrderedDict, collections.defaultdict, collections.deque)


class SavedAttributes:
    """Snapshot of modules' attributes; plain containers in them are followed, however deep."""

    def __init__(self) -> None:
        # Containers and copies of them by ``id``, which stays theirs as long as they are referenced here.
        self._contents: dict[int, tuple[Any, Any]] = {}

    def save(self, module: nn.Module) -> None:
        """Save a module's own attributes, parameters, buffers and hooks; not the values of its tensors."""
        self._save(vars(module))

    def restore(self) -> None:
        """Restore the contents of every container that has changed."""
        for container, content in self._contents.values():
            if _items(container) != _items(content):
                container.clear()
                (container.extend if isinstance(container, list | collections.deque) else container.update)(content)

    def _save(self, value: Any) -> None:
        if type(value) not in _CONTAINERS or id(value) in self._contents:
            return
        self._contents[id(value)] = (value, copy.copy(value))
        for each in value.values() if isinstance(value, dict) else value:
            self._save(each)


def _items(container: Any) -> list[tuple[int, int]]:
    # Compare by identity: ``==`` on tensors is elementwise.
    pairs = container.items() if isinstance(container, dict) else ((each, None) for each in container)
    return [(id(key), id(value)) for key, value in pairs]


@contextlib.contextmanager
def cleared_function_caches(model: nn.Module) -> Iterator[None]:
    """Clear, on exit, the caches (``functools.lru_cache``, ``cache``) that have stored anything in the block.

    Args:
        model: Functions are sought in its classes, in the modules that define these, and in ``__main__``.
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
