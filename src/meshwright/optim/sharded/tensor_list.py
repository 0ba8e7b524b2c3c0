"""Many tensors computed with as if they were one: the arithmetic of an update, for a batch of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Operand = Any
"""A number; a TensorList of the same length; or a vector with one number for each tensor."""


class TensorList:
    """The local tensors of several parameters; operators are torch's multi-tensor (foreach) kernels.

    An update written for one tensor then runs on a whole batch with one call per operation. Scalars that differ from
    tensor to tensor (norms, ratios) are vectors of shape ``(len,)``, computed with in one operation as well.
    """

    __slots__ = ("tensors",)

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.tensors)

    def __mul__(self, other: Operand) -> TensorList:
        return TensorList(torch._foreach_mul(self.tensors, self._operand(other)))

    def sqrt(self) -> TensorList:
        """√x."""
        return TensorList(torch._foreach_sqrt(self.tensors))

    def rsqrt(self) -> TensorList:
        """1/√x."""
        return TensorList(torch._foreach_rsqrt(self.tensors))

    def in_fp32(self) -> TensorList:
        """In fp32; itself, when all are so already."""
        if all(tensor.dtype == torch.float32 for tensor in self.tensors):
            return self
        return TensorList([tensor.float() for tensor in self.tensors])

    def to(self, device: torch.device) -> TensorList:
        """On a device, without waiting for it."""
        return TensorList([tensor.to(device, non_blocking=True) for tensor in self.tensors])

    def contiguous(self) -> TensorList:
        """In the order of their dims; tensors that are so already are not copied."""
        return TensorList([tensor.contiguous() for tensor in self.tensors])

    def add_(self, other: Operand, alpha: float = 1.0) -> TensorList:
        """x += alpha · other."""
        if isinstance(other, TensorList):
            torch._foreach_add_(self.tensors, other.tensors, alpha=alpha)
        else:
            torch._foreach_add_(self.tensors, self._operand(other if alpha == 1.0 else other * alpha))
        return self

    def mul_(self, other: Operand) -> TensorList:
        """x *= other."""
        torch._foreach_mul_(self.tensors, self._operand(other))
        return self

    def div_(self, other: Operand) -> TensorList:
        """x /= other."""
        torch._foreach_div_(self.tensors, self._operand(other))
        return self

    def sqrt_(self) -> TensorList:
        """x = √x."""
        torch._foreach_sqrt_(self.tensors)
        return self

    def lerp_(self, end: TensorList, weight: float) -> TensorList:
        """x += weight · (end − x): an exponential moving average."""
        torch._foreach_lerp_(self.tensors, end.tensors, weight)
        return self

    def addcmul_(self, first: TensorList, second: Operand, value: float = 1.0) -> TensorList:
        """x += value · first · second."""
        torch._foreach_addcmul_(self.tensors, first.tensors, self._listed(second), value=value)
        return self

    def squares(self) -> torch.Tensor:
        """Σx² of every tensor, shape ``(len,)``, in fp32."""
        norms = torch._foreach_norm(self.tensors)
        return torch.stack(norms).square_() if norms else torch.zeros(0)

    def sum(self, *dims: int) -> TensorList:
        """Sums over dims."""
        return TensorList([tensor.sum(dims) for tensor in self.tensors])

    def mean(self, *dims: int) -> TensorList:
        """Means over dims."""
        return TensorList([tensor.mean(dims) for tensor in self.tensors])

    def unsqueeze(self, dim: int) -> TensorList:
        """A dim of size one, for broadcasting."""
        return TensorList([tensor.unsqueeze(dim) for tensor in self.tensors])

    def map(self, function: Callable[..., torch.Tensor], *others: TensorList) -> TensorList:
        """``function(x, *others)`` tensor by tensor, where there is no multi-tensor kernel."""
        return TensorList([function(*parts) for parts in zip(self.tensors, *others, strict=True)])

    def _operand(self, other: Operand) -> Any:
        return other if isinstance(other, int | float) else self._listed(other)

    def _listed(self, other: Operand) -> list[torch.Tensor]:
        return other.tensors if isinstance(other, TensorList) else list(other.unbind())
