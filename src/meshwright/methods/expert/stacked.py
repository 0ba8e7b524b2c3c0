"""Stacked experts: tokens are sorted by expert, sent, computed by the module's own code, and sent back.

Shapes: T tokens of this rank, k experts for each, H features; R rows arrive at this rank's experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.errors import ModelError
from meshwright.methods.expert.exchange import ExpertAxis
from meshwright.methods.expert.layers import StackedExperts
from meshwright.methods.tensor.engine import lent, local


@dataclass(frozen=True)
class Call:
    """The arguments of experts: tokens (T, H), the experts of each (T, k), their weights (T, k)."""

    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Reads a call by position or keyword.

        Raises:
            ModelError: When these are not tokens, an index and weights.
        """
        names = list(inspect.signature(type(module).forward).parameters)[1:4]
        given = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
        if len(given) != len(names) or not all(isinstance(each, torch.Tensor) for each in given):
            raise _called_otherwise(module, f"{len(args)} arguments and {sorted(kwargs)}")
        hidden, index, weights = given
        if index.is_floating_point() or index.shape != weights.shape or index.dim() != 2 or hidden.dim() != 2:
            raise _called_otherwise(module, f"shapes {[tuple(each.shape) for each in given]}")
        return cls(hidden, index, weights)


def _called_otherwise(module: nn.Module, got: str) -> ModelError:
    return ModelError(
        f"expert_parallel: {type(module).__name__} is not called as experts are",
        expected="tokens (T, H), the experts of each (T, k) and their weights (T, k)",
        got=got,
        fix="call a module of stacked experts in this way",
    )


def run_rows(forward: Callable[..., torch.Tensor], rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """The module's own forward on rows (R, H), each for one expert, with weights of one."""
    return forward(rows, experts[:, None], rows.new_ones((rows.shape[0], 1)))


class StackedDispatch:
    """Stands about the forward of a module of stacked experts whose parameters are DTensors over the axis.

    Args:
        layer: The experts, with parameters that are divided.
        axis: The ranks that hold them.
    """

    def __init__(self, layer: StackedExperts, axis: ExpertAxis) -> None:
        self._module, self._axis, self._num_experts = layer.module, axis, layer.num_experts
        self.compute_dtype: torch.dtype | None = None
        """Precision in which weights compute that nobody gathers; None: their own."""

    def __call__(self, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """In the place of ``forward``."""
        call, axis = Call.of(self._module, args, kwargs), self._axis
        weights = {name: local(p) for name, p in self._module.named_parameters(recurse=False)}
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (call.hidden, *weights.values()))
        if self.compute_dtype is not None:
            weights = {name: weight.to(self.compute_dtype) for name, weight in weights.items()}
        order, sent, received, experts = self._routes(call.index)
        top_k = call.index.shape[1]
        arrived = axis.send(call.hidden[order // top_k], sent, received, grad=grad)
        with lent(self._module, dict(weights)):
            computed = _run(forward, arrived, experts)
        back = axis.send_back(computed.to(call.hidden.dtype), received, sent, grad=grad)
        # In the order of tokens; zeros where none was sent. No sums at random places: they would not be repeatable.
        every = back.new_zeros((call.index.numel(), back.shape[1])).index_copy(0, order, back)
        weighted = every.view(*call.index.shape, -1) * call.weights[..., None]
        return weighted.sum(1).to(call.hidden.dtype)

    def _routes(self, index: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int], torch.Tensor]:
        """What goes where: positions in (T·k) by expert, rows to and from every rank, this rank's expert of each.

        An index of ``num_experts`` stands for none: such pairs are not sent.
        """
        size, per_rank = self._axis.size, self._num_experts // self._axis.size
        flat = index.reshape(-1)
        by_expert, order = flat.sort(stable=True)
        bounds = torch.searchsorted(by_expert, torch.arange(self._num_experts + 1, device=index.device))
        counts = bounds.diff().view(size, per_rank)
        told = self._axis.counts(counts)
        sent, received = torch.stack([counts.sum(1), told.sum(1)]).tolist()  # the one wait for the device
        experts = torch.arange(per_rank, device=index.device).repeat(size)
        experts = experts.repeat_interleave(told.flatten(), output_size=sum(received))
        return order[: sum(sent)], sent, received, experts


def _run(forward: Callable[..., torch.Tensor], arrived: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    if arrived.shape[0]:
        return run_rows(forward, arrived, experts)
    # A row of zeros, so that weights without tokens get gradients of zeros, as in one process.
    rows = torch.cat([arrived, arrived.new_zeros((1, arrived.shape[1]))])
    return run_rows(forward, rows, experts.new_zeros(1))[:0]
