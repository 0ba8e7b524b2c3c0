"""Let a recomputation repeat what forward did: with the buffers that it saw, and with scripted functions as they ran.

Forward may change buffers in place (running statistics, say), and its recomputation must start from the old values. So
buffers are copied before forward. Large ones that a forward has not changed (masks, tables of positions) are not copied
any more; if one is written after all, its version shows it, and it is copied from then on.
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

from meshwright.errors import join_names
from meshwright.runtime.torch_internals.autograd import (
    StopRecomputation,
    current_saved_tensors_hooks,
    set_script_profiling,
)
from meshwright.runtime.torch_internals.modules import buffers_of, non_persistent_of
from meshwright.runtime.torch_internals.optim import foreach_copy_
from meshwright.runtime.torch_internals.tensors import flatten_dense, unflatten_dense, version_of

# Smaller buffers are always copied: batch normalisation writes its statistics without a new version.
_LARGE_BYTES = 2**16

_unchanged: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, bool], weakref.ref[torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)
"""Large buffers that a forward has not changed, by name and by whether their module was training."""

_changed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules with buffers of their own that a forward has changed which is recomputed."""


@dataclass
class _SavedBuffer:
    """A buffer, and a copy of its values."""

    owner: nn.Module
    name: str
    buffer: torch.Tensor
    version: int
    values: torch.Tensor | None = None  # None for a buffer known not to change

    @property
    def key(self) -> tuple[str, bool]:
        return self.name, self.owner.training

    @property
    def is_unchanged(self) -> bool:
        known = _unchanged.get(self.owner, {}).get(self.key)
        return known is not None and known() is self.buffer

    @property
    def was_replaced(self) -> bool:
        return getattr(self.owner, self.name) is not self.buffer

    @property
    def was_written(self) -> bool:
        return version_of(self.buffer) != self.version

    def learn(self) -> None:
        """Remember, after a forward, whether it has changed a large buffer."""
        if self.values is None:
            # Popped once: a module and one inside it may both be recomputed, and both come here.
            if self.was_written and _unchanged[self.owner].pop(self.key, None) is not None:
                warnings.warn(
                    f"{type(self.owner).__name__}.{self.name} is changed in place for the first time by a forward that "
                    "is recomputed: its recomputation sees the new values this once, and the old ones from now on.",
                    stacklevel=2,
                )
            return
        is_large = _is_plain(self.buffer) and not _is_small(self.buffer)
        # Compare values, too: writing through .data leaves the version as it is.
        if is_large and not self.was_written and torch.equal(self.buffer, self.values):
            _unchanged.setdefault(self.owner, {})[self.key] = weakref.ref(self.buffer)


class SameBuffers:
    """Contexts in which a forward of modules, and every repetition of it, see the same buffers.

    Args:
        modules: Modules whose forward may change buffers: running statistics, power iterations, codebooks. Those with a
            true ``repeats_alike`` are left out: they take care of their own.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._before: list[_SavedBuffer] = []  # buffers that the first forward has changed, as they were before

    @contextlib.contextmanager
    def first(self) -> Any:
        """Save buffers around the first forward."""
        saved = self._save()
        yield
        self._before = [each for each in saved if each.was_replaced or each.was_written]
        _changed.update(each.owner for each in self._before)
        for each in saved:
            each.learn()

    @contextlib.contextmanager
    def again(self) -> Any:
        """Give a repetition the buffers of the first forward, and restore the current ones afterwards."""
        now = self._save()
        try:
            _restore(self._before)
            yield
        finally:
            _restore(now)

    def _save(self) -> list[_SavedBuffer]:
        every = [
            _SavedBuffer(owner, name, buffer, version_of(buffer)) for owner, name, buffer in _buffers_of(self._modules)
        ]
        packed: dict[tuple[torch.device, torch.dtype], list[_SavedBuffer]] = defaultdict(list)
        for each in every:
            if _is_small(each.buffer):
                packed[each.buffer.device, each.buffer.dtype].append(each)
            elif not each.is_unchanged:
                each.values = each.buffer.detach().clone()
        for group in packed.values():
            _copy_in_one_kernel(group)
        return every


def _is_plain(buffer: torch.Tensor) -> bool:
    return type(buffer) is torch.Tensor and buffer.layout == torch.strided and not buffer.is_meta


def _is_small(buffer: torch.Tensor) -> bool:
    return _is_plain(buffer) and buffer.is_contiguous() and buffer.nbytes < _LARGE_BYTES


def _copy_in_one_kernel(group: list[_SavedBuffer]) -> None:
    buffers = [each.buffer.detach() for each in group]
    if len(buffers) == 1:  # flattening one makes a view of it
        group[0].values = buffers[0].clone()
        return
    values = unflatten_dense(flatten_dense(buffers), buffers)
    for each, own in zip(group, values, strict=True):
        each.values = own


def _restore(saved: list[_SavedBuffer]) -> None:
    # Through .data: autograd, which may have saved the buffers for backward, must not see the writes.
    by_kind: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for each in saved:
        if each.was_replaced:
            setattr(each.owner, each.name, each.buffer)
        if each.values is not None and not _is_plain(each.buffer):
            each.buffer.data.copy_(each.values)
        elif each.values is not None:
            buffers, values = by_kind.setdefault((each.buffer.device, each.buffer.dtype), ([], []))
            buffers.append(each.buffer.data)
            values.append(each.values)
    for buffers, values in by_kind.values():
        foreach_copy_(buffers, values)


def _buffers_of(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for module in modules:
        for owner in module.modules():
            if buffers_of(owner) and not getattr(owner, "repeats_alike", False):
                for name, buffer in buffers_of(owner).items():
                    if buffer is not None:
                        yield owner, name, buffer


class PlainWhereBuffersChange:
    """Says whether the next forward of a recomputed module is to run as it is, and not as it was compiled.

    Compiled code recomputes with the buffers that a forward has left, not with those that it began with. So the first
    forward of a module with buffers that a checkpoint has runs as it is, and all others do if it has changed some.
    """

    def __init__(self) -> None:
        self._is_plain: weakref.WeakKeyDictionary[nn.Module, bool | None] = weakref.WeakKeyDictionary()

    def __call__(self, module: nn.Module) -> bool:
        """Return whether to run the module as it is."""
        if not torch.is_grad_enabled():  # nothing is recomputed
            return False
        if module not in self._is_plain:
            stored = (name not in non_persistent_of(owner) for owner, name, _ in _buffers_of([module]))
            self._is_plain[module] = None if any(stored) else False
        elif self._is_plain[module] is None:
            changed = [type(each).__name__ for each in module.modules() if each in _changed]
            self._is_plain[module] = bool(changed)
            if changed:
                warnings.warn(
                    f"{type(module).__name__} is not compiled: its forward changes buffers (of "
                    f"{join_names(dict.fromkeys(changed))}), and compiled code would recompute with their new values.",
                    stacklevel=2,
                )
        return self._is_plain[module] is not False


# --- Recomputing code that calls TorchScript


def _settle_scripts() -> None:
    """Let scripted functions save the same tensors in all runs from now on.

    TorchScript profiles the first run of a function and optimises later ones, which save other tensors. Switched off
    around recomputed code alone, it would go on between a forward and its recomputation, in calls from other places.
    What is optimised already stays so; other functions run as they are written.
    """
    set_script_profiling(False)


@contextlib.contextmanager
def _stopping_in_scripts() -> Iterator[None]:
    """Let torch stop a recomputation inside of a scripted function, which turns the exception into another one."""
    has_stopped = False
    pack, unpack = current_saved_tensors_hooks(True)

    def note(tensor: torch.Tensor) -> Any:
        nonlocal has_stopped
        try:
            return pack(tensor)
        except StopRecomputation:
            has_stopped = True
            raise

    try:
        with torch.autograd.graph.saved_tensors_hooks(note, unpack):
            yield
    except RuntimeError:
        if not has_stopped:
            raise
        raise StopRecomputation from None


# --- Contexts of torch's checkpoint


class _Reentrant:
    """Contexts that can be entered several times, as torch does if backward runs twice."""

    def __init__(self, *make: Callable[[], Any]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._entered = contextlib.ExitStack()
        for make in self._make:
            self._entered.enter_context(make())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)


def recompute_contexts(
    modules: Sequence[nn.Module], contexts: Callable[[], tuple[Any, Any]] | None = None
) -> dict[str, Any]:
    """Return keyword arguments of torch's ``checkpoint`` that let a recomputation repeat what the forward did.

    Its buffers are those of the forward, and scripted functions save the same tensors.

    Args:
        modules: Modules that are recomputed together.
        contexts: Makes other contexts, of forward and of recomputation.
    """
    if torch.compiler.is_compiling():
        return {} if contexts is None else {"context_fn": contexts}
    _settle_scripts()
    has_buffers = next(_buffers_of(modules), None) is not None

    def every() -> tuple[Any, Any]:
        forward: list[Callable[[], Any]] = []
        again: list[Callable[[], Any]] = [_stopping_in_scripts]
        if has_buffers:
            same = SameBuffers(modules)
            forward.append(same.first)
            again.append(same.again)
        if contexts is not None:
            others = contexts()
            forward.append(lambda: others[0])
            again.append(lambda: others[1])
        return _Reentrant(*forward), _Reentrant(*again)

    return {"context_fn": every}
