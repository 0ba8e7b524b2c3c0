"""Logits that are not there yet, for code that knows nothing of it.

What leads from logits to their cross entropy (slices of positions, views that keep the classes last, casts) is done on
what the logits are made of, and the cross entropy itself is computed without them. Anything else sees the whole logits,
which are made when they are first needed.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from meshwright.errors import ModelError

_T: Any = torch.Tensor
_OF_THE_WHOLE = {
    _T.shape.__get__, _T.dtype.__get__, _T.device.__get__, _T.ndim.__get__, _T.layout.__get__, _T.is_cuda.__get__,
    _T.is_sparse.__get__, _T.requires_grad.__get__, _T.grad_fn.__get__, _T.is_leaf.__get__, _T.dim, _T.size, _T.numel,
    _T.is_floating_point, _T.is_complex, _T.element_size, _T.get_device, _T.__len__, torch.is_floating_point,
    torch.is_complex, torch.numel, _T._base.__get__, _T._version.__get__, _T._is_view, _T.is_meta.__get__,
}  # fmt: skip
"""What is answered without any logits: also what FSDP2 asks of the outputs of a module."""

_OF_THE_PART = {_T.register_hook, _T.untyped_storage}
"""What is about the part of the graph or of memory that there is."""


class LazyLogits(torch.Tensor):
    """A tensor of logits (…, C) that is made of a ``part`` (…, d) with the same positions.

    Once made, it is the whole to everything, so changes in place are kept. A subclass says how the whole is made
    (:meth:`make_whole`), what the part of other positions is (:meth:`with_part`), which functions of every logit leave
    it a part (:meth:`elementwise`), and computes the cross entropy.
    """

    part: Tensor
    whole: Tensor | None

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """C."""

    @abstractmethod
    def make_whole(self) -> Tensor:
        """The whole logits (…, C), differentiable."""

    @abstractmethod
    def with_part(self, part: Tensor) -> Self:
        """The logits of other positions."""

    @abstractmethod
    def elementwise(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Self | None:
        """The result of a function of every logit by itself; None where ``func`` is none, or needs the whole."""

    @abstractmethod
    def cross_entropy(
        self, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
    ) -> Tensor:
        """The cross entropy of rows (N, C), in at least fp32."""

    def materialised(self) -> Tensor:
        """The whole logits (…, C), made once."""
        if self.whole is None:
            with torch.enable_grad():  # it is kept for whoever comes later
                self.whole = self.make_whole()
        return self.whole

    @property
    def are_rows(self) -> bool:
        """Whether there is one row of logits per target (N, C), not yet made."""
        return self.whole is None and self.part.dim() == 2

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Answers from the part where that is possible, else from the whole."""
        kwargs = kwargs or {}
        if func in _OF_THE_WHOLE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, cls) and func in _OF_THE_PART:
            return func(first.part if first.whole is None else first.whole, *args[1:], **kwargs)
        # Without gradients, inside a function with a backward of its own, a part would be taken for the whole.
        if isinstance(first, cls) and first.whole is None and torch.is_grad_enabled():
            done, result = first._of_part(func, args[1:], kwargs)
            if done:
                return result
        args, kwargs = tree_map(lambda leaf: leaf.materialised() if isinstance(leaf, cls) else leaf, (args, kwargs))
        return func(*args, **kwargs)

    def _of_part(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """The result computed without the whole; False when that cannot be."""
        if func is F.cross_entropy:
            return self._cross_entropy(*args, **kwargs)
        alike = self.elementwise(func, args, kwargs)
        if alike is not None:
            return True, alike
        if (func is _T.__getitem__ and self._is_of_positions(args[0])) or (
            func in (_T.flatten, torch.flatten) and self._is_above_classes(*args, **kwargs)
        ):
            return True, self.with_part(func(self.part, *args, **kwargs))
        if func in (_T.view, _T.reshape, torch.reshape) and not kwargs:
            shape = self._viewed(args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
            if shape is not None:
                return True, self.with_part(self.part.reshape(shape))
        return False, None

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> tuple[bool, Any]:
        if not self.are_rows or target.is_floating_point() or size_average is not None or reduce is not None:
            return False, None
        loss = self.cross_entropy(target, weight, ignore_index, reduction, label_smoothing)
        # As torch's: of the type of the logits, which autocast would take to fp32 first.
        return True, loss if torch.is_autocast_enabled(self.part.device.type) else loss.to(self.dtype)

    def _is_of_positions(self, index: Any) -> bool:
        """Whether an index chooses positions and leaves the classes as they are."""
        entries = list(index) if isinstance(index, tuple) else [index]
        if any(
            isinstance(entry, list) or (isinstance(entry, Tensor) and entry.dtype == torch.uint8) for entry in entries
        ):
            return False
        if any(entry is Ellipsis for entry in entries):
            return _is_everything(entries[-1]) or entries[-1] is Ellipsis
        taken = sum(entry.dim() if _is_mask(entry) else entry is not None for entry in entries)
        return taken < self.part.dim() or (taken == self.part.dim() and _is_everything(entries[-1]))

    def _is_above_classes(self, start_dim: int = 0, end_dim: int = -1) -> bool:
        return end_dim % max(self.part.dim(), 1) < self.part.dim() - 1

    def _viewed(self, shape: Any) -> tuple[int, ...] | None:
        """A view's shape for the part; None where it does not keep the classes last."""
        if isinstance(shape, torch.dtype) or not all(isinstance(size, int) for size in shape) or not shape:
            return None
        rows = math.prod(self.part.shape[:-1])
        last = self.num_classes if shape[-1] == -1 and math.prod(shape[:-1]) == rows else shape[-1]
        return (*shape[:-1], self.part.shape[-1]) if last == self.num_classes else None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """For extensions, which torch does not show to subclasses before: they see the whole."""
        if func._schema.is_mutable:
            raise ModelError(
                "An extension wants to change logits in place that have not been made",
                expected="torch operations, or functions that return something new",
                got=str(func),
                fix="pass it logits.materialised()",
            )

        def whole(leaf: Any) -> Any:
            return leaf.make_whole().detach() if isinstance(leaf, cls) else leaf

        args, kwargs = tree_map(whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def _is_everything(entry: Any) -> bool:
    return isinstance(entry, slice) and entry == slice(None)


def _is_mask(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.dtype == torch.bool
