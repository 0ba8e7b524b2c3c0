"""Logits that are not computed, or not gathered, until something other than a cross entropy reads them.

[Note: lazy logits] A model returns a tensor subclass in place of its logits, so that its code and the loss need no
change. The subclass has the shape and dtype of the logits but only a *part* in memory: the hidden states before the
head (:class:`HeadLogits`), or this rank's classes (:class:`VocabularyShards`). Slicing positions, flattening and casts,
which losses of language models do, are applied to the part; ``F.cross_entropy`` is computed from it. Any other function
computes the whole logits once, and gets these.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.errors import ModelError
from meshwright.loss.cross_entropy_rows import check_options, check_target, make_rows, mean
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
_METADATA_FUNCTIONS = {
    _T.shape.__get__, _T.dtype.__get__, _T.device.__get__, _T.ndim.__get__, _T.layout.__get__, _T.is_cuda.__get__,
    _T.is_sparse.__get__, _T.requires_grad.__get__, _T.grad_fn.__get__, _T.is_leaf.__get__, _T.dim, _T.size, _T.numel,
    _T.is_floating_point, _T.is_complex, _T.element_size, _T.get_device, _T.__len__, torch.is_floating_point,
    torch.is_complex, torch.numel, base_of, version_of, is_view, _T.is_meta.__get__,
}  # fmt: skip
"""Functions that need no logits, only their metadata; among them those that FSDP2 calls on outputs."""

_PART_FUNCTIONS = {_T.register_hook, _T.untyped_storage}
"""Functions that concern the graph or the memory of the part."""


class LazyTensor(torch.Tensor):
    """A tensor that is computed from a ``part`` when something needs it.

    Once computed, the whole replaces the part, so changes in place last. A subclass computes the whole
    (:meth:`make_whole`), and applies functions to the part that need no more (:meth:`of_part`).
    """

    part: Tensor
    whole: Tensor | None

    @abstractmethod
    def make_whole(self) -> Tensor:
        """Compute the whole tensor, differentiably."""

    def of_part(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Return whether a function could be applied to the part, and its result."""
        return False, None

    @classmethod
    def note_computed(cls, func: Any) -> None:
        """Note that the whole is computed for a function."""

    def materialised(self) -> Tensor:
        """Return the whole tensor, computed once."""
        if self.whole is None:
            with torch.enable_grad():  # a later caller may need the graph
                self.whole = self.make_whole()
        return self.whole

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Apply a function to the part if that is possible, else to the whole."""
        kwargs = kwargs or {}
        if func in _METADATA_FUNCTIONS:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, cls) and func in _PART_FUNCTIONS:
            return func(first.part if first.whole is None else first.whole, *args[1:], **kwargs)
        # Not without gradients: inside a Function's forward, the part would be taken for the whole.
        if isinstance(first, cls) and first.whole is None and torch.is_grad_enabled():
            done, result = first.of_part(func, args[1:], kwargs)
            if done:
                return result
        cls.note_computed(func)
        args, kwargs = tree_map(lambda leaf: leaf.materialised() if isinstance(leaf, cls) else leaf, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Give the whole to operators of extensions, which do not pass ``__torch_function__``."""
        if schema_of(func).is_mutable:
            raise ModelError(
                "An extension would change a tensor in place that has not been computed",
                expected="torch operations, or functions that return something new",
                got=f"{func} on {cls.__name__}",
                fix="pass it what the tensor's materialised() returns",
            )

        def whole(leaf: Any) -> Any:
            return leaf.make_whole().detach() if isinstance(leaf, cls) else leaf

        args, kwargs = tree_map(whole, (args, kwargs or {}))
        return func(*args, **kwargs)


class LazyLogits(LazyTensor):
    """A tensor of logits (…, C) that are computed from a ``part`` (…, d) with the same positions when needed.

    See [Note: lazy logits]. A subclass computes the whole (:meth:`make_whole`) and the cross entropy, rebuilds itself
    from another part (:meth:`with_part`), and names the elementwise functions that can be applied to the part
    (:meth:`elementwise`).
    """

    computed_for: ClassVar[list[str] | None] = None  # names of functions that needed logits; None: not collected

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Return C."""

    @abstractmethod
    def with_part(self, part: Tensor) -> Self:
        """Return lazy logits of another part, such as that of some of the positions."""

    @abstractmethod
    def elementwise(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> LazyLogits | None:
        """Return the result of an elementwise function; None if ``func`` is none, or needs the whole."""

    @abstractmethod
    def cross_entropy(
        self, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
    ) -> Tensor:
        """Compute the cross entropy of rows (N, C), in at least fp32."""

    @classmethod
    def note_computed(cls, func: Any) -> None:
        """Note that logits are computed for a function, where that is collected."""
        if LazyLogits.computed_for is not None:
            LazyLogits.computed_for.append(str(getattr(func, "__name__", func)))

    @property
    def are_rows(self) -> bool:
        """Return whether these are rows of logits (N, C) that have not been computed."""
        return self.whole is None and self.part.dim() == 2

    def of_part(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Return whether a function could be applied to the part, and its result."""
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
        # Torch's result has the type of the logits, which autocast would cast to fp32 first.
        return True, loss if torch.is_autocast_enabled(self.part.device.type) else loss.to(self.dtype)

    def _is_of_positions(self, index: Any) -> bool:
        """Return whether an index selects positions only, and all classes."""
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
        """Return the part's shape for a view of the logits; None if classes are not its last dim."""
        if isinstance(shape, torch.dtype) or not all(isinstance(size, int) for size in shape) or not shape:
            return None
        rows = math.prod(self.part.shape[:-1])
        last = self.num_classes if shape[-1] == -1 and math.prod(shape[:-1]) == rows else shape[-1]
        return (*shape[:-1], self.part.shape[-1]) if last == self.num_classes else None


def _is_everything(entry: Any) -> bool:
    return isinstance(entry, slice) and entry == slice(None)


def _is_mask(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.dtype == torch.bool


# --- Logits of a linear head. Shapes: (…, D) hidden states · (C, D) weight · (C,) bias · (…, C) logits.

_CASTS = {
    _T.float: torch.float32, _T.half: torch.float16, _T.bfloat16: torch.bfloat16,
    _T.double: torch.float64,
}  # fmt: skip
_SAME = {_T.contiguous, _T.clone, torch.clone}


class LossRanks(Protocol):
    """Ranks that have the same hidden states, and compute losses of a part of the rows each."""

    @property
    def place(self) -> tuple[int, int]:
        """This rank's index, and the number of ranks."""

    def total(self, part: Tensor) -> Tensor:
        """Sum over the ranks, in backward the gradients too; collective."""


class Head(NamedTuple):
    """Hold what makes logits of hidden states.

    Attributes:
        weight: (C, D), or this rank's classes.
        bias: (C,), or this rank's.
        ranks: Ranks with the same hidden states and equal targets, axis by axis.
        vocabulary: Division of the classes over ranks; None: each has all.
    """

    weight: Tensor
    bias: Tensor | None
    ranks: Sequence[LossRanks] = ()
    vocabulary: Vocabulary | None = None

    @property
    def num_classes(self) -> int:
        """Return C, the classes of all ranks."""
        return self.weight.shape[0] if self.vocabulary is None else self.vocabulary.size


class HeadLogits(LazyLogits):
    """Lazy ``F.linear(hidden, weight, bias)``, made by :meth:`of`.

    Its ``F.cross_entropy`` is :func:`~meshwright.loss.linear_cross_entropy`, which never holds all logits. Ranks that
    have the same hidden states compute it for a part of the rows each, or for a part of the classes, or both.
    """

    head: Head

    @staticmethod
    def __new__(cls: type[HeadLogits], hidden: Tensor, head: Head, dtype: torch.dtype) -> HeadLogits:
        """Make a tensor without memory of its own."""
        shape = (*hidden.shape[:-1], head.num_classes)
        self: HeadLogits = make_wrapper(cls, shape, dtype=dtype, device=hidden.device)
        self.part, self.head, self.whole = hidden, head, None
        return self

    @classmethod
    def of(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, ranks: Sequence[LossRanks] = ()
    ) -> HeadLogits:
        """Return the lazy logits of a head, of the dtype that ``F.linear`` would return, under autocast as well.

        Args:
            hidden: (…, D).
            weight: (C, D); its values must not be freed before the loss is computed.
            bias: (C,).
            ranks: Those with the same hidden states, axis by axis, and equal targets; none: each has its own.
        """
        hidden, weight, bias = in_autocast_type(hidden, weight, bias)
        return _deferred(hidden, Head(weight, bias, ranks), hidden.dtype)

    def over(self, vocabulary: Vocabulary) -> HeadLogits:
        """Return the logits of all classes of a vocabulary, of which the head of these logits has this rank's."""
        return _deferred(self.part, self.head._replace(vocabulary=vocabulary), self.dtype)

    @property
    def num_classes(self) -> int:
        """Return C, the classes of all ranks."""
        return self.head.num_classes

    def make_whole(self) -> Tensor:
        """Compute the product; collective over the ranks that have other classes."""
        vocabulary = self.head.vocabulary
        return self._product() if vocabulary is None else vocabulary.gather(self._product())

    def _product(self) -> Tensor:
        """Compute the logits of this rank's classes."""
        self._check_weight()
        with torch.autocast(self.part.device.type, enabled=False):
            return F.linear(self.part, self.head.weight, self.head.bias).to(self.dtype)

    def with_part(self, part: Tensor) -> HeadLogits:
        """Return the lazy logits of other hidden states."""
        return _deferred(part, self.head, self.dtype)

    def elementwise(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> LazyLogits | None:
        """Apply copies, and casts to wider types; products stay in the type of the head, and losses in fp32.

        Others of :class:`VocabularyShards` compute the logits of this rank's classes.
        """
        alike = self._cast(func, args, kwargs)
        if alike is not None or self.head.vocabulary is None or not _is_elementwise(func, args, kwargs):
            return alike
        self.note_computed(func)
        return VocabularyShards.of(func(self._product(), *args, **kwargs), self.head.vocabulary)

    def _cast(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> HeadLogits | None:
        """Return the result of a copy, or of a cast to a wider type; None for other functions."""
        if func in _SAME:
            return self.with_part(self.part)
        dtype = _CASTS.get(func)
        if func is _T.to and len(args) + len(kwargs) == 1:
            dtype = args[0] if args else kwargs.get("dtype")
        # A cast to a narrower type rounds the logits.
        widens = isinstance(dtype, torch.dtype) and torch.promote_types(dtype, self.dtype) == dtype
        if dtype is None or not widens:
            return None
        return _deferred(self.part, self.head, dtype)

    def cross_entropy(
        self, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
    ) -> Tensor:
        """Compute the cross entropy of rows (N, C) by :func:`linear_cross_entropy`; collective over the ranks."""
        self._check_weight()
        own, every = self._own_rows(target.shape[0]), slice(None)

        def computed(rows: slice, reduction: str) -> Tensor:
            with torch.autocast(self.part.device.type, enabled=False):  # its casts have been made in ``of``
                return linear_cross_entropy(
                    self.part[rows],
                    self.head.weight,
                    target[rows],
                    self.head.bias,
                    class_weight=weight,
                    ignore_index=ignore_index,
                    reduction=reduction,
                    label_smoothing=label_smoothing,
                    vocabulary=self.head.vocabulary,
                )

        if own is None:
            return computed(every, reduction)
        check_options(reduction, label_smoothing)
        check_target(target, tuple(self.part.shape[:1]))
        if reduction == "none":
            return self._total(F.pad(computed(own, "none"), (own.start, target.shape[0] - own.stop)))
        total = self._total(computed(own, "sum"))
        rows = make_rows(target, self.part.dtype, weight, ignore_index, label_smoothing)
        return total if reduction == "sum" else mean(total, rows)

    def _own_rows(self, count: int) -> slice | None:
        """Return the rows of which this rank computes the loss; None: all, for it shares them with no other."""
        index, size = 0, 1
        for ranks in self.head.ranks:
            place, number = ranks.place
            index, size = index * number + place, size * number
        return slice(count * index // size, count * (index + 1) // size) if size > 1 else None

    def _total(self, part: Tensor) -> Tensor:
        for ranks in self.head.ranks:
            part = ranks.total(part)
        return part

    def _check_weight(self) -> None:
        # FSDP may have freed it since.
        if self.head.weight.untyped_storage().nbytes() == 0:
            raise ModelError(
                "The weight of the head was freed before the loss was computed",
                expected="a head outside the units that are freed after their forward, as it is by default",
                got="a head that is a unit of its own, or in one",
                fix="do not name its class with atorch_wrap_cls, or leave loss out of module_replace",
            )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        shape = (*self.part.shape[:-1], self.num_classes)
        return f"HeadLogits(shape={shape}, hidden={tuple(self.part.shape)}, dtype={self.dtype})"


def _deferred(hidden: Tensor, head: Head, dtype: torch.dtype) -> HeadLogits:
    with DisableTorchFunctionSubclass():
        logits: HeadLogits = _WrapHeadLogits.apply(hidden, head.weight, head.bias, head.vocabulary, dtype)
    # Inside the Function they were detached from their graphs.
    logits.part, logits.head = hidden, head
    return logits


class _WrapHeadLogits(torch.autograd.Function):
    """Wrap hidden states and head; backward takes the gradient of the whole logits, which a Function may return."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        vocabulary: Vocabulary | None,
        dtype: torch.dtype,
    ) -> HeadLogits:
        ctx.save_for_backward(hidden, weight)
        ctx.vocabulary = vocabulary
        return HeadLogits(hidden, Head(weight, bias, (), vocabulary), dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        if ctx.vocabulary is not None:
            gradient = gradient.narrow(-1, ctx.vocabulary.first, weight.shape[0])
        gradient = gradient.to(hidden.dtype)
        rows = gradient.flatten(0, -2)
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        return (
            gradient @ weight if wants_hidden else None,
            rows.T @ hidden.flatten(0, -2) if wants_weight else None,
            rows.sum(0) if wants_bias else None,
            None,
            None,
        )


# --- Logits of which each rank holds some classes: the output of a head that a tensor axis splits.

_ELEMENTWISE = {
    _T.float, _T.half, _T.bfloat16, _T.double, _T.to, _T.type, _T.contiguous,
    _T.clone, _T.detach, _T.mul, _T.div, _T.__mul__, _T.__rmul__, _T.__truediv__,
    _T.tanh, torch.mul, torch.div, torch.tanh, torch.clone,
}  # fmt: skip
"""Functions that are elementwise if the other arguments are numbers or types."""


def _is_elementwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return func in _ELEMENTWISE and not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))


class VocabularyShards(LazyLogits):
    """Lazy logits (…, C), of which every rank holds some classes (…, c); made by :meth:`of`.

    Args:
        part: This rank's logits.
        vocabulary: Division of the classes, and its collectives.
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
        """Wrap this rank's logits, so that gradients of the whole and of the part reach them."""
        with DisableTorchFunctionSubclass():
            shards: VocabularyShards = _WrapVocabularyShards.apply(part, vocabulary)
        shards.part = part  # inside the Function it was detached from its graph
        return shards

    @property
    def num_classes(self) -> int:
        """Return C, the classes of all ranks."""
        return self.vocabulary.size

    def make_whole(self) -> Tensor:
        """Gather the logits; collective over the ranks that hold parts."""
        return self.vocabulary.gather(self.part)

    def with_part(self, part: Tensor) -> VocabularyShards:
        """Return the shards of another part."""
        return VocabularyShards.of(part, self.vocabulary)

    def elementwise(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> VocabularyShards | None:
        """Apply casts, copies, scaling by numbers, and tanh."""
        return self.with_part(func(self.part, *args, **kwargs)) if _is_elementwise(func, args, kwargs) else None

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        # Without values: printing on one rank must not wait for the others.
        shape = (*self.part.shape[:-1], self.vocabulary.size)
        return f"VocabularyShards(shape={shape}, part={tuple(self.part.shape)}, dtype={self.part.dtype})"

    def cross_entropy(
        self, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
    ) -> Tensor:
        """Compute the cross entropy of rows (N, C) by :func:`parallel_cross_entropy`."""
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
    """Wrap a part; backward takes the gradient of the whole logits, which a Function may return."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, vocabulary: Vocabulary) -> VocabularyShards:
        ctx.classes = slice(vocabulary.first, vocabulary.first + part.shape[-1])
        return VocabularyShards(part, vocabulary)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient[..., ctx.classes], None
