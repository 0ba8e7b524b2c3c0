"""Change a model so that it can be changed back, for planning and for traces."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
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
    """One reversible change."""

    def make(self, model: nn.Module) -> None:
        """Make it."""

    def undo(self, model: nn.Module) -> None:
        """Take it back."""


@dataclass
class SetAttribute:
    """Another value of an attribute, of a config for one."""

    owner: Any
    name: str
    new: Any
    _old: Any = None

    def make(self, model: nn.Module) -> None:
        """Set it."""
        self._old = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self.new)

    def undo(self, model: nn.Module) -> None:
        """Set what was there."""
        setattr(self.owner, self.name, self._old)


@dataclass
class NewForward:
    """Another forward of a module that stays: its weights, hooks, name and ``isinstance`` are what they were.

    Modules of one class that get one function share a class.
    """

    module: nn.Module
    forward: Callable[..., Any]  # forward(module, …)
    _old: type[nn.Module] | None = None

    def make(self, model: nn.Module) -> None:
        """Give the module the class with that forward."""
        self._old = type(self.module)
        key = (self._old, self.forward)
        if key not in _classes:
            _classes[key] = class_with(self._old, "forward", self.forward)
        self.module.__class__ = _classes[key]

    def undo(self, model: nn.Module) -> None:
        """Give it its own class back."""
        assert self._old is not None
        self.module.__class__ = self._old


@dataclass
class Swap:
    """Other modules in the places of some; a module that stands in several places is exchanged in all of them."""

    new_of: dict[nn.Module, nn.Module]

    def make(self, model: nn.Module) -> None:
        """Put the new ones in, on the device where the old ones are by now."""
        for old, new in self.new_of.items():
            new.to(device_of(old))
        _exchange(model, self.new_of)

    def undo(self, model: nn.Module) -> None:
        """Put the old ones back."""
        _exchange(model, {new: old for old, new in self.new_of.items()})


def device_of(module: nn.Module) -> torch.device:
    """Return where a module's first tensor lies; the CPU for a module that has none."""
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def _exchange(model: nn.Module, other: dict[nn.Module, nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in list(children_of(parent).items()):
            # Not inside the new one: it may hold the one that it replaces.
            if child in other and parent is not other[child]:
                children_of(parent)[name] = other[child]


@dataclass
class Replacement:
    """Everything that is replaced in one model.

    Attributes:
        done: What was replaced, with counts; one phrase each.
        left: What was not, and why; one phrase each.
    """

    changes: list[Change] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def add(self, phrase: str, changes: Iterable[Change]) -> None:
        """Add changes of one kind; none adds nothing."""
        listed = list(changes)
        if listed:
            self.changes += listed
            self.done.append(phrase)

    def put_in(self, model: nn.Module) -> None:
        """Make all changes."""
        for change in self.changes:
            change.make(model)

    def take_out(self, model: nn.Module) -> None:
        """Take all changes back."""
        for change in reversed(self.changes):
            change.undo(model)

    @contextlib.contextmanager
    def tried(self, model: nn.Module) -> Iterator[None]:
        """The model with all changes inside the block, and as it was after it."""
        self.put_in(model)
        try:
            yield
        finally:
            self.take_out(model)

    def __str__(self) -> str:
        left = f" ({'; '.join(self.left)})" if self.left else ""
        return ("; ".join(self.done) or "nothing was replaced") + left


# --- What transformers must be told where its models run on tensors without data.


@contextlib.contextmanager
def one_sequence_per_sample() -> Iterator[None]:
    """Let transformers see that samples are not packed, which it cannot read from position ids without values.

    It would make a mask over all pairs of tokens, as it does not in training, and much would be predicted for it.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(masks, "find_packed_sequence_indices", None)
    if original is None:
        yield
        return

    def find(position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return None if isinstance(position_ids, FakeTensor) else original(position_ids, *args, **kwargs)

    with mock.patch.object(masks, "find_packed_sequence_indices", find):
        yield


@contextlib.contextmanager
def without_grouped_kernels() -> Iterator[None]:
    """Let transformers' experts run on tensors without data in any precision: the kernel they call takes bf16 only.

    What they save for backward is the same without it.
    """
    transformers = sys.modules.get("transformers.integrations.moe")
    if transformers is None or not hasattr(transformers, "_can_use_grouped_mm"):
        yield
        return
    with mock.patch.object(transformers, "_can_use_grouped_mm", return_value=False):
        yield
