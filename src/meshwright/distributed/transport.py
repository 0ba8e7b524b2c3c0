"""The collectives themselves, without gradients: what gloo and NCCL each need to give the same answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from meshwright.distributed.members import Members

# torch 2.13 has renamed them and warns about the old names; torch 2.11 knows only those.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
HALF = (torch.float16, torch.bfloat16)


def reduced(x: torch.Tensor, op: str, members: Members) -> torch.Tensor:
    """All-reduce into a new contiguous tensor of the shape of ``x``."""
    total = _summand(x, op, members)
    if members.size > 1:
        dist.all_reduce(total, _reduce_op(op, x, members), group=members.group)
    return _finished(total, op, x, members)


def reduced_to_root(x: torch.Tensor, root: int, members: Members) -> torch.Tensor:
    """The sum on ``root``, zeros elsewhere; a new contiguous tensor."""
    total = _summand(x, "sum", members)
    if members.size > 1:
        dist.reduce(total, group_dst=root, group=members.group)
    # What reduce leaves on the other ranks is not defined.
    return _finished(total, "sum", x, members) if members.rank == root else torch.zeros_like(total, dtype=x.dtype)


def gathered(x: torch.Tensor, members: Members) -> torch.Tensor:
    """All-gather into a new tensor ``(ranks, *x.shape)``."""
    every = x.new_empty(members.size * x.numel())
    all_gather_flat(every, x.contiguous().view(-1), group=members.group)
    return every.view(members.size, *x.shape)


def reduce_scattered(x: torch.Tensor, op: str, members: Members) -> torch.Tensor:
    """Reduce-scatter along dim 0, whose size the ranks divide, into a new tensor ``(size / ranks, …)``."""
    parts = _summand(x, op, members)
    own = parts.new_empty(x.numel() // members.size)
    reduce_scatter_flat(own, parts.view(-1), op=_reduce_op(op, x, members), group=members.group)
    return _finished(own, op, x, members).view(x.shape[0] // members.size, *x.shape[1:])


def exchanged(x: torch.Tensor, members: Members) -> torch.Tensor:
    """All-to-all along dim 0, of one entry per rank: the r-th goes to rank r, and rank r's comes r-th."""
    arrived = _like(x)
    dist.all_to_all_single(arrived, x.contiguous(), group=members.group)
    return arrived


def broadcasted(x: torch.Tensor, root: int, members: Members) -> torch.Tensor:
    """The root's ``x``, as a new contiguous tensor on every rank."""
    copy = x.clone(memory_format=torch.contiguous_format) if members.rank == root else _like(x)
    dist.broadcast(copy, group_src=root, group=members.group)
    return copy


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _summand(x: torch.Tensor, op: str, members: Members) -> torch.Tensor:
    """A copy to reduce in: gloo adds halves in halves, where 40000 + 40000 is infinite before it is averaged."""
    wide = x.dtype in HALF and op in ("sum", "avg", "prod") and members.backend(x.device) != "nccl"
    return x.to(torch.float32 if wide else x.dtype, copy=True, memory_format=torch.contiguous_format)


def _reduce_op(op: str, x: torch.Tensor, members: Members) -> dist.ReduceOp.RedOpType:
    # Only NCCL knows a mean of every dtype in every version of torch.
    return dist.ReduceOp.AVG if op == "avg" and members.backend(x.device) == "nccl" else _REDUCE_OPS[op]


def _finished(total: torch.Tensor, op: str, x: torch.Tensor, members: Members) -> torch.Tensor:
    if op == "avg" and members.backend(x.device) != "nccl":
        total /= members.size
    return total.to(x.dtype)


class Pending:
    """A collective under way; torch keeps what it reads alive.

    Args:
        work: What to wait for.
        finish: Gives the result, once ``work`` is done.
    """

    def __init__(self, work: Any, finish: Callable[[], torch.Tensor]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> torch.Tensor:
        """The result; on CUDA the stream waits, not the host."""
        self._work.wait()
        return self._finish()


def gather_async(x: torch.Tensor, members: Members) -> Pending:
    """:func:`gathered`, under way."""
    every = x.new_empty(members.size * x.numel())
    work = all_gather_flat(every, x.contiguous().view(-1), group=members.group, async_op=True)
    return Pending(work, lambda: every.view(members.size, *x.shape))


def reduce_async(x: torch.Tensor, members: Members) -> Pending:
    """:func:`reduced` with ``op="sum"``, under way."""
    total = _summand(x, "sum", members)
    work = dist.all_reduce(total, group=members.group, async_op=True)
    return Pending(work, lambda: total.to(x.dtype))


def reduce_scatter_async(x: torch.Tensor, members: Members) -> Pending:
    """:func:`reduce_scattered` with ``op="sum"``, under way."""
    parts = _summand(x, "sum", members)
    own = parts.new_empty(x.numel() // members.size)
    work = reduce_scatter_flat(own, parts.view(-1), group=members.group, async_op=True)
    return Pending(work, lambda: own.to(x.dtype).view(x.shape[0] // members.size, *x.shape[1:]))
