"""Weights that are loaded into a model reach what its optimizer keeps of them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.optim.master import MASTER, MasterWeights, take_over
from meshwright.optim.wrapped import inner_optimizer, is_outer
from meshwright.optim.wrappers import guard_of

# Beside the modules and not in them: these may be copied and pickled, and must not keep an optimizer alive.
_OPTIMIZERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Optimizer]] = weakref.WeakKeyDictionary()
_is_restoring = False


def follow_loads(model: nn.Module, optimizer: Optimizer) -> None:
    """From now on ``load_state_dict`` of the model, or of a module in it, also changes the optimizer's copies.

    Without that the next step would write the weights from before over the loaded ones: fp32 masters, copies on the
    host and global weights of replicas are what an update starts from.

    Args:
        model: As all methods have left it.
        optimizer: Over its parameters, with all wrappers; is not kept alive.
    """
    if not _may_keep_copies(optimizer):
        return
    for module in model.modules():
        if module not in _OPTIMIZERS:
            module.register_load_state_dict_post_hook(_refresh)
        _OPTIMIZERS[module] = weakref.ref(optimizer)


def weights_were_loaded(model: nn.Module) -> None:
    """Tells the optimizer that follows a model, if there is one, of weights that were put in place some other way."""
    for module in model.modules():
        _refresh(module)


def masters_of(model: nn.Module) -> MasterWeights | None:
    """The fp32 masters that the optimizer of an accelerated model updates; None where it updates the parameters."""
    known = next((_OPTIMIZERS[module] for module in model.modules() if module in _OPTIMIZERS), None)
    guard = guard_of(known()) if known is not None else None
    masters = guard.master if guard is not None else None
    if masters is not None:
        masters.take_changes()  # loading a part of the weights must not undo what was written to the others
    return masters


@contextlib.contextmanager
def restoring() -> Iterator[None]:
    """Inside, loading weights changes no copies: they are loaded themselves."""
    global _is_restoring
    before, _is_restoring = _is_restoring, True
    try:
        yield
    finally:
        _is_restoring = before


def _may_keep_copies(optimizer: Optimizer) -> bool:
    guard = guard_of(optimizer)
    masters = guard is not None and guard.master is not None
    # Ours make masters in their first step; torch's update the parameters themselves.
    ours = not type(inner_optimizer(optimizer)).__module__.startswith("torch.optim.")
    return is_outer(optimizer) or masters or ours


def _refresh(module: nn.Module, _: Any = None) -> None:
    """A module's own parameters; the hook is called for each of its submodules, too."""
    known = _OPTIMIZERS.get(module)
    optimizer = known() if known is not None else None
    if optimizer is not None and not _is_restoring:
        _take_over(list(module.parameters(recurse=False)), optimizer)


def _take_over(parameters: Sequence[torch.Tensor], optimizer: Optimizer) -> None:
    guard, states = guard_of(optimizer), inner_optimizer(optimizer).state
    for parameter in parameters:
        copies = [guard.master.of.get(parameter)] if guard is not None and guard.master is not None else []
        for copy in (*copies, states.get(parameter, {}).get(MASTER)):
            if isinstance(copy, torch.Tensor):
                take_over(copy, parameter)
    if is_outer(optimizer) and any(parameter.requires_grad for parameter in parameters):
        optimizer.synchronizer.weights_were_loaded()
