"""How many bytes of tensors a piece of code holds at most, counted after every operation of torch.

What ranks of a host share counts by a rank's part of it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.nn.host_exchange import shared_memory_bytes


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered; ``peak`` may be set back to 0 to ask for what comes next, or to infinity to rest.

    Looking at all storages after every operation would take more time than a step. They are looked at where their sum
    may be above the peak: a bound takes storages for whole that were let go since the last look.

    Args:
        told: Whether ``at_peak`` tells, of every kind of tensor that was held at the peak, how many bytes it took: by
            the operator that made the storage, the first shape, and the backward node or phase it was made in.
    """

    def __init__(self, *, told: bool = False) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}
        self.known: dict[
            int, StorageWeakRef
        ] = {}  # of the caller; as long as they are referred to, no other takes their place
        gc.collect()  # what is over lets go of memory that it shared
        self._shared_before = shared_memory_bytes()
        self.peak: float = 0
        self._sizes: dict[int, int] = {}  # of the storages when they were made
        self._bound = 0  # of those that kept their size at the last look, and of all since
        self._resized: dict[int, StorageWeakRef] = {}  # FSDP2 frees storages by shrinking them, and grows them again
        self.phase = ""  # whatever the caller calls what runs now
        self.moment = ""  # the operator that ran at the peak
        self.at_peak: dict[tuple[str, ...], int] = {}
        self._origins: dict[int, tuple[str, ...]] | None = {} if told else None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on local tensors come by next
        for tensor in filter(_counts, tree_leaves((args, kwargs or {}))):
            reference = StorageWeakRef(tensor.untyped_storage())
            if reference.cdata not in self.storages and reference.cdata not in self.known:
                self.known[reference.cdata] = reference  # held by the caller before
        result = func(*args, **(kwargs or {}))
        for tensor in filter(_counts, tree_leaves(result)):
            reference = StorageWeakRef(tensor.untyped_storage())
            if reference.cdata not in self.known:
                is_new = self.storages.setdefault(reference.cdata, reference) is reference
                if is_new:
                    self._sizes[reference.cdata] = size = tensor.untyped_storage().nbytes()
                    self._bound += size
                if is_new and self._origins is not None:
                    self._origins[reference.cdata] = (str(func), str(tuple(tensor.shape)), self._now())
        if self._at_most() > self.peak and (held := self._held()) > self.peak:
            if self._origins is not None:
                self._tell(f"{func} in {self._now()}")
            self.peak = held
        return result

    def _now(self) -> str:
        node = torch._C._current_autograd_node()
        return f"{self.phase} {node.name() if node is not None else ''}".strip()

    def _tell(self, moment: str) -> None:
        assert self._origins is not None
        self.moment, self.at_peak = moment, {}
        for key, reference in self.storages.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:  # free since it was counted
                continue
            origin = self._origins.get(key, ("", "", ""))
            self.at_peak[origin] = self.at_peak.get(origin, 0) + storage.nbytes()

    def _at_most(self) -> int:
        return shared_memory_bytes() - self._shared_before + self._bound + sum(map(_size, self._resized.values()))

    def _held(self) -> int:
        held = shared_memory_bytes() - self._shared_before
        self._bound = 0
        for key, reference in list(self.storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self.storages[key], self._sizes[key]
                self._resized.pop(key, None)
                continue
            size = storage.nbytes()
            held += size
            if size != self._sizes[key]:
                self._resized[key] = reference
            if key not in self._resized:
                self._bound += size
        return held


def _size(reference: StorageWeakRef) -> int:
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else storage.nbytes()


def _counts(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.device.type != "meta"


def peak_bytes(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Runs ``function`` and returns (its result, most bytes held at any moment in tensors that it made)."""
    with LiveBytes() as count:
        result = function(*args)
    return result, count.peak
