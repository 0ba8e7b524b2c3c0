"""Change a model reversibly, to plan for the changed model before it is changed for good.

A :class:`Replacement` collects the changes of ``module_replace``. The last part makes transformers models run on fake
tensors.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from unittest import mock

import torch
from torch import nn

from meshwright.nn import class_with
from meshwright.runtime.torch_internals.fake_tensors import FakeTensor
from meshwright.runtime.torch_internals.modules import children_of

_classes: dict[tuple[type[nn.Module], Callable[..., Any]], type[nn.Module]] = {}


class Change(Protocol):
    """A reversible change of a model."""

    def make(self, model: nn.Module) -> None:
        """Make the change."""

    def undo(self, model: nn.Module) -> None:
        """Undo the change."""


@dataclass
class SetAttribute:
    """A change of an attribute, for example of a config."""

    owner: Any
    name: str
    new: Any
    _old: Any = None

    def make(self, model: nn.Module) -> None:
        """Set the new value."""
        self._old = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self.new)

    def undo(self, model: nn.Module) -> None:
        """Set the old value."""
        setattr(self.owner, self.name, self._old)


@dataclass
class NewForward:
    """A change of a module's forward; its weights, hooks, name and ``isinstance`` stay.

    The module gets a subclass. Modules of one class that get the same forward share the subclass.
    """

    module: nn.Module
    forward: Callable[..., Any]  # forward(module, …)
    _old: type[nn.Module] | None = None

    def make(self, model: nn.Module) -> None:
        """Give the module the subclass with the new forward."""
        self._old = type(self.module)
        key = (self._old, self.forward)
        if key not in _classes:
            _classes[key] = class_with(self._old, "forward", self.forward)
        self.module.__class__ = _classes[key]

    def undo(self, model: nn.Module) -> None:
        """Give the module its own class back."""
        assert self._old is not None
        self.module.__class__ = self._old


@dataclass
class Swap:
    """A change of modules for others, in all the places where a module stands."""

    new_of: dict[nn.Module, nn.Module]

    def make(self, model: nn.Module) -> None:
        """Put the new modules in, on the devices of the old ones."""
        for old, new in self.new_of.items():
            new.to(device_of(old))
        _exchange(model, self.new_of)

    def undo(self, model: nn.Module) -> None:
        """Put the old modules back."""
        _exchange(model, {new: old for old, new in self.new_of.items()})


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's first tensor; the CPU for a module without tensors."""
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def _exchange(model: nn.Module, other: dict[nn.Module, nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in list(children_of(parent).items()):
            # Not inside the new module: it may contain the one that it replaces.
            if child in other and parent is not other[child]:
                children_of(parent)[name] = other[child]


@dataclass
class Replacement:
    """The reversible changes of one model, and a report of them.

    Attributes:
        changes: The changes, in order.
        done: Phrases about what is replaced, with counts.
        left: Phrases about what is not replaced, and why.
    """

    changes: list[Change] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def add(self, phrase: str, changes: Iterable[Change]) -> None:
        """Add changes of one kind, if there are any, with their phrase."""
        listed = list(changes)
        if listed:
            self.changes += listed
            self.done.append(phrase)

    def put_in(self, model: nn.Module) -> None:
        """Make all changes."""
        for change in self.changes:
            change.make(model)

    def take_out(self, model: nn.Module) -> None:
        """Undo all changes."""
        for change in reversed(self.changes):
            change.undo(model)

    @contextlib.contextmanager
    def tried(self, model: nn.Module) -> Iterator[None]:
        """Change the model inside the context, and undo it afterwards."""
        self.put_in(model)
        try:
            yield
        finally:
            self.take_out(model)

    def __str__(self) -> str:
        left = f" ({'; '.join(self.left)})" if self.left else ""
        return ("; ".join(self.done) or "nothing was replaced") + left


# --- transformers models on fake tensors


@contextlib.contextmanager
def packed_as(inputs: Any) -> Iterator[None]:
    """Tell transformers whether samples are packed documents, which it cannot read from fake position ids.

    It would always build a mask over all pairs of tokens, which it does in training for packed samples only, and the
    prediction would include it.

    Args:
        inputs: The model input, with values; its ``position_ids`` start again where a document does.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(masks, "find_packed_sequence_indices", None)
    if original is None:
        yield
        return
    packed = _is_packed(inputs, original)

    def find(position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        hides = isinstance(position_ids, FakeTensor) and not packed
        return None if hides else original(position_ids, *args, **kwargs)

    with mock.patch.object(masks, "find_packed_sequence_indices", find):
        yield


def _is_packed(inputs: Any, find: Callable[..., Any]) -> bool:
    ids = inputs.get("position_ids") if isinstance(inputs, Mapping) else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_meta or isinstance(ids, FakeTensor):
        return False
    return find(ids) is not None
