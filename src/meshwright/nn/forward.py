"""Changing what a module's forward does, without a wrapper module: parameter names stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

Around = Callable[..., Any]
"""Called as ``around(forward, *args, **kwargs)`` in place of ``forward(*args, **kwargs)``."""


def class_with(cls: type[nn.Module], name: str, method: Callable[..., Any]) -> type[nn.Module]:
    """A class that differs from ``cls`` in one method: a subclass of the same name, whatever it is asked."""
    return type(cls.__name__, (cls,), {name: method, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


def wrap_method(module: nn.Module, name: str, around: Around) -> None:
    """Puts ``around`` about one method of one module, for example its ``forward``.

    The module's class becomes a subclass of what it was (as FSDP2 does), so ``isinstance``, deep copies, parameter
    names and state dicts are those of the plain module; wrapping twice nests.
    """
    wrap_methods([module], name, around)


def wrap_methods(modules: Iterable[nn.Module], name: str, around: Around) -> None:
    """:func:`wrap_method` for several modules; those of one class still share a class, so what is compiled for one of
    them serves all.
    """
    wrapped: dict[type[nn.Module], type[nn.Module]] = {}
    for module in modules:
        cls = type(module)
        if cls not in wrapped:
            wrapped[cls] = class_with(cls, name, _around(getattr(cls, name), around))
        module.__class__ = wrapped[cls]


def without_fast_path(model: nn.Module) -> None:
    """Lets ``nn.TransformerEncoder`` run its layers by their forwards where gradients are off, too.

    Its fast path reads their weights, and hands on nested tensors.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # what torch asks for that path
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _around(original: Callable[..., Any], around: Around) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(original, self), *args, **kwargs)

    return method
