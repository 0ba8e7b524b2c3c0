"""Recomputation with the buffers of forward: it sees what forward saw, and leaves no second update behind.

What forward changes in place it must be given again as it was: so its buffers are copied beforehand. Large ones that a
forward has left alone (masks, tables of positions) are not copied any more; should one be written later, that is seen.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.runtime.torch_internals.modules import buffers_of
from meshwright.runtime.torch_internals.optim import foreach_copy_
from meshwright.runtime.torch_internals.tensors import flatten_dense, unflatten_dense, version_of

_LARGE_BYTES = 2**16  # far above the statistics of any normalisation, which change unseen

_left_alone: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, bool], weakref.ref[torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)
"""Large buffers that a forward has not changed, by their names and whether their module was training."""


@dataclass
class _Kept:
    """A buffer and its values at some moment."""

    owner: nn.Module
    name: str
    buffer: torch.Tensor
    version: int
    values: torch.Tensor | None = None  # not kept of what forward leaves alone

    @property
    def key(self) -> tuple[str, bool]:
        return self.name, self.owner.training

    @property
    def is_left_alone(self) -> bool:
        known = _left_alone.get(self.owner, {}).get(self.key)
        return known is not None and known() is self.buffer

    @property
    def was_replaced(self) -> bool:
        return getattr(self.owner, self.name) is not self.buffer

    @property
    def was_written(self) -> bool:
        """Not seen of what batch normalisation writes, and does not read."""
        return version_of(self.buffer) != self.version

    def judge(self) -> None:
        """After a forward: learns whether it leaves a large buffer alone."""
        if self.values is None:
            # Of a module inside another that is recomputed, too, both ask.
            if self.was_written and _left_alone[self.owner].pop(self.key, None) is not None:
                warnings.warn(
                    f"{type(self.owner).__name__}.{self.name} is changed in place for the first time by a forward that "
                    "is recomputed: its recomputation sees the new values this once, and the old ones from now on.",
                    stacklevel=2,
                )
            return
        is_large = _is_plain(self.buffer) and not _is_small(self.buffer)
        # Values, too: what is written through .data has the same version.
        if is_large and not self.was_written and torch.equal(self.buffer, self.values):
            _left_alone.setdefault(self.owner, {})[self.key] = weakref.ref(self.buffer)


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
        self._before = [each for each in kept if each.was_replaced or each.was_written]
        for each in kept:
            each.judge()

    @contextlib.contextmanager
    def again(self) -> Any:
        """Around every other one."""
        now = self._buffers()
        try:
            _put_back(self._before)
            yield
        finally:
            _put_back(now)

    def _buffers(self) -> list[_Kept]:
        every = [_Kept(owner, name, buffer, version_of(buffer)) for owner, name, buffer in _buffers_of(self._modules)]
        packed: dict[tuple[torch.device, torch.dtype], list[_Kept]] = defaultdict(list)
        for each in every:
            if _is_small(each.buffer):
                packed[each.buffer.device, each.buffer.dtype].append(each)
            elif not each.is_left_alone:
                each.values = each.buffer.detach().clone()
        for group in packed.values():
            _copy_together(group)
        return every


def _is_plain(buffer: torch.Tensor) -> bool:
    return type(buffer) is torch.Tensor and buffer.layout == torch.strided and not buffer.is_meta


def _is_small(buffer: torch.Tensor) -> bool:
    return _is_plain(buffer) and buffer.is_contiguous() and buffer.nbytes < _LARGE_BYTES


def _copy_together(group: list[_Kept]) -> None:
    """Small ones by one kernel."""
    buffers = [each.buffer.detach() for each in group]
    if len(buffers) == 1:  # would be a view of it
        group[0].values = buffers[0].clone()
        return
    values = unflatten_dense(flatten_dense(buffers), buffers)
    for each, own in zip(group, values, strict=True):
        each.values = own


def _put_back(kept: list[_Kept]) -> None:
    """Make buffers hold these values again, unseen by autograd, which may have saved them for backward."""
    together: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for each in kept:
        if each.was_replaced:
            setattr(each.owner, each.name, each.buffer)
        if each.values is not None and not _is_plain(each.buffer):
            each.buffer.data.copy_(each.values)
        elif each.values is not None:
            buffers, values = together.setdefault((each.buffer.device, each.buffer.dtype), ([], []))
            buffers.append(each.buffer.data)
            values.append(each.values)
    for buffers, values in together.values():
        foreach_copy_(buffers, values)


def _buffers_of(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for module in modules:
        for owner in module.modules():
            if buffers_of(owner) and not getattr(owner, "repeats_alike", False):
                for name, buffer in buffers_of(owner).items():
                    if buffer is not None:
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
    """Return what torch's checkpoint is told to run modules again with the same buffers; nothing new if they have none.

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
