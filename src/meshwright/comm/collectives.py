"""Collectives that gradients pass through."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.autograd.function import FunctionCtx

from meshwright.comm.message_header import Header, check_alike, check_call, exchange, on_all_ranks
from meshwright.comm.transport import (
    HALF,
    Group,
    Members,
    broadcasted,
    gathered,
    members_of,
    reduce_scattered,
    reduced,
    reduced_to_root,
)
from meshwright.errors import ConfigError, LaunchError, did_you_mean
from meshwright.runtime.torch_internals.autograd import Function

Gradient = Literal["replicated", "partial"]
ReduceOp = Literal["sum", "avg", "max", "min", "prod"]
_GRADIENTS = ("replicated", "partial")
_REDUCTIONS = ("sum", "avg", "max", "min", "prod")
_LINEAR = ("sum", "avg")


def all_reduce(
    x: torch.Tensor,
    op: ReduceOp = "sum",
    group: Group = None,
    grad: Gradient = "replicated",
    *,
    comm: Group = None,
) -> torch.Tensor:
    """Combine the tensors of all ranks; every rank gets the result.

    Where several ranks hold the extreme of ``max`` or ``min`` they share its gradient equally, as in ``torch.amax``
    (in BMTrain each gets all of it).

    Args:
        x: Tensor of one shape and dtype on all ranks, on the CPU or the CUDA device.
        op: ``"sum"``, ``"avg"`` (floating point only), ``"max"``, ``"min"`` or ``"prod"``.
        group: Process group or DeviceMesh of one axis; None means the world.
        grad: What the ranks do with the result; see :mod:`meshwright.comm`.
        comm: BMTrain's name for ``group``.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        ConfigError: For an argument that is not one of these.
        LaunchError: On every rank, when they differ; before ``init_distributed``.
    """
    _check_choice("op", op, _REDUCTIONS)
    _check_choice("grad", grad, _GRADIENTS)
    members = members_of(group, comm)
    call = f"all_reduce(op={op!r}, grad={grad!r})"
    check_call(call, x, members, backward_communicates=op not in _LINEAR or grad == "partial")
    _check_average(call, op, x)
    return _AllReduce.apply(x, op, grad == "partial", members)


def all_gather(x: torch.Tensor, group: Group = None, grad: Gradient = "partial", *, comm: Group = None) -> torch.Tensor:
    """Collect the tensors of all ranks on every rank.

    Args:
        x: Tensor of one shape and dtype on all ranks.
        group: Process group or DeviceMesh of one axis; None means the world.
        grad: What the ranks do with the result; see :mod:`meshwright.comm`.
        comm: BMTrain's name for ``group``.

    Returns:
        A new tensor ``(ranks, *x.shape)``, in the order of the group.

    Raises:
        ConfigError: For an argument that is not one of these.
        LaunchError: On every rank, when they differ; before ``init_distributed``.
    """
    _check_choice("grad", grad, _GRADIENTS)
    members = members_of(group, comm)
    check_call(f"all_gather(grad={grad!r})", x, members, backward_communicates=grad == "partial")
    return _AllGather.apply(x, grad == "partial", members)


def reduce_scatter(x: torch.Tensor, op: ReduceOp = "sum", group: Group = None, *, comm: Group = None) -> torch.Tensor:
    """Combine the tensors of all ranks; rank ``r`` gets the ``r``-th part of the result along dim 0.

    ``max``, ``min`` and ``prod`` have the gradients of :func:`all_reduce`, where BMTrain's raise; to know them, every
    rank holds the whole result for a moment where ``x`` requires a gradient.

    Args:
        x: Tensor of one shape and dtype on all ranks; its dim 0 is a multiple of the number of ranks.
        op: ``"sum"``, ``"avg"`` (floating point only), ``"max"``, ``"min"`` or ``"prod"``.
        group: Process group or DeviceMesh of one axis; None means the world.
        comm: BMTrain's name for ``group``.

    Returns:
        A new tensor ``(x.shape[0] / ranks, *x.shape[1:])``.

    Raises:
        ConfigError: For an argument that is not one of these.
        LaunchError: On every rank, when they differ; before ``init_distributed``.
    """
    _check_choice("op", op, _REDUCTIONS)
    members = members_of(group, comm)
    call = f"reduce_scatter(op={op!r})"
    check_call(call, x, members, backward_communicates=True)
    _check_average(call, op, x)
    if x.dim() == 0 or x.shape[0] % members.size:
        raise ConfigError(
            "reduce_scatter splits dim 0 evenly over the ranks",
            expected=f"a dim 0 that is a multiple of {members.size}",
            got=f"shape {list(x.shape)}",
            fix="pad x, or use all_reduce",
        )
    if op not in _LINEAR and x.requires_grad and torch.is_grad_enabled():
        rows = x.shape[0] // members.size
        return _AllReduce.apply(x, op, True, members).narrow(0, members.rank * rows, rows).clone()
    return _ReduceScatter.apply(x, op, members)


def broadcast(x: torch.Tensor, root: int = 0, group: Group = None, *, comm: Group = None) -> torch.Tensor:
    """Give every rank the tensor of one of them.

    The result has a gradient on every rank when the root's ``x`` requires one: in backward all of them send theirs to
    the root, so all must call it. On the other ranks the values of ``x`` are not used, and its gradient is zero. Hosts
    exchange this before the tensor is sent, on CUDA too.

    Args:
        x: Tensor of one shape and dtype on all ranks.
        root: Rank within the group whose tensor it is.
        group: Process group or DeviceMesh of one axis; None means the world.
        comm: BMTrain's name for ``group``.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        ConfigError: When ``root`` is not in the group.
        LaunchError: On every rank, when the calls differ or some of them, not all, run under ``no_grad``.
    """
    members = members_of(group, comm)
    members.check_place("root", root)
    headers = exchange(Header.of(f"broadcast(root={root})", x), members)
    check_alike(headers, ("call", "dtype", "shape"), members)
    if not headers[root].wants_gradient:
        return broadcasted(x.detach(), root, members)
    if not all(header.can_have_gradient for header in headers):
        raise on_all_ranks(
            LaunchError(
                "A broadcast has a gradient on the root and runs under no_grad elsewhere",
                expected="gradients on all ranks or on none",
                got=", ".join(f"rank {place} {header.gradient}" for place, header in enumerate(headers)),
                fix="put the call under no_grad on every rank, or on none; or detach x on the root",
            ),
            members,
        )
    # A rank whose x is a mere buffer takes part in backward all the same.
    return _Broadcast.apply(x if x.requires_grad else x.detach().requires_grad_(), root, members)


# Backwards are made of these functions again wherever they communicate: gradients of gradients are right, too.


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: str, partial: bool, members: Members) -> torch.Tensor:
        ctx.op, ctx.partial, ctx.members = op, partial, members
        if not ctx.needs_input_grad[0] or op in _LINEAR:
            return reduced(x, op, members)
        if op == "prod":
            result, slope = _product(x, members)
        else:
            result = reduced(x, op, members)
            slope = _share_of_extreme(x, result, members)
        ctx.save_for_backward(slope)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        if ctx.partial:
            grad = _AllReduce.apply(grad, "sum", True, ctx.members)
        if ctx.op in _LINEAR:
            return (grad if ctx.op == "sum" else grad / ctx.members.size), None, None, None
        if ctx.op == "prod" and torch.is_grad_enabled():
            raise ConfigError(
                "The gradient of all_reduce(op='prod') cannot be differentiated again",
                expected="backward without create_graph",
                got="create_graph=True",
                fix="multiply the rows of all_gather(x) instead",
            )
        return grad * ctx.saved_tensors[0], None, None, None


def _product(x: torch.Tensor, members: Members) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product over ranks, and that of the other ranks: product / x would be 0 / 0 where x is 0."""
    rows = gathered(x, members)
    rows = rows.float() if x.dtype in HALF else rows
    others = torch.cat([rows[: members.rank], rows[members.rank + 1 :]])
    return rows.prod(0).to(x.dtype), others.prod(0).to(x.dtype)


def _share_of_extreme(x: torch.Tensor, extreme: torch.Tensor, members: Members) -> torch.Tensor:
    """Return 1 / the number of holders where this rank holds the extreme, else 0."""
    holds = (x == extreme).float()
    return (holds / reduced(holds, "sum", members)).to(x.dtype)


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, partial: bool, members: Members) -> torch.Tensor:
        ctx.partial, ctx.members = partial, members
        return gathered(x, members)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        own = _ReduceScatter.apply(grad, "sum", ctx.members)[0] if ctx.partial else grad[ctx.members.rank]
        return own, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: str, members: Members) -> torch.Tensor:
        ctx.op, ctx.members = op, members
        return reduce_scattered(x, op, members)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole = _AllGather.apply(grads[0], True, ctx.members).flatten(0, 1)
        return (whole if ctx.op == "sum" else whole / ctx.members.size), None, None


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, root: int, members: Members) -> torch.Tensor:
        ctx.root, ctx.members = root, members
        return broadcasted(x, root, members)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _ReduceToRoot.apply(grads[0], ctx.root, ctx.members), None, None


class _ReduceToRoot(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, root: int, members: Members) -> torch.Tensor:
        ctx.root, ctx.members = root, members  # type: ignore[attr-defined]
        return reduced_to_root(x, root, members)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Broadcast.apply(grads[0], ctx.root, ctx.members), None, None


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            f"{name} is not known{did_you_mean(str(value), choices)}",
            expected=f"one of {', '.join(choices)}",
            got=repr(value),
            fix=f"use {choices[0]!r} if in doubt",
        )


def _check_average(call: str, op: str, x: torch.Tensor) -> None:
    if op == "avg" and not x.is_floating_point():
        raise ConfigError(
            f"{call} has no mean of whole numbers",
            expected="a floating-point tensor",
            got=str(x.dtype),
            fix="convert x, or use op='sum'",
        )
