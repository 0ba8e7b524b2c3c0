"""Dispatch tokens to the ranks of their experts and back: the ranks, and stacked experts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import ModelError
from meshwright.methods.expert.expert_layers import StackedExperts
from meshwright.methods.tensor.axis_exchange import TensorAxis, TracedAxis
from meshwright.methods.tensor.split_layers import local, swapped_parameters
from meshwright.runtime.torch_internals.autograd import Function


class ExpertAxis:
    """The ranks that divide one layer's experts; each sends tokens of its own.

    Gradients of experts are sums over the tokens of all these ranks, while those of other parameters are averaged over
    the ``expert`` axis later. So gradients that enter the experts' backward are divided by its size, and those that
    leave it towards the tokens are multiplied by it: averaging over the other data ranks then gives experts the mean
    over all ranks, too.

    [Note: experts beside a tensor axis] The ranks of a tensor axis have equal tokens. Each sends an equal part of them,
    and the answers are gathered, so that experts are divided over both axes. Splitting every expert's features over the
    tensor axis instead, as its other layers are, would send each token from each of these ranks, and sum answers where
    this gathers them. A rank would have as many bytes of experts, in thinner matrices. Where a tensor axis divides the
    tokens between its layers (``sequence=True``), its ranks have different ones, and send them all.

    Args:
        mesh: A mesh of one axis: ``expert``, or that of ``expert`` and ``tensor`` together.
        num_averaged: Size of the ``expert`` axis.
        tensor: The ranks with equal tokens; None if all have different ones.
    """

    def __init__(self, mesh: DeviceMesh, num_averaged: int, tensor: TensorAxis | None = None) -> None:
        self.mesh, self._num_averaged, self._tensor = mesh, num_averaged, tensor
        self.group = mesh.get_group()
        self.index, self.size = mesh.get_local_rank(), mesh.size()

    def part(self, rows: int) -> range:
        """Return which of the rows that ranks of a tensor axis have in common this rank sends; else all."""
        if self._tensor is None:
            return range(rows)
        size = -(-rows // self._tensor.size)
        return range(min(self._tensor.index * size, rows), min((self._tensor.index + 1) * size, rows))

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the rows of :meth:`part`; in backward the parts of the gradient are gathered."""
        if self._tensor is None:
            return whole
        return self._tensor.cut(_padded(whole, -whole.shape[0] % self._tensor.size), 0)[: len(self.part(len(whole)))]

    def gather(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        """Return all ``rows`` from those of :meth:`part`; in backward every rank gets its part of the gradient."""
        if self._tensor is None:
            return part
        return self._tensor.gather(_padded(part, -(-rows // self._tensor.size) - part.shape[0]), 0)[:rows]

    def counts(self, sent: torch.Tensor) -> torch.Tensor:
        """Send row r of ``(ranks, n)`` integers to rank r; row r of the result comes from rank r."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received

    def send(self, rows: torch.Tensor, sent: list[int], received: list[int], *, grad: bool) -> torch.Tensor:
        """Send rows to the experts' ranks.

        Args:
            rows: ``(sum of sent, features)``, those for rank 0 first.
            sent: Numbers of rows for every rank.
            received: Numbers of rows from every rank.
            grad: Whether there will be a backward pass, in which all ranks must take part.

        Returns:
            ``(sum of received, features)``, those of rank 0 first.
        """
        return self._exchange(rows, sent, received, grad, float(self._num_averaged))

    def send_back(self, rows: torch.Tensor, sent: list[int], received: list[int], *, grad: bool) -> torch.Tensor:
        """Send rows back from the experts' ranks; arguments are as in :meth:`send`, for this direction."""
        return self._exchange(rows, sent, received, grad, 1 / self._num_averaged)

    def _exchange(
        self, rows: torch.Tensor, sent: list[int], received: list[int], grad: bool, scale: float
    ) -> torch.Tensor:
        # A rank without rows, which need no gradient then, must take part in backward as well.
        anchor = torch.zeros((), device=rows.device, requires_grad=True) if grad else None
        result: torch.Tensor = _Exchange.apply(rows, anchor, self.group, sent, received, scale)
        return result


def autocast_dtype(given: torch.Tensor) -> torch.dtype:
    """Return the dtype in which products of a tensor run: autocast's if it is enabled, else the tensor's own."""
    kind = given.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else given.dtype


def _padded(rows: torch.Tensor, missing: int) -> torch.Tensor:
    """Return rows with so many of zeros behind them."""
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


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


# --- Stacked experts
#
# Tokens are sorted by expert, sent, computed by the module's own code, and sent back.
# Shapes: T tokens of this rank, k experts for each, H features; R rows arrive at this rank's experts.


@dataclass(frozen=True)
class Call:
    """Arguments of stacked experts: tokens (T, H), the experts of each (T, k), their weights (T, k)."""

    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, layer: StackedExperts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Read the arguments of a call, given by position or keyword.

        Raises:
            ModelError: When they are not tokens, an index and weights.
        """
        module = layer.module
        if layer.takes_rows:
            return cls._of_rows(layer, [*args, *kwargs.values()])
        names = list(inspect.signature(type(module).forward).parameters)[1:4]
        given = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
        if len(given) != len(names) or not all(isinstance(each, torch.Tensor) for each in given):
            raise _called_otherwise(module, f"{len(args)} arguments and {sorted(kwargs)}")
        hidden, index, weights = given
        if index.is_floating_point() or index.shape != weights.shape or index.dim() != 2 or hidden.dim() != 2:
            raise _called_otherwise(module, f"shapes {[tuple(each.shape) for each in given]}")
        return cls(hidden, index, weights)

    @classmethod
    def _of_rows(cls, layer: StackedExperts, given: list[Any]) -> Call:
        """Return rows as tokens of one expert each, and those of zeros as tokens of none."""
        rows, experts = given[0], layer.num_experts
        if len(given) != 1 or not isinstance(rows, torch.Tensor) or rows.dim() != 2 or rows.shape[0] % experts:
            raise _called_otherwise(layer.module, f"{len(given)} arguments, the first {getattr(rows, 'shape', rows)}")
        expert = torch.arange(experts, device=rows.device).repeat_interleave(rows.shape[0] // experts)
        index = torch.where((rows.detach() != 0).any(-1), expert, experts)
        return cls(rows, index[:, None], rows.new_ones((rows.shape[0], 1)))


def _called_otherwise(module: nn.Module, got: str) -> ModelError:
    return ModelError(
        f"expert_parallel: {type(module).__name__} is not called as experts are",
        expected="tokens (T, H), the experts of each (T, k) and their weights (T, k); or rows (experts · T, H) alone",
        got=got,
        fix="call a module of stacked experts in this way",
    )


def run_rows(
    layer: StackedExperts,
    forward: Callable[..., torch.Tensor],
    rows: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    most: int,
) -> torch.Tensor:
    """Call the module's own forward on rows (R, H), each for one of ``num_experts`` experts, with weights of one.

    Args:
        layer: The experts.
        forward: Their forward, with the parameters of ``num_experts`` of them.
        rows: The rows.
        experts: The expert of each, (R).
        num_experts: Number of experts.
        most: Rows of the expert that has the most; others get zeros, where all must have equally many.
    """
    if not layer.takes_rows:
        return forward(rows, experts[:, None], rows.new_ones((rows.shape[0], 1)))
    by_expert, order = experts.sort(stable=True)
    first = torch.searchsorted(by_expert, torch.arange(num_experts, device=rows.device))
    place = torch.empty_like(order)
    place[order] = by_expert * most + torch.arange(rows.shape[0], device=rows.device) - first[by_expert]
    padded = rows.new_zeros((num_experts * most, rows.shape[1])).index_copy(0, place, rows)
    return forward(padded).index_select(0, place)


class StackedDispatch:
    """Wraps the forward of a module of stacked experts whose parameters are DTensors over the axis.

    Args:
        layer: The experts, with divided parameters.
        axis: The ranks that hold them.

    Attributes:
        compute_dtype: Dtype in which unsharded weights compute; None: their own.
    """

    def __init__(self, layer: StackedExperts, axis: ExpertAxis) -> None:
        self._layer, self._module, self._axis, self._num_experts = layer, layer.module, axis, layer.num_experts
        self.compute_dtype: torch.dtype | None = None

    def __call__(self, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Send tokens to their experts, compute, and weigh and sum the answers."""
        whole, axis = Call.of(self._layer, args, kwargs), self._axis
        call = Call(axis.cut(whole.hidden), axis.cut(whole.index), axis.cut(whole.weights))
        weights = {name: local(p) for name, p in self._module.named_parameters(recurse=False)}
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (call.hidden, *weights.values()))
        if self.compute_dtype is not None:
            weights = {name: weight.to(self.compute_dtype) for name, weight in weights.items()}
        order, sent, received, experts, most = self._routes(call.index)
        top_k = call.index.shape[1]
        # Their products would cast tokens to autocast's precision: half the bytes to send, and the same numbers. Cast
        # once for each expert, so that the gradients of a token are summed in its own precision.
        dtype = autocast_dtype(call.hidden)
        arrived = axis.send(call.hidden[order // top_k].to(dtype), sent, received, grad=grad)
        with swapped_parameters(self._module, dict(weights)):
            computed = self._computed(forward, arrived, experts, most)
        back = axis.send_back(computed.to(dtype), received, sent, grad=grad)
        # In the order of tokens, zeros where none was sent. A scatter-add would be shorter, but not deterministic.
        every = back.new_zeros((call.index.numel(), back.shape[1])).index_copy(0, order, back)
        weighted = every.view(*call.index.shape, -1) * call.weights[..., None]
        return axis.gather(weighted.sum(1).to(call.hidden.dtype), whole.hidden.shape[0])

    @property
    def _per_rank(self) -> int:
        return self._num_experts // self._axis.size

    def _computed(
        self, forward: Callable[..., torch.Tensor], arrived: torch.Tensor, experts: torch.Tensor, most: int
    ) -> torch.Tensor:
        if arrived.shape[0]:
            return run_rows(self._layer, forward, arrived, experts, self._per_rank, most)
        # One row of zeros, so that weights without tokens get gradients of zeros, as in one process.
        rows = torch.cat([arrived, arrived.new_zeros((1, arrived.shape[1]))])
        return run_rows(self._layer, forward, rows, experts.new_zeros(1), self._per_rank, 1)[:0]

    def _routes(self, index: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int], torch.Tensor, int]:
        """Return the routes of the pairs of a token and an expert.

        An index of ``num_experts`` stands for no expert: such pairs are not sent.

        Returns:
            Positions in (T·k) sorted by expert; numbers of rows to and from every rank; the expert, counted on this
            rank, of every row received; the most rows of one expert.
        """
        size, per_rank = self._axis.size, self._per_rank
        flat = index.reshape(-1)
        by_expert, order = flat.sort(stable=True)
        bounds = torch.searchsorted(by_expert, torch.arange(self._num_experts + 1, device=index.device))
        counts = bounds.diff().view(size, per_rank)
        arriving = self._axis.counts(counts)
        most = arriving.sum(0).max()
        numbers = torch.cat([counts.sum(1), arriving.sum(1), most[None]]).tolist()  # the only wait for the device
        sent, received = numbers[:size], numbers[size:-1]
        experts = torch.arange(per_rank, device=index.device).repeat(size)
        experts = experts.repeat_interleave(arriving.flatten(), output_size=sum(received))
        return order[: sum(sent)], sent, received, experts, numbers[-1]


class TracedDispatch(StackedDispatch):
    """Runs one rank's part of stacked experts without data: it receives as many rows as it sends.

    Args:
        layer: The experts.
        axis: What is sent over it comes back.
        per_rank: Experts of a rank, among which the rows are divided equally.
        share: Part of the pairs of a token and an expert that are sent.
    """

    def __init__(self, layer: StackedExperts, axis: TracedExperts, per_rank: int, share: float) -> None:
        super().__init__(layer, axis)
        self._experts_here, self._share = per_rank, share

    @property
    def _per_rank(self) -> int:
        return self._experts_here

    def _routes(self, index: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int], torch.Tensor, int]:
        _, order = index.reshape(-1).sort(stable=True)
        rows = round(order.shape[0] * self._share)
        experts = torch.arange(rows, device=index.device) % self._per_rank
        return order[:rows], [rows], [rows], experts, -(-rows // self._per_rank)


class TracedExperts(ExpertAxis):
    """The first rank of an axis in a pass without data: what is sent comes back.

    Args:
        tensor: The size of a tensor axis beside it.
    """

    def __init__(self, tensor: int) -> None:
        self._tensor = TracedAxis(tensor) if tensor > 1 else None

    def echo(self, rows: torch.Tensor, *, grad: bool) -> torch.Tensor:
        """Return a copy of rows, made in forward and in backward as an exchange between ranks makes it."""
        anchor = torch.zeros((), device=rows.device, requires_grad=True) if grad else None
        copied: torch.Tensor = _Copy.apply(rows, anchor)
        return copied

    def send(self, rows: torch.Tensor, sent: list[int], received: list[int], *, grad: bool) -> torch.Tensor:
        """Return a copy of the rows."""
        return self.echo(rows, grad=grad)

    send_back = send


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, anchor: torch.Tensor | None) -> torch.Tensor:
        return torch.empty_like(rows).copy_(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return torch.empty_like(gradient).copy_(gradient), None
