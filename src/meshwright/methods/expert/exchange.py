"""Rows of tokens sent to the ranks of their experts and back, as many as each rank has, with gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.runtime.function import Function


class ExpertAxis:
    """The ranks that hold the parts of one layer's experts; each has tokens of its own.

    Gradients of experts are sums over the tokens of all these ranks, where those of other parameters are averaged over
    them later. So what enters the experts' backward is divided by the number of ranks, and what leaves it towards the
    tokens is multiplied again: averaging over the other data ranks then gives experts the mean over all ranks too.

    Args:
        mesh: A mesh of one axis.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.index, self.size = mesh.get_local_rank(), mesh.size()

    def counts(self, sent: torch.Tensor) -> torch.Tensor:
        """Tells every rank a row of ``(ranks, n)`` integers; returns what each rank has told this one, likewise."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received

    def send(self, rows: torch.Tensor, sent: list[int], received: list[int], *, grad: bool) -> torch.Tensor:
        """Sends rows to the experts' ranks.

        Args:
            rows: ``(sum of sent, features)``, those for rank 0 first.
            sent: Rows for every rank.
            received: Rows from every rank.
            grad: Whether there will be a backward pass, in which all ranks must take part.

        Returns:
            ``(sum of received, features)``, those of rank 0 first.
        """
        return self._exchange(rows, sent, received, grad, float(self.size))

    def send_back(self, rows: torch.Tensor, sent: list[int], received: list[int], *, grad: bool) -> torch.Tensor:
        """The way back of :meth:`send`; the lists are those of this way."""
        return self._exchange(rows, sent, received, grad, 1 / self.size)

    def _exchange(
        self, rows: torch.Tensor, sent: list[int], received: list[int], grad: bool, scale: float
    ) -> torch.Tensor:
        # A rank whose rows need no gradient, since it has none, must be there in backward as well.
        anchor = torch.zeros((), device=rows.device, requires_grad=True) if grad else None
        result: torch.Tensor = _Exchange.apply(rows, anchor, self.group, sent, received, scale)
        return result


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        anchor: torch.Tensor | None,
        group: dist.ProcessGroup,
        sent: list[int],
        received: list[int],
        scale: float,
    ) -> torch.Tensor:
        ctx.group, ctx.sent, ctx.received, ctx.scale = group, sent, received, scale
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        back = _exchanged(gradient, ctx.received, ctx.sent, ctx.group)
        return back.mul_(ctx.scale), None, None, None, None, None


def _exchanged(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
