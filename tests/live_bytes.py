"""How many bytes of tensors a piece of code holds at most, counted after every operation of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered; ``peak`` may be set back to 0 to ask for what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}
        self.known: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on local tensors come by next
        inputs = {StorageWeakRef(t.untyped_storage()).cdata for t in tree_leaves((args, kwargs or {})) if _counts(t)}
        self.known |= inputs - self.storages.keys()  # held by the caller before
        result = func(*args, **(kwargs or {}))
        for tensor in filter(_counts, tree_leaves(result)):
            reference = StorageWeakRef(tensor.untyped_storage())
            if reference.cdata not in self.known:
                self.storages[reference.cdata] = reference
        self.peak = max(self.peak, self._held())
        return result

    def _held(self) -> int:
        held = 0
        for key, reference in list(self.storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self.storages[key]
            else:
                held += storage.nbytes()  # FSDP2 frees storages by shrinking them
        return held


def _counts(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.device.type != "meta"


def peak_bytes(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Runs ``function`` and returns (its result, most bytes held at any moment in tensors that it made)."""
    with LiveBytes() as count:
        result = function(*args)
    return result, count.peak
