"""Modules: base classes for ``isinstance``, dictionaries of members, and hooks that are carried over.

``named_parameters`` and its like walk all submodules and skip what they have seen; the dictionaries are the members of
one module, in order and assignable. They have had their names since the first torch.
"""

import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter, call
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import (
    # All batch norms, lazy and synchronised ones included: no public base class says "batch norm of any dimension".
    _BatchNorm as AnyBatchNorm,
    # Batch and instance norms: their statistics stay in full precision.
    _NormBase as AnyBatchOrInstanceNorm,
)
from torch.nn.modules.loss import _Loss as AnyLoss  # tells losses from models; no public base class

__all__ = [
    "AnyBatchNorm",
    "AnyBatchOrInstanceNorm",
    "AnyLoss",
    "buffers_of",
    "children_of",
    "compiled_call_of",
    "forward_hooks_of",
    "forward_pre_hooks_of",
    "parameters_in",
    "parameters_of",
]

ATTRIBUTES_OF = ("torch.nn.modules.module",)

# The members of one module.
parameters_of = attrgetter("_parameters")
buffers_of = attrgetter("_buffers")
children_of = attrgetter("_modules")
CHILDREN = "_modules"
PARAMETERS = "_parameters"

# Two blocks are one for the planner only if they have as many hooks.
forward_hooks_of = attrgetter("_forward_hooks")
forward_pre_hooks_of = attrgetter("_forward_pre_hooks")

# Set by ``module.compile()``, which cannot be asked otherwise: a pipeline does not cut through a compiled module.
compiled_call_of = attrgetter("_compiled_call_impl")

# --- The parameters of a model, again in every step

# By model: its modules, and the identities of their children, as of the last walk.
_walks: weakref.WeakKeyDictionary[nn.Module, tuple[list[weakref.ref[nn.Module]], list[int]]] = (
    weakref.WeakKeyDictionary()
)


def parameters_in(model: nn.Module) -> list[nn.Parameter]:
    """Return ``list(model.parameters())`` in less than a third of the time, and with a few calls.

    torch composes every module's name. Here modules are walked again only after one was put in, taken out or exchanged,
    which the children of those known tell; and everything that is done for each of them is a loop that runs in C.
    """
    known, identities = _walks.get(model, ([], []))
    modules: list[nn.Module | None] = [*map(call, known)]
    if not modules or None in modules or [*map(id, _members(children_of, modules))] != identities:
        walked = [*model.modules()]
        _walks[model] = [*map(weakref.ref, walked)], [*map(id, _members(children_of, walked))]
        modules = [*walked]
    found = [*_members(parameters_of, modules)]
    each_once = dict(zip(map(id, found), found, strict=True))  # tensors are slow to hash
    each_once.pop(id(None), None)
    return [*each_once.values()]


def _members(kind: Callable[[Any], dict[str, Any]], modules: list[Any]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, map(kind, modules)))
