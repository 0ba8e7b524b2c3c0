"""Logits of which each rank holds some classes, for code that knows nothing of it.

A head that a tensor axis splits returns them. Cross entropy is computed without putting them together; so is what
leads there (see :class:`~meshwright.loss.lazy_logits.LazyLogits`), and scaling. Anything else sees the whole logits,
which are gathered when they are first needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from meshwright.loss.lazy_logits import LazyLogits
from meshwright.loss.parallel_cross_entropy import Vocabulary, parallel_cross_entropy

_T: Any = torch.Tensor
_ELEMENTWISE = {
    _T.float, _T.half, _T.bfloat16, _T.double, _T.to, _T.type, _T.contiguous, _T.clone, _T.detach, _T.mul, _T.div,
    _T.__mul__, _T.__rmul__, _T.__truediv__, _T.tanh, torch.mul, torch.div, torch.tanh, torch.clone,
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
        """Makes a tensor without memory of its own."""
        shape = (*part.shape[:-1], vocabulary.size)
        self: VocabularyShards = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=part.dtype, device=part.device
        )
        self.part, self.vocabulary, self.whole = part, vocabulary, None
        return self

    @classmethod
    def of(cls, part: Tensor, vocabulary: Vocabulary) -> VocabularyShards:
        """Shards whose gradients reach the part, however they come."""
        with torch._C.DisableTorchFunctionSubclass():
            shards: VocabularyShards = _Wrapped.apply(part, vocabulary)
        shards.part = part  # inside the function it was cut off from its graph
        return shards

    @property
    def num_classes(self) -> int:
        """C, of all ranks."""
        return self.vocabulary.size

    def make_whole(self) -> Tensor:
        """Gathers; collective over the ranks that hold parts."""
        return self.vocabulary.gather(self.part)

    def with_part(self, part: Tensor) -> VocabularyShards:
        """The shards of other positions."""
        return VocabularyShards.of(part, self.vocabulary)

    def elementwise(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> VocabularyShards | None:
        """Casts, copies, scaling by numbers and tanh."""
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
        """The cross entropy of rows (N, C), in at least fp32; see :func:`parallel_cross_entropy`."""
        return parallel_cross_entropy(
            self.part,
            target,
            self.vocabulary,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )


class _Wrapped(torch.autograd.Function):
    """Shards of a part. Functions with a backward of their own give a gradient of the whole back."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, vocabulary: Vocabulary) -> VocabularyShards:
        ctx.classes = slice(vocabulary.first, vocabulary.first + part.shape[-1])
        return VocabularyShards(part, vocabulary)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient[..., ctx.classes], None
