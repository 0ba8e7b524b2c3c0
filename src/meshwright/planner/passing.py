"""What a piece of code runs, and holds for a moment: the tensors that it made and that live at once, at their most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.planner.saved import storage_of


class Form(NamedTuple):
    """Of a tensor that is held."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class PassingTensors(TorchDispatchMode):
    """Follows what operators make while it is entered.

    Args:
        before: Tensors that are there already; where one of them is let go, what takes its place is not counted.
    """

    def __init__(self, before: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.most: tuple[Form, ...] = ()
        self.operators = (
            0  # that are kernels on a device: neither views nor of scalars alone, such as counters of steps
        )
        self._live: dict[int, tuple[StorageWeakRef, Form, bool]] = {}  # by storage; True: made since
        for tensor in before:
            self._add(tensor, made=False)
        self._let_go: Counter[Form] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_of(tensor)[0] for tensor in _tensors((args, kwargs))}
        self.operators += not func.is_view and any(tensor.dim() for tensor in _tensors((args, kwargs, result)))
        self._forget()
        for tensor in _tensors(result):
            key = storage_of(tensor)[0]
            if key not in self._live and key not in given:
                self._add(tensor, made=True)
        held = Counter(form for _, form, made in self._live.values() if made) - self._let_go
        if sum(form.num_bytes for form in held.elements()) > sum(form.num_bytes for form in self.most):
            self.most = tuple(held.elements())
        return result

    def _add(self, tensor: torch.Tensor, *, made: bool) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._live[storage_of(tensor)[0]] = reference, Form(tuple(tensor.shape), tensor.dtype), made

    def _forget(self) -> None:
        for key, (reference, form, made) in list(self._live.items()):
            if reference.expired():
                del self._live[key]
                self._let_go.update(() if made else (form,))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
