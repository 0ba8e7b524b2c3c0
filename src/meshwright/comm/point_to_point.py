"""Send activations from one rank to another, with their gradients on the way back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import Function, once_differentiable

from meshwright.comm.message_header import Header
from meshwright.comm.transport import Group, Members, members_of
from meshwright.errors import ConfigError, LaunchError

# A rank that expects a gradient must not take an activation for it: on gloo it waits until the timeout instead. (NCCL
# goes by order alone.)
_ACTIVATION_TAG, _GRADIENT_TAG = 0, 1


def send_activations(x: torch.Tensor, peer: int, group: Group = None, *, comm: Group = None) -> torch.Tensor:
    """Send a tensor of any shape and dtype to a rank that calls ``recv_activations``.

    When ``x`` requires a gradient, the peer sends it back while it differentiates what it made of the tensor. The
    sender waits for it in the backward of what this function returns: ``send_activations(x, peer).backward()``, or
    add the returned zero to the loss. (Its own incoming gradient is ignored: the peer's loss has its own scale.)

    A message is on its way when the peer receives it. So two ranks must not send to each other at once, and what one
    sends, gradients included, the other receives in that order; else both wait until the timeout.

    Args:
        x: Tensor on the CPU or the CUDA device.
        peer: Rank within the group.
        group: Process group or DeviceMesh of one axis; None means the world.
        comm: BMTrain's name for ``group``.

    Returns:
        A scalar zero whose backward receives the gradient of ``x``; without graph when ``x`` requires none.

    Raises:
        ConfigError: When ``peer`` is not another rank of the group, or ``x`` no tensor of this rank.
        LaunchError: Before ``init_distributed``.
    """
    members = _members(group, comm, peer)
    Header.of("send_activations", x).send(peer, members)
    return _Send.apply(x, peer, members)


def recv_activations(peer: int, group: Group = None, *, comm: Group = None) -> torch.Tensor:
    """Receive the tensor that a rank sends with ``send_activations``; shape, dtype and kind of device travel along.

    Args:
        peer: Rank within the group.
        group: Process group or DeviceMesh of one axis; None means the world.
        comm: BMTrain's name for ``group``.

    Returns:
        A new contiguous tensor, on this rank's device where it came from a CUDA device. It requires a gradient when
        the sent one does; then this rank has to differentiate what it makes of it, for the sender waits.

    Raises:
        ConfigError: When ``peer`` is not another rank of the group.
        LaunchError: Before ``init_distributed``, or under ``no_grad`` when the sender expects a gradient.
    """
    members = _members(group, comm, peer)
    header = Header.receive(peer, members)
    # An input that requires a gradient makes the output require one.
    root = torch.empty(0, requires_grad=header.wants_gradient)
    # Receive before any error: the sender waits until its message is taken.
    received = _Receive.apply(root, header, peer, members)
    if header.wants_gradient and not torch.is_grad_enabled():
        raise LaunchError(
            "The sender expects a gradient for what is received here under no_grad",
            expected="gradients on both sides or on neither",
            got=f"a tensor that requires a gradient, from rank {peer} of the group",
            fix="send x.detach(), or receive outside of no_grad",
        )
    return received


def _members(group: Group, comm: Group, peer: int) -> Members:
    members = members_of(group, comm)
    members.check_place("peer", peer)
    if peer == members.rank:
        raise ConfigError(
            "A rank cannot send to itself",
            expected="the number of another rank in the group",
            got=f"peer={peer} on rank {peer}",
            fix="start more processes, or hand the tensor on as it is",
        )
    return members


def _send(x: torch.Tensor, peer: int, tag: int, members: Members) -> None:
    if x.numel():
        dist.send(x.contiguous(), group_dst=peer, group=members.group, tag=tag)


def _receive(like: Header, peer: int, tag: int, members: Members) -> torch.Tensor:
    device = torch.device("cpu") if like.device == "cpu" else torch.device(like.device, torch.cuda.current_device())
    buffer = torch.empty(like.shape, dtype=like.torch_dtype, device=device)
    if buffer.numel():
        dist.recv(buffer, group_src=peer, group=members.group, tag=tag)
    return buffer


class _Send(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, peer: int, members: Members) -> torch.Tensor:
        ctx.peer, ctx.members, ctx.header = peer, members, Header.of("gradient", x)
        _send(x, peer, _ACTIVATION_TAG, members)
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _receive(ctx.header, ctx.peer, _GRADIENT_TAG, ctx.members), None, None


class _Receive(Function):
    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, header: Header, peer: int, members: Members) -> torch.Tensor:
        ctx.peer, ctx.members = peer, members
        return _receive(header, peer, _ACTIVATION_TAG, members)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _send(grads[0], ctx.peer, _GRADIENT_TAG, ctx.members)
        return None, None, None, None
