"""Defer logits until something other than a cross entropy reads them: logits of a head, and logits sharded by class."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.errors import ModelError
from meshwright.loss.linear_head import in_autocast_type, linear_cross_entropy
from meshwright.loss.vocabulary_parallel import Vocabulary, parallel_cross_entropy
from meshwright.runtime.torch_internals.operators import schema_of
from meshwright.runtime.torch_internals.pytree import tree_leaves, tree_map
from meshwright.runtime.torch_internals.tensors import (
    DisableTorchFunctionSubclass,
    base_of,
    is_view,
    make_wrapper,
    version_of,
)

_T: Any = torch.Tensor
_OF_THE_WHOLE = {
    _T.shape.__get__, _T.dtype.__get__, _T.device.__get__, _T.ndim.__get__, _T.layout.__get__, _T.is_cuda.__get__,
    _T.is_sparse.__get__, _T.requires_grad.__get__, _T.grad_fn.__get__, _T.is_leaf.__get__, _T.dim, _T.size, _T.numel,
    _T.is_floating_point, _T.is_complex, _T.element_size, _T.get_device, _T.__len__, torch.is_floating_point,
    torch.is_complex, torch.numel, base_of, version_of, is_view, _T.is_meta.__get__,
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
        """Return the whole logits (…, C), differentiable."""

    @abstractmethod
    def with_part(self, part: Tensor) -> Self:
        """Return the logits of other positions."""

    @abstractmethod
    def elementwise(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Self | None:
        """Return the result of a function of every logit by itself; None where ``func`` is none, or needs the whole."""

    @abstractmethod
    def cross_entropy(
        self, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
    ) -> Tensor:
        """Return the cross entropy of rows (N, C), in at least fp32."""

    def materialised(self) -> Tensor:
        """Return the whole logits (…, C), made once."""
        if self.whole is None:
            with torch.enable_grad():  # it is kept for whoever comes later
                self.whole = self.make_whole()
        return self.whole

    @property
    def are_rows(self) -> bool:
        """Return whether there is one row of logits per target (N, C), not yet made."""
        return self.whole is None and self.part.dim() == 2

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Answer from the part where that is possible, else from the whole."""
        kwargs = kwargs or {}
        if func in _OF_THE_WHOLE:
            with DisableTorchFunctionSubclass():
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
        """Return the result computed without the whole; False when that cannot be."""
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
        """Return whether an index chooses positions and leaves the classes as they are."""
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
        if schema_of(func).is_mutable:
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


# --- Logits of a linear head, kept as what they are made of until something other than a cross entropy wants them.
#
# Shapes: (…, D) hidden states · (C, D) weight · (C,) bias · (…, C) logits.

_Tensor: Any = torch.Tensor
_CASTS = {
    _Tensor.float: torch.float32, _Tensor.half: torch.float16, _Tensor.bfloat16: torch.bfloat16,
    _Tensor.double: torch.float64,
}  # fmt: skip
_SAME = {_Tensor.contiguous, _Tensor.clone, torch.clone}


class HeadLogits(LazyLogits):
    """``F.linear(hidden, weight, bias)`` that is not computed: its cross entropy goes a few rows at a time.

    ``F.cross_entropy`` of it (after slices, flattening and casts, as losses of language models do) is
    :func:`~meshwright.loss.linear_cross_entropy`, in which the logits are never there at once. Anything else computes
    them. Made by :meth:`of`.
    """

    weight: Tensor
    bias: Tensor | None

    @staticmethod
    def __new__(
        cls: type[HeadLogits], hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> HeadLogits:
        """Make a tensor without memory of its own."""
        shape = (*hidden.shape[:-1], weight.shape[0])
        self: HeadLogits = make_wrapper(cls, shape, dtype=dtype, device=hidden.device)
        self.part, self.weight, self.bias, self.whole = hidden, weight, bias, None
        return self

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> HeadLogits:
        """Return the logits of a head, in the type in which ``F.linear`` would give them (that of autocast, where it is on).

        Args:
            hidden: (…, D).
            weight: (C, D); it must hold its values until the loss is computed.
            bias: (C,).
        """
        hidden, weight, bias = in_autocast_type(hidden, weight, bias)
        return _deferred(hidden, weight, bias, hidden.dtype)

    @property
    def num_classes(self) -> int:
        """C."""
        return self.weight.shape[0]

    def make_whole(self) -> Tensor:
        """Return the product."""
        self._check_weight()
        with torch.autocast(self.part.device.type, enabled=False):
            return F.linear(self.part, self.weight, self.bias).to(self.dtype)

    def with_part(self, part: Tensor) -> HeadLogits:
        """Return the logits of other hidden states."""
        return _deferred(part, self.weight, self.bias, self.dtype)

    def elementwise(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> HeadLogits | None:
        """Cast; the cross entropy is computed in fp32 from products in the type of the head, whatever the cast."""
        if func in _SAME:
            return self.with_part(self.part)
        dtype = _CASTS.get(func)
        if func is _Tensor.to and len(args) + len(kwargs) == 1:
            dtype = args[0] if args else kwargs.get("dtype")
        # To a narrower type, rounding the logits is part of the result.
        widens = isinstance(dtype, torch.dtype) and torch.promote_types(dtype, self.dtype) == dtype
        return _deferred(self.part, self.weight, self.bias, dtype) if dtype is not None and widens else None

    def cross_entropy(
        self, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
    ) -> Tensor:
        """Return the cross entropy of rows (N, C), in at least fp32; see :func:`linear_cross_entropy`."""
        self._check_weight()
        with torch.autocast(self.part.device.type, enabled=False):  # what it does to types has been done
            return linear_cross_entropy(
                self.part,
                self.weight,
                target,
                self.bias,
                class_weight=weight,
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=label_smoothing,
            )

    def _check_weight(self) -> None:
        """Refuse a weight that FSDP has freed since."""
        if self.weight.untyped_storage().nbytes() == 0:
            raise ModelError(
                "The weight of the head was freed before the loss was computed",
                expected="a head outside the units that are freed after their forward, as it is by default",
                got="a head that is a unit of its own, or in one",
                fix="do not name its class with atorch_wrap_cls, or leave loss out of module_replace",
            )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        shape = (*self.part.shape[:-1], self.num_classes)
        return f"HeadLogits(shape={shape}, hidden={tuple(self.part.shape)}, dtype={self.dtype})"


def _deferred(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> HeadLogits:
    with DisableTorchFunctionSubclass():
        logits: HeadLogits = _WrapHeadLogits.apply(hidden, weight, bias, dtype)
    # Inside the function they were cut off from their graphs.
    logits.part, logits.weight, logits.bias = hidden, weight, bias
    return logits


class _WrapHeadLogits(torch.autograd.Function):
    """Logits of a head. Functions with a backward of their own give a gradient of the logits back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> HeadLogits:
        ctx.save_for_backward(hidden, weight)
        return HeadLogits(hidden, weight, bias, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        gradient = gradient.to(hidden.dtype)
        rows = gradient.flatten(0, -2)
        wants_hidden, wants_weight, wants_bias, _ = ctx.needs_input_grad
        return (
            gradient @ weight if wants_hidden else None,
            rows.T @ hidden.flatten(0, -2) if wants_weight else None,
            rows.sum(0) if wants_bias else None,
            None,
        )


# --- Logits of which each rank holds some classes, for code that knows nothing of it.
#
# A head that a tensor axis splits returns them. Cross entropy is computed without putting them together; so is what
# leads there (see :class:`~meshwright.loss.lazy_logits.LazyLogits`), and scaling. Anything else sees the whole logits,
# which are gathered when they are first needed.

_ELEMENTWISE = {
    _Tensor.float, _Tensor.half, _Tensor.bfloat16, _Tensor.double, _Tensor.to, _Tensor.type, _Tensor.contiguous,
    _Tensor.clone, _Tensor.detach, _Tensor.mul, _Tensor.div, _Tensor.__mul__, _Tensor.__rmul__, _Tensor.__truediv__,
    _Tensor.tanh, torch.mul, torch.div, torch.tanh, torch.clone,
}  # fmt: skip
"""What treats every logit alike, as long as the other arguments are numbers or types."""


class VocabularyShards(LazyLogits):
    """A tensor of logits (…, C) that lies on the ranks in parts of (…, c).

    Made by :meth:`of`.

    Args:
        part: This rank's logits.
        vocabulary: Where the classes are, and how to gather.
    """

    vocabulary: Vocabulary

    @staticmethod
    def __new__(cls: type[VocabularyShards], part: Tensor, vocabulary: Vocabulary) -> VocabularyShards:
        """Make a tensor without memory of its own."""
        shape = (*part.shape[:-1], vocabulary.size)
        self: VocabularyShards = make_wrapper(cls, shape, dtype=part.dtype, device=part.device)
        self.part, self.vocabulary, self.whole = part, vocabulary, None
        return self

    @classmethod
    def of(cls, part: Tensor, vocabulary: Vocabulary) -> VocabularyShards:
        """Shards whose gradients reach the part, however they come."""
        with DisableTorchFunctionSubclass():
            shards: VocabularyShards = _WrapVocabularyShards.apply(part, vocabulary)
        shards.part = part  # inside the function it was cut off from its graph
        return shards

    @property
    def num_classes(self) -> int:
        """C, of all ranks."""
        return self.vocabulary.size

    def make_whole(self) -> Tensor:
        """Gather; collective over the ranks that hold parts."""
        return self.vocabulary.gather(self.part)

    def with_part(self, part: Tensor) -> VocabularyShards:
        """Return the shards of other positions."""
        return VocabularyShards.of(part, self.vocabulary)

    def elementwise(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> VocabularyShards | None:
        """Cast, copies, scaling by numbers and tanh."""
        if func not in _ELEMENTWISE or any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            return None
        return self.with_part(func(self.part, *args, **kwargs))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        # No values: printing on one rank must not wait for the others.
        shape = (*self.part.shape[:-1], self.vocabulary.size)
        return f"VocabularyShards(shape={shape}, part={tuple(self.part.shape)}, dtype={self.part.dtype})"

    def cross_entropy(
        self, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
    ) -> Tensor:
        """Return the cross entropy of rows (N, C), in at least fp32; see :func:`parallel_cross_entropy`."""
        return parallel_cross_entropy(
            self.part,
            target,
            self.vocabulary,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )


class _WrapVocabularyShards(torch.autograd.Function):
    """Shards of a part. Functions with a backward of their own give a gradient of the whole back."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, vocabulary: Vocabulary) -> VocabularyShards:
        ctx.classes = slice(vocabulary.first, vocabulary.first + part.shape[-1])
        return VocabularyShards(part, vocabulary)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient[..., ctx.classes], None
