"""Tensor-parallel linear layer that communicates while it multiplies. Seed: BMTrain.

Shapes: T tensor ranks · n rows of this rank (all dims of its input but the last, flattened) · N = T·n rows of all
ranks, in rank order · I input features · O output features.

Rows are gathered and scattered along dim 0. Backward is the exact transpose of forward: a gathered input's gradient is
reduce-scattered, a summed output's gradient goes to all ranks that added to it. So gradients are right whatever ranks
do with the result. As in Megatron-LM with sequence parallelism (Korthikanti et al. 2022), a gathered input is not saved
for backward but gathered again.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.comm import all_gather
from meshwright.comm.transport import (
    Members,
    Pending,
    exchanged,
    gather_async,
    members_of,
    reduce_async,
    reduce_scatter_async,
)
from meshwright.errors import ConfigError
from meshwright.loss.linear_head import in_autocast_type
from meshwright.runtime import tensor_mesh, tensor_size
from meshwright.runtime.torch_internals.autograd import Function


class ReduceType(Enum):
    """Reduction of outputs that are sums over tensor ranks; the numbers are BMTrain's."""

    ALL_REDUCE = 1
    """Every rank gets all rows."""
    REDUCE_SCATTER = 2
    """Every rank gets its own part of the rows."""


class OpLinear:
    """BMTrain's ``OpLinear``: ``torch.nn.functional.linear`` under the name of a function with gradients."""

    @staticmethod
    def apply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias``."""
        return F.linear(x, weight, bias)


class OpParallelLinear:
    """BMTrain's ``OpParallelLinear``: ``input @ weight.T + bias`` over a tensor group."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        gather_input: bool = False,
        gather_output: bool = False,
        split_input: bool = False,
        reduce_output_type: ReduceType | int | None = None,
        async_gather_chunks: int = 2,
    ) -> Tensor:
        """Compute this rank's part and communicate as the options say; without tensor groups, ``F.linear``.

        Args:
            input: (rows…, features), floating point; of equal shape on all ranks of the group.
            weight: (O, I), this rank's piece.
            bias: (O,); this rank's piece. If the output is reduced, the whole: it is added once, after the sum.
            gather_input: Whether ranks hold different rows (parts of dim 0), to be gathered.
            gather_output: Give every rank the output features of all, in rank order.
            split_input: Compute with this rank's part of the input's features.
            reduce_output_type: Sum the outputs over the ranks: a :class:`ReduceType` or its number; None does not.
            async_gather_chunks: Parts in which rows are communicated, each during the product of the one before.

        Returns:
            (rows…, features). Dim 0 is T times as long after ``gather_input``, a T-th after ``REDUCE_SCATTER``.

        Raises:
            ConfigError: When dim 0 cannot be scattered, or features be split, or ``async_gather_chunks`` is below 1.
            ValueError: When ``reduce_output_type`` is no :class:`ReduceType`.
        """
        kind = None if reduce_output_type is None else ReduceType(reduce_output_type)
        if tensor_size() == 1:
            return F.linear(input, weight, bias)
        members = members_of(tensor_mesh())
        _check(input, gather_input, split_input, kind, async_gather_chunks, members)
        if gather_input and split_input:
            input, gather_input = _RowsForFeatures.apply(input, members), False
        elif split_input:
            input = input.chunk(members.size, dim=-1)[members.rank]
        if gather_input and kind is not None:
            input, gather_input = all_gather(input, members.group).flatten(0, 1), False
        if kind is not None:
            output = _LinearReduce.apply(*in_autocast_type(input, weight), kind, async_gather_chunks, members)
            return output if bias is None else output + bias.to(output.dtype)
        if gather_input:
            output = _GatherLinear.apply(*in_autocast_type(input, weight, bias), async_gather_chunks, members)
        else:
            output = F.linear(input, weight, bias)
        # (T, rows…, O) to (rows…, T·O)
        return all_gather(output, members.group).movedim(0, -2).flatten(-2) if gather_output else output


class _RowsForFeatures(Function):
    """Exchange this rank's rows with all features (n, I) for all rows with its features (N, I / T)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, members: Members) -> Tensor:
        ctx.members = members
        return exchanged(torch.stack(input.chunk(members.size, -1)), members).flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        by_rank = grads[0].unflatten(0, (ctx.members.size, -1))
        return torch.cat(exchanged(by_rank, ctx.members).unbind(), -1), None


class _GatherLinear(Function):
    """Multiply the rows of all ranks by this rank's weight: (n, I) to (N, O)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, members: Members) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.members, ctx.has_bias = members, bias is not None
        rows = input.flatten(0, -2)
        output = rows.new_empty(members.size * input.shape[0], *input.shape[1:-1], weight.shape[0])
        by_rank = output.view(members.size, rows.shape[0], weight.shape[0])
        for some, gathered in _gathered_chunks(rows, chunks, members):
            by_rank[:, some] = F.linear(gathered, weight, bias)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        members, (wants_input, wants_weight, *_) = ctx.members, ctx.needs_input_grad
        slope = grads[0].flatten(0, -2)  # (N, O)
        again = gather_async(input.flatten(0, -2), members) if wants_weight else None
        own = reduce_scatter_async(slope @ weight, members) if wants_input else None
        weight_grad = slope.t() @ again.wait().flatten(0, 1) if again is not None else None
        bias_grad = slope.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        input_grad = own.wait().view(input.shape) if own is not None else None
        return input_grad, weight_grad, bias_grad, None, None


class _LinearReduce(Function):
    """Sum each rank's features times its weight: (N, I) to (N, O), or to this rank's rows (n, O) of the sum."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, kind: ReduceType, chunks: int, members: Members) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.kind, ctx.chunks, ctx.members = kind, chunks, members
        rows = input.flatten(0, -2)
        if kind is ReduceType.REDUCE_SCATTER:
            every = rows.view(members.size, -1, rows.shape[-1])
            sent = [
                reduce_scatter_async(F.linear(every[:, some], weight).flatten(0, 1), members)
                for some in _parts(every.shape[1], chunks)
            ]
            lead = (input.shape[0] // members.size, *input.shape[1:-1])
        else:
            sent = [reduce_async(F.linear(rows[some], weight), members) for some in _parts(rows.shape[0], chunks)]
            lead = input.shape[:-1]
        # A tensor of its own, for FSDP2 warns of views.
        output = rows.new_empty(*lead, weight.shape[0])
        torch.cat([part.wait() for part in sent], out=output.view(-1, weight.shape[0]))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        scattered = ctx.kind is ReduceType.REDUCE_SCATTER
        # Chunks are cut along dim 1; dim 0 is the rank if the output was scattered, else of size 1.
        every = input.flatten(0, -2).view(ctx.members.size if scattered else 1, -1, input.shape[-1])
        slope = grads[0].flatten(0, -2)
        arriving = _gathered_chunks if scattered else _summed_chunks
        input_grad = torch.empty_like(every) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for some, part in arriving(slope, ctx.chunks, ctx.members):
            if input_grad is not None:
                input_grad[:, some] = part @ weight
            if weight_grad is not None:
                torch.addmm(weight_grad, part.flatten(0, 1).t(), every[:, some].flatten(0, 1), out=weight_grad)
        return None if input_grad is None else input_grad.view(input.shape), weight_grad, None, None, None


def _gathered_chunks(rows: Tensor, chunks: int, members: Members) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of all ranks' rows (T, chunk, features), each gathered while the caller uses the one before."""
    yield from _prefetched(rows, chunks, lambda part: gather_async(part, members))


def _summed_chunks(rows: Tensor, chunks: int, members: Members) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of the sum over ranks (1, chunk, features), each summed while the caller uses the one before."""
    for some, part in _prefetched(rows, chunks, lambda part: reduce_async(part, members)):
        yield some, part.unsqueeze(0)


def _prefetched(rows: Tensor, chunks: int, send: Any) -> Iterator[tuple[slice, Tensor]]:
    slices = _parts(rows.shape[0], chunks)
    pending: Pending = send(rows[slices[0]])
    for index, some in enumerate(slices):
        arrived = pending.wait()
        if index + 1 < len(slices):
            pending = send(rows[slices[index + 1]])
        yield some, arrived


def _parts(num_rows: int, chunks: int) -> list[slice]:
    size = max(-(-num_rows // chunks), 1)
    return [slice(start, min(start + size, num_rows)) for start in range(0, max(num_rows, 1), size)]


def _check(input: Tensor, gather: bool, split: bool, kind: ReduceType | None, chunks: int, members: Members) -> None:
    if chunks < 1:
        raise ConfigError("The number of chunks is below 1", expected="1 or more", got=repr(chunks), fix="use 2")
    if input.dim() < 2:
        raise ConfigError(
            "A parallel linear layer needs rows to exchange",
            expected="an input of at least two dims, (rows…, features)",
            got=f"shape {tuple(input.shape)}",
            fix="unsqueeze it",
        )
    if split and input.shape[-1] % members.size:
        raise ConfigError(
            "The input's features cannot be split over the tensor group",
            expected=f"a multiple of {members.size}",
            got=f"shape {tuple(input.shape)}",
            fix="pad the features",
        )
    rows = input.shape[0] * (members.size if gather else 1)
    if kind is ReduceType.REDUCE_SCATTER and rows % members.size:
        raise ConfigError(
            "The output's rows cannot be scattered over the tensor group",
            expected=f"a dim 0 that is a multiple of {members.size}",
            got=f"shape {tuple(input.shape)}",
            fix="pad dim 0, or reduce with ALL_REDUCE (all_reduce_output=True)",
        )
