"""Many activations between many ranks at once, and their gradients back the same ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import Function, once_differentiable

from meshwright.distributed.members import Members


class Arrival(NamedTuple):
    """What a rank of the group sends to this one."""

    peer: int
    shape: Sequence[int]
    dtype: torch.dtype


def new_chain(device: torch.device) -> torch.Tensor:
    """What ties exchanges into one chain: backward goes through all of them, in reverse order, on every rank."""
    return torch.zeros(1, device=device, requires_grad=torch.is_grad_enabled())


def exchange_activations(
    chain: torch.Tensor, departures: Sequence[tuple[int, torch.Tensor]], arrivals: Sequence[Arrival], members: Members
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Sends tensors to ranks of a group while others arrive; in backward gradients travel the other way.

    Every rank of the group makes the same sequence of calls with one chain, and what one rank sends another expects, in
    the same order per pair. Then no rank waits for one that waits for it: neither here nor in backward, if on every
    rank something that was made of the last call's chain goes backward.

    Args:
        chain: Of :func:`new_chain`, or what the call before returned.
        departures: Rank of the group (not this one) and tensor on the device.
        arrivals: What comes, in the order of the result.
        members: The group.

    Returns:
        The chain to go on with, and the tensors that arrived; those of floating point require a gradient unless
        autograd is off.
    """
    peers, tensors = tuple(peer for peer, _ in departures), [tensor for _, tensor in departures]
    chain, *arrived = _Exchange.apply(chain, peers, tuple(arrivals), members, *tensors)
    return chain, arrived


def scale_gradients(
    chain: torch.Tensor, factor: float, tensors: Iterable[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copies of tensors; their gradients pass back times ``factor``, together, when the chain's backward is here."""
    chain, *copies = _Scale.apply(chain, factor, *tensors)
    return chain, copies


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any,
        chain: torch.Tensor,
        peers: Sequence[int],
        arrivals: Sequence[Arrival],
        members: Members,
        *tensors: Any,
    ) -> tuple[torch.Tensor, ...]:
        ctx.peers, ctx.arrivals, ctx.members = peers, arrivals, members
        ctx.sent = [Arrival(peer, each.shape, each.dtype) for peer, each in zip(peers, tensors, strict=True)]
        return chain.clone(), *_transferred(zip(peers, tensors, strict=True), arrivals, chain.device, members)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = zip([each.peer for each in ctx.arrivals], grads[1:], strict=True)
        returned = _transferred(back, ctx.sent, grads[0].device, ctx.members)
        return grads[0], None, None, None, *returned


class _Scale(Function):
    @staticmethod
    def forward(ctx: Any, chain: torch.Tensor, factor: float, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.factor = factor
        return chain.clone(), *(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None, *(grad if grad is None else grad * ctx.factor for grad in grads[1:])


def _transferred(
    departures: Iterable[tuple[int, torch.Tensor]],
    arrivals: Sequence[Arrival],
    device: torch.device,
    members: Members,
) -> list[torch.Tensor]:
    buffers = [torch.empty(tuple(each.shape), dtype=each.dtype, device=device) for each in arrivals]
    moves: list[tuple[Callable[..., Any], torch.Tensor, int]] = [
        (dist.isend, tensor.contiguous(), peer) for peer, tensor in departures
    ]
    moves += [(dist.irecv, buffer, each.peer) for buffer, each in zip(buffers, arrivals, strict=True)]
    operations = [
        dist.P2POp(move, tensor, dist.get_global_rank(members.group, peer), members.group)
        for move, tensor, peer in moves
        if tensor.numel()
    ]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return buffers
