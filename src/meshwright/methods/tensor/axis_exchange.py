"""Exchange tensors between the ranks of a tensor axis, with gradients.

Each exchange and its backward are transposes of each other (Shoeybi et al. 2019, §3, f and g). Gradients of whole
tensors are whole and equal on all ranks of the axis.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm.transport import all_gather_flat, reduce_scatter_flat
from meshwright.runtime.torch_internals.autograd import Function


class TensorAxis:
    """The ranks that hold the parts of one layer.

    Methods of the first group pass gradients on; those of the second do not.

    Args:
        mesh: A mesh of one axis.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.index, self.size = mesh.get_local_rank(), mesh.size()

    # With gradients

    def copy(self, whole: torch.Tensor) -> torch.Tensor:
        """Pass a whole tensor to a split region: identity in forward, the sum of the ranks' gradients in backward."""
        return self._with_backward(whole, "same", "sum")

    def mean_gradient(self, whole: torch.Tensor) -> torch.Tensor:
        """Identity in forward, the mean of the ranks' gradients in backward, where each has another part of them."""
        return self._with_backward(whole, "same", "mean")

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' results in forward; identity in backward."""
        return self._with_backward(part, "sum", "same")

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' results in forward, and their gradients in backward."""
        return self._with_backward(part, "sum", "sum")

    def gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenate equal parts along ``dim``; in backward every rank gets its part of the gradient."""
        return self._with_backward(part, "whole_of", "part_of", dim)

    def cut(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Take this rank's part of a whole tensor; in backward the parts of the gradient are concatenated."""
        return self._with_backward(whole, "part_of", "whole_of", dim)

    def gather_tokens(self, part: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Gather tokens for a split region; in backward gradients are summed and scattered."""
        return self._with_backward(part, "whole_of", "summed_part", dim)

    def scatter_tokens(self, part: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Sum the ranks' results and scatter their tokens; in backward gradients are gathered."""
        return self._with_backward(part, "summed_part", "whole_of", dim)

    def _with_backward(self, tensor: torch.Tensor, forward: str, backward: str, dim: int = 0) -> torch.Tensor:
        result: torch.Tensor = _Exchange.apply(tensor, self, forward, backward, dim)
        return result

    # Without gradients; ``dim`` is ignored by those that need none

    def same(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return a view of the tensor."""
        return tensor.view_as(tensor)

    def sum(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return the sum over the ranks."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def mean(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return the mean over the ranks."""
        return self.sum(tensor).div_(self.size)

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the maximum over the ranks."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def _reduced(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._all_reduce(result, op)
        return result

    def part_of(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Copy this rank's part along ``dim``."""
        return whole.detach().chunk(self.size, dim)[self.index].contiguous()

    def summed_part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part along ``dim`` of the sum over the ranks."""
        dim %= max(tensor.dim(), 1)
        if _is_first(tensor.shape, dim):
            split = (self.size * tensor.shape[0], *tensor.shape[1:]) if dim else tensor.shape
            shape = [size // self.size if dim and at == dim else size for at, size in enumerate(split)]
            stacked = tensor.detach().contiguous().view(shape)
        else:
            stacked = torch.cat(tensor.detach().chunk(self.size, dim))
        result = stacked.new_empty((stacked.shape[0] // self.size, *stacked.shape[1:]))
        self._reduce_scatter(result, stacked)
        return result

    def whole_of(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the parts of all ranks, concatenated along ``dim``."""
        dim %= max(part.dim(), 1)
        part = part.detach().contiguous()
        parts = part.new_empty((self.size * part.shape[0], *part.shape[1:]) if part.dim() else (self.size,))
        self._all_gather(parts, part)
        if not _is_first(part.shape, dim):
            return torch.cat(parts.chunk(self.size), dim)
        # The parts lie one after the other: that is the whole already.
        return parts.view(
            [self.size * size if at == dim else size for at, size in enumerate(part.shape)] or [self.size]
        )

    # Communication

    def _all_reduce(self, result: torch.Tensor, op: Any) -> None:
        dist.all_reduce(result, op, group=self.group)

    def _reduce_scatter(self, result: torch.Tensor, stacked: torch.Tensor) -> None:
        reduce_scatter_flat(result, stacked, group=self.group)

    def _all_gather(self, parts: torch.Tensor, part: torch.Tensor) -> None:
        all_gather_flat(parts, part, group=self.group)


def _is_first(shape: torch.Size, dim: int) -> bool:
    """Return whether no dimension before ``dim`` has several elements, so that parts along it lie as they are sent."""
    return all(size == 1 for size in shape[:dim])


class TracedAxis(TensorAxis):
    """The first rank of an axis in a pass without data: makes the same tensors, and sends nothing.

    Args:
        size: Size of the axis.
    """

    def __init__(self, size: int) -> None:
        self.index, self.size = 0, size

    def _all_reduce(self, result: torch.Tensor, op: Any) -> None:
        pass

    def _reduce_scatter(self, result: torch.Tensor, stacked: torch.Tensor) -> None:
        pass

    def _all_gather(self, parts: torch.Tensor, part: torch.Tensor) -> None:
        pass


class _Exchange(Function):
    """Calls one method of an axis in forward, and another, its transpose, in backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, axis: TensorAxis, operation: str, transpose: str, dim: int
    ) -> torch.Tensor:
        ctx.axis, ctx.transpose, ctx.dim = axis, transpose, dim
        result: torch.Tensor = getattr(axis, operation)(tensor, dim)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:  # type: ignore[override]
        return getattr(ctx.axis, ctx.transpose)(gradient, ctx.dim), None, None, None, None
