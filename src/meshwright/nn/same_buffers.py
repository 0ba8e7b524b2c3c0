"""Recomputation with the buffers of forward: it sees what forward saw, and leaves no second update behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn


class _Kept(NamedTuple):
    """A buffer and its values at some moment."""

    owner: nn.Module
    name: str
    buffer: torch.Tensor
    values: torch.Tensor
    version: int

    def put_back(self) -> None:
        """Makes it hold these values again, unseen by autograd, which may have saved it for backward."""
        if getattr(self.owner, self.name) is not self.buffer:
            setattr(self.owner, self.name, self.buffer)  # another was assigned meanwhile
        self.buffer.data.copy_(self.values)

    @property
    def has_changed(self) -> bool:
        """Whether it was written or replaced; not seen of what batch normalisation writes, and does not read."""
        return getattr(self.owner, self.name) is not self.buffer or self.buffer._version != self.version


class SameBuffers:
    """Runs a forward of modules again as it ran at first.

    Args:
        modules: Whose buffers their forward may change: running statistics, power iterations, codebooks. Those that
            say ``repeats_alike`` look after their own.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._before: list[_Kept] = []  # what the first forward began with, of buffers that it has changed

    @contextlib.contextmanager
    def first(self) -> Any:
        """Around the first forward."""
        kept = self._buffers()
        yield
        self._before = [each for each in kept if each.has_changed]

    @contextlib.contextmanager
    def again(self) -> Any:
        """Around every other one."""
        now = self._buffers()
        try:
            for each in self._before:
                each.put_back()
            yield
        finally:
            for each in now:
                each.put_back()

    def _buffers(self) -> list[_Kept]:
        return [
            _Kept(owner, name, buffer, buffer.detach().clone(), buffer._version)
            for owner, name, buffer in _buffers_of(self._modules)
        ]


def _buffers_of(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for module in modules:
        for owner in module.modules():
            if not getattr(owner, "repeats_alike", False):
                for name, buffer in owner.named_buffers(recurse=False):
                    yield owner, name, buffer


class _Anew:
    """A context that can be entered several times, as torch does where backward runs twice."""

    def __init__(self, make: Callable[[], Any], inside: Any) -> None:
        self._make, self._inside = make, inside

    def __enter__(self) -> None:
        self._entered = contextlib.ExitStack()
        self._entered.enter_context(self._make())
        self._entered.enter_context(self._inside)

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


def recompute_contexts(
    modules: Sequence[nn.Module], contexts: Callable[[], tuple[Any, Any]] | None = None
) -> dict[str, Any]:
    """What torch's checkpoint is told to run modules again with the same buffers; nothing new if they have none.

    Args:
        modules: What is recomputed together.
        contexts: Other contexts, of forward and of recomputation.
    """
    if torch.compiler.is_compiling() or next(_buffers_of(modules), None) is None:
        return {} if contexts is None else {"context_fn": contexts}

    def with_buffers() -> tuple[Any, Any]:
        same = SameBuffers(modules)
        forward, again = contexts() if contexts is not None else (contextlib.nullcontext(), contextlib.nullcontext())
        return _Anew(same.first, forward), _Anew(same.again, again)

    return {"context_fn": with_buffers}
