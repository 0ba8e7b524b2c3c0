"""Running a module's forward under torch's checkpoint, which runs it again in backward (Chen et al. 2016)."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from meshwright.errors import ModelError
from meshwright.methods.recompute.operators import keeping, selective_contexts
from meshwright.nn import (
    SameBuffers,
    carried,
    is_cache,
    is_compiled,
    outside_compiled,
    recompute_contexts,
    wrap_methods,
)

# Offloading takes what autograd saves, and kept results are no part of it; torch 2.15 asks what is meant.
_RESPECT = "respect_saved_tensors_hooks"
_AS_EVER: dict[str, Any] = {_RESPECT: False} if _RESPECT in inspect.signature(torch_checkpoint).parameters else {}

_KEEPING: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that keep results of operators


def recompute(modules: Sequence[nn.Module], kept: frozenset[str], *, no_reentrant: bool) -> None:
    """Makes modules run their forward again in backward; parameter names stay as they are.

    Args:
        modules: Whose forward is wrapped.
        kept: Operators whose results are kept instead; only without reentrant autograd.
        no_reentrant: False uses torch's reentrant implementation.
    """
    if not no_reentrant:
        wrap_methods(modules, "forward", _reentrant)
    elif kept:
        _KEEPING.update(modules)
        wrap_methods(modules, "forward", functools.partial(_selective, kept))
    else:
        wrap_methods(modules, "forward", _whole)


def keeps_results(model: nn.Module) -> bool:
    """Whether a module of the model keeps results of operators beside what autograd saves; compiled ones save them."""
    return any(module in _KEEPING and not is_compiled(module) for module in outside_compiled(model))


def _owner(forward: Callable[..., Any]) -> nn.Module:
    """The module whose forward this is: ``wrap_methods`` hands on the method with its module as first argument."""
    module: nn.Module = forward.args[0]  # type: ignore[attr-defined]
    return module


def _refuse_caches(args: Iterable[Any]) -> None:
    cache = next((value for value in args if is_cache(value)), None)
    if cache is not None:
        raise ModelError(
            "checkpoint: a block is called with a cache of keys and values, which recomputing would fill a second time",
            expected="training without past_key_values",
            got=type(cache).__name__,
            fix="leave checkpoint out; prefix tuning cannot do without its cache, LoRA and prompt tuning need none",
        )


def _whole(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    _refuse_caches((*args, *kwargs.values()))
    return torch_checkpoint(
        carried(forward), *args, use_reentrant=False, **recompute_contexts([_owner(forward)]), **kwargs
    )


def _selective(kept: frozenset[str], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    _refuse_caches((*args, *kwargs.values()))
    contexts = recompute_contexts([_owner(forward)], functools.partial(selective_contexts, kept))
    with keeping(kept):
        return torch_checkpoint(carried(forward), *args, use_reentrant=False, **_AS_EVER, **contexts, **kwargs)


def _reentrant(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    _refuse_caches((*args, *kwargs.values()))
    # It takes positional arguments only, and only those get gradients.
    names, count, same, forward = list(kwargs), len(args), SameBuffers([_owner(forward)]), carried(forward)

    def positional(*every: Any) -> Any:
        # The first time it runs without gradients.
        with same.again() if torch.is_grad_enabled() else same.first():
            return forward(*every[:count], **dict(zip(names, every[count:], strict=True)))

    return torch_checkpoint(positional, *args, *kwargs.values(), use_reentrant=True)
