"""Gradients of a rank's stages: whole until the step's last backward, then averaged over replicas and exchanged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.methods.pipeline.chain import Line
from meshwright.methods.replicas import GradientAverager
from meshwright.nn import abandon_units
from meshwright.optim import local_tensor


class StageGradients:
    """Finishes the gradients of one rank of a pipeline.

    Args:
        line: The rank's place.
        shared: Parameters that several ranks train, and which (ascending); the same order on all.
        averager: Averages over replicas where parameters are not sharded; None where there are none, or FSDP2 does it.
    """

    def __init__(
        self, line: Line, shared: list[tuple[nn.Parameter, tuple[int, ...]]], averager: GradientAverager | None
    ) -> None:
        self._line, self._averager = line, averager
        self._shared: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter, ranks in shared:
            self._shared.setdefault(ranks, []).append(parameter)
        self._aside: list[tuple[nn.Parameter, torch.Tensor | None]] = []  # exchanged before the present backward passes
        self._accumulating = False  # since the last exchange

    def begin(self, reduces: bool) -> None:
        """Before every backward pass: gradients that are sums over stages already are not to be summed once more.

        Args:
            reduces: Whether :meth:`exchange` follows; else the next pass adds to the gradients of this one.
        """
        if not self._accumulating:
            every = [p for parameters in self._shared.values() for p in parameters if p.requires_grad]
            self._aside = [(parameter, parameter.grad) for parameter in every]
            for parameter in every:
                parameter.grad = None
        self._accumulating = not reduces

    def accumulate(self, model: nn.Module) -> None:
        """Before the backward passes of a step: gradients are kept whole, weights that were gathered stay so."""
        if isinstance(model, FSDPModule):
            _set_ending(model, False)

    def abandon(self, model: nn.Module) -> None:
        """After a step that failed: no gradient of it stays, and plain calls are as before."""
        abandon_units(model)
        if isinstance(model, FSDPModule):
            _set_ending(model, True)
        model.zero_grad()
        self._aside, self._accumulating = [], False

    def reduce(self, model: nn.Module) -> None:
        """After them: FSDP2 averages over the replicas, once."""
        if isinstance(model, FSDPModule):
            _end(model)

    def exchange(self) -> None:
        """Sums the gradients of shared parameters, so that they are equal wherever these are trained.

        It averages over replicas too, where FSDP2 has not.
        """
        for ranks, parameters in self._shared.items():
            if self._line.rank in ranks:
                for same in _by_dtype([parameter for parameter in parameters if parameter.requires_grad]):
                    self._sum(ranks, same)
        for parameter, before in self._aside:
            if before is not None and parameter.grad is not None:
                local_tensor(parameter.grad).add_(local_tensor(before))
        self._aside, self._accumulating = [], False
        if self._averager is not None:
            self._averager.average()

    @torch.no_grad()
    def _sum(self, ranks: tuple[int, ...], parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        own = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
        parts = {self._line.rank: torch.cat([gradient.flatten() for gradient in own])}
        operations = []
        for rank in ranks:
            if rank == self._line.rank:
                continue
            peer = dist.get_global_rank(self._line.group, rank)
            parts[rank] = torch.empty_like(parts[self._line.rank])
            operations.append(dist.P2POp(dist.isend, parts[self._line.rank], peer, self._line.group))
            operations.append(dist.P2POp(dist.irecv, parts[rank], peer, self._line.group))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        total = parts[ranks[0]]
        for rank in ranks[1:]:  # in one order everywhere: the sums are equal to the last bit
            total = total + parts[rank]
        for gradient, whole in zip(own, total.split([gradient.numel() for gradient in own]), strict=True):
            gradient.copy_(whole.view_as(gradient))


def _set_ending(model: Any, ends: bool) -> None:
    """Whether every backward pass ends with reduced gradients and sharded weights, as in plain calls."""
    model.set_is_last_backward(ends)
    model.set_reshard_after_backward(ends)
    model.set_requires_gradient_sync(ends)
    if hasattr(model, "finalize_backward"):  # torch 2.13 has none yet
        model.set_manual_backward_finalization(not ends)


def _end(model: Any) -> None:
    """Reduces all units, frees whole weights, and waits; plain calls are as before."""
    if hasattr(model, "finalize_backward"):
        model.set_reshard_after_backward(True)
        model.set_requires_gradient_sync(True)
        model.finalize_backward()
        _set_ending(model, True)
    else:
        from torch.distributed.pipelining import PipelineStage

        # What torch's schedules end a step with.
        PipelineStage.perform_reduce_grad(SimpleNamespace(submod=model), 1)  # type: ignore[arg-type]


def _by_dtype(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    found: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter)
    return list(found.values())
