"""Follow weights that are loaded: an optimizer's copies of them (fp32 masters, host copies, global weights)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.optim.guarded_step import guard_of, inner_optimizer, is_outer, may_keep_copies
from meshwright.optim.mixed_precision import MASTER, MasterWeights, take_over

# Beside the modules and not in them: modules may be copied and pickled, and must not keep an optimizer alive.
_OPTIMIZERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Optimizer]] = weakref.WeakKeyDictionary()
_is_restoring = False


def follow_loads(model: nn.Module, optimizer: Optimizer) -> None:
    """Make ``load_state_dict`` of the model, or of a module in it, also change the optimizer's copies of weights.

    Updates start from these copies (fp32 masters, host copies, global weights of replicas): without this, the next step
    would write the old weights over the loaded ones.

    Args:
        model: The model, after all methods were applied.
        optimizer: The model's optimizer, with all its wrappers. It is not kept alive.
    """
    if not may_keep_copies(optimizer):
        return
    for module in model.modules():
        if module not in _OPTIMIZERS:
            module.register_load_state_dict_post_hook(_refresh)
        _OPTIMIZERS[module] = weakref.ref(optimizer)


def weights_were_loaded(model: nn.Module) -> None:
    """Make the optimizer that follows a model, if any, take over weights that were set without ``load_state_dict``."""
    for module in model.modules():
        _refresh(module)


def masters_of(model: nn.Module) -> MasterWeights | None:
    """Return the fp32 masters that an accelerated model's optimizer updates; None if it updates the parameters."""
    known = next((_OPTIMIZERS[module] for module in model.modules() if module in _OPTIMIZERS), None)
    guard = guard_of(known()) if known is not None else None
    masters = guard.master if guard is not None else None
    if masters is not None:
        masters.take_changes()  # loading some of the weights must not undo what was written to the others
    return masters


@contextlib.contextmanager
def restoring() -> Iterator[None]:
    """Let loaded weights leave the optimizer's copies alone inside the block, which loads these as well."""
    global _is_restoring
    before, _is_restoring = _is_restoring, True
    try:
        yield
    finally:
        _is_restoring = before


def _refresh(module: nn.Module, _: Any = None) -> None:
    """Update the copies of a module's own parameters. The hook runs for each of its submodules, too."""
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
