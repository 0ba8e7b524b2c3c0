"""What the ranks of a tensor axis tell each other inside a layer, and how gradients pass through it.

Each of the pairs is the other's backward (Shoeybi et al. 2019, §3, f and g). Gradients of whole tensors are whole and
equal on all ranks of the axis.
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

    Args:
        mesh: A mesh of one axis.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.index, self.size = mesh.get_local_rank(), mesh.size()

    def copy(self, whole: torch.Tensor) -> torch.Tensor:
        """Hand a whole tensor to a split region: nothing in forward, a sum of its gradients in backward."""
        result: torch.Tensor = _Copy.apply(whole, self)
        return result

    def mean_gradient(self, whole: torch.Tensor) -> torch.Tensor:
        """Nothing in forward; in backward the mean of the ranks' gradients, where each has another part of them."""
        result: torch.Tensor = _MeanGradient.apply(whole, self)
        return result

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """Add up what the ranks have computed, in forward."""
        result: torch.Tensor = _Add.apply(part, self)
        return result

    def gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Put equal parts together along ``dim``; in backward every rank keeps its part of the gradient."""
        result: torch.Tensor = _Gather.apply(part, dim, self)
        return result

    def cut(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Keep this rank's part of a whole tensor; in backward the parts of the gradient are put together."""
        result: torch.Tensor = _Cut.apply(whole, dim, self)
        return result

    def gather_tokens(self, part: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Put tokens together for a split region; in backward gradients are summed, and every rank keeps its part."""
        result: torch.Tensor = _GatherSum.apply(part, dim, self)
        return result

    def scatter_tokens(self, part: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Add up what the ranks have computed, each keeping its part of the tokens; the way back of the former."""
        result: torch.Tensor = _ScatterSum.apply(part, dim, self)
        return result

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, without gradients."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the maximum over the ranks, without gradients."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def _reduced(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, op, group=self.group)
        return result

    def part_of(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part, in memory of its own."""
        return whole.detach().chunk(self.size, dim)[self.index].contiguous()

    def summed_part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part, along ``dim``, of the sum over the ranks."""
        stacked = torch.cat(tensor.detach().chunk(self.size, dim)) if dim else tensor.detach().contiguous()
        result = stacked.new_empty((stacked.shape[0] // self.size, *stacked.shape[1:]))
        reduce_scatter_flat(result, stacked, group=self.group)
        return result

    def whole_of(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """All parts, put together along ``dim``."""
        part = part.detach().contiguous()
        parts = part.new_empty((self.size * part.shape[0], *part.shape[1:]) if part.dim() else (self.size,))
        all_gather_flat(parts, part, group=self.group)
        return parts if dim == 0 else torch.cat(parts.chunk(self.size), dim)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
        ctx.axis = axis
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.axis.sum(gradient), None


class _MeanGradient(Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
        ctx.axis = axis
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.axis.sum(gradient).div_(ctx.axis.size), None


class _Add(Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
        return axis.sum(part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, axis: TensorAxis) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.whole_of(part, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return ctx.axis.part_of(gradient, ctx.dim), None, None


class _Cut(Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dim: int, axis: TensorAxis) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.part_of(whole, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return ctx.axis.whole_of(gradient, ctx.dim), None, None


class _GatherSum(Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, axis: TensorAxis) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.whole_of(part, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return ctx.axis.summed_part(gradient, ctx.dim), None, None


class _ScatterSum(Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, axis: TensorAxis) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.summed_part(part, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return ctx.axis.whole_of(gradient, ctx.dim), None, None
