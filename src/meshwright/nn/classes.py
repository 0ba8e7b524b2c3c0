"""Module classes by name: how strategies name them, and how a name finds its modules in a model.

A strategy is data: it holds ``"package.module.Class"``, never the class, so reading one imports and runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from torch import nn

from meshwright.cost.names import names_class
from meshwright.errors import ModelError, did_you_mean, join_names

M = TypeVar("M", bound=nn.Module)
_subclasses: dict[tuple[type, type], Any] = {}


def class_name(cls: type) -> str:
    """The qualified name under which a strategy stores a class: ``"package.module.Class"``."""
    return f"{cls.__module__}.{cls.__qualname__}"


def subclass_like(cls: type[nn.Module], mixin: type[M]) -> type[M]:
    """A class with the name of ``cls`` that derives from ``mixin`` first and from ``cls`` second; one per pair."""
    if (cls, mixin) not in _subclasses:
        named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        _subclasses[cls, mixin] = type(cls.__name__, (mixin, cls), named)
    return _subclasses[cls, mixin]


def class_names(module: nn.Module) -> list[str]:
    """Qualified names of a module's class and of every nn.Module class it derives from, most derived first."""
    return [class_name(cls) for cls in type(module).__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module]


def modules_of(model: nn.Module, references: Sequence[str], *, method: str) -> list[tuple[str, nn.Module]]:
    """Finds the modules of the named classes, outermost first in the model's order.

    Args:
        model: Where to look; the model itself is not a candidate.
        references: Class names, bare (``"GPT2Block"``) or qualified.
        method: The method that asks, for the error.

    Returns:
        ``(path, module)`` pairs.

    Raises:
        ModelError: When a class names no module of the model.
    """
    candidates = [(path, module, class_names(module)) for path, module in model.named_modules() if path]
    for reference in references:
        if not any(names_class(reference, names) for _, _, names in candidates):
            present = sorted({names[0].rsplit(".", 1)[-1] for _, _, names in candidates if names})
            bare = reference.rsplit(".", 1)[-1]
            raise ModelError(
                f"{method}: no module of class {reference!r} is in the model{did_you_mean(bare, present)}",
                expected=f"classes of its modules: {join_names(present)}",
                got=repr(reference),
                fix="name a class from this list, or leave the classes out to use the model's repeated blocks",
            )
    return [
        (path, module)
        for path, module, names in candidates
        if any(names_class(reference, names) for reference in references)
    ]


def outermost(found: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Leaves out modules that lie inside another of the found ones."""
    last = None
    for path, module in sorted(found, key=lambda entry: entry[0].split(".")):
        if last is None or not path.startswith(last + "."):
            last = path
            yield path, module
