"""Modules whose forward is compiled: in place, so that names, hooks and ``isinstance`` stay as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from meshwright.nn.forward import class_with

_SHAPES = 8  # torch's own limit: as many versions for shapes and modes
_MARK = "_forward_is_compiled"


def compile_forward(
    modules: Iterable[nn.Module], context: Callable[[], contextlib.AbstractContextManager[Any]], **options: Any
) -> None:
    """Compiles the forwards of modules; those of one class are compiled once, and share the code.

    ``nn.Module.compile`` would compile what calls forward too, with every hook: those of FSDP2, and of whoever looks
    at the model while it trains. Here hooks of a compiled module run outside the compiled code; hooks of modules inside
    it are compiled with it.

    Args:
        modules: Not inside each other.
        context: Makes a context that is entered around every call: torch compiles in the first ones.
        options: Of ``torch.compile``.
    """
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    listed = list(modules)
    # Other methods give blocks classes and hooks of their own; torch gives up on code that it compiles more often.
    limit = max(torch._dynamo.config.recompile_limit, len(listed) + _SHAPES)
    torch._dynamo.config.recompile_limit = limit
    for module in listed:
        cls = type(module)
        if cls not in classes:
            classes[cls] = _compiled_class(cls, context, options)
        module.__class__ = classes[cls]


def _compiled_class(
    cls: type[nn.Module], context: Callable[[], contextlib.AbstractContextManager[Any]], options: dict[str, Any]
) -> type[nn.Module]:
    compiled = torch.compile(cls.forward, **options)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with context():
            return compiled(self, *args, **kwargs)

    subclass = class_with(cls, "forward", forward)
    setattr(subclass, _MARK, True)
    return subclass


def is_compiled(module: nn.Module) -> bool:
    """Whether the module's forward is compiled."""
    return getattr(type(module), _MARK, False)


def outside_compiled(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model without what is inside compiled ones: no hook can be put there any more."""
    inside = {id(m) for each in model.modules() if is_compiled(each) for m in each.modules() if m is not each}
    return (module for module in model.modules() if id(module) not in inside)
