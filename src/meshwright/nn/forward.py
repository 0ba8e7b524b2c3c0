"""Changing what a module's forward does, without a wrapper module: parameter names stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

Around = Callable[..., Any]
"""Called as ``around(forward, *args, **kwargs)`` in place of ``forward(*args, **kwargs)``."""


def wrap_method(module: nn.Module, name: str, around: Around) -> None:
    """Puts ``around`` about one method of one module, for example its ``forward``.

    The module's class becomes a subclass of what it was (as FSDP2 does), so ``isinstance``, deep copies, parameter
    names and state dicts are those of the plain module; wrapping twice nests.
    """
    cls = type(module)
    original = getattr(cls, name)

    @functools.wraps(original)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(original, self), *args, **kwargs)

    subclass = type(
        cls.__name__, (cls,), {name: wrapped, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )
    module.__class__ = subclass
