"""Running a module's forward under torch's checkpoint, which runs it again in backward (Chen et al. 2016)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from meshwright.methods.recompute.operators import keeping, selective_contexts
from meshwright.nn import carried, is_compiled, outside_compiled, wrap_methods

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


def _whole(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return torch_checkpoint(carried(forward), *args, use_reentrant=False, **kwargs)


def _selective(kept: frozenset[str], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    contexts = functools.partial(selective_contexts, kept)
    with keeping(kept):
        return torch_checkpoint(carried(forward), *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _reentrant(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # It takes positional arguments only, and only those get gradients.
    names, count, forward = list(kwargs), len(args), carried(forward)

    def positional(*every: Any) -> Any:
        return forward(*every[:count], **dict(zip(names, every[count:], strict=True)))

    return torch_checkpoint(positional, *args, *kwargs.values(), use_reentrant=True)
