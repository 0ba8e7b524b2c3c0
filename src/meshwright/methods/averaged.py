"""Whether replicas have averaged what they are about to step by: a part of a model that runs alone averages nothing."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from meshwright.errors import ModelError
from meshwright.optim import guard_of
from meshwright.optim.wrapped import call_around
from meshwright.runtime import agreed

_ALIKE = 1e-5  # relative: kernels of other devices add in another order, other samples differ by far more


class AveragedGradients:
    """Compares the gradients of replicas before a step without a forward from which DDP would have averaged them.

    With one, as in nearly every step, nothing is looked at.

    Args:
        replicas: Whose forward makes backward average.
        group: Its ranks.
    """

    def __init__(self, replicas: DistributedDataParallel, group: dist.ProcessGroup) -> None:
        self._replicas, self._group = replicas, group
        self._will_average = False
        replicas.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: nn.Module, args: object) -> None:
        self._will_average |= torch.is_grad_enabled() and self._replicas.require_backward_grad_sync

    def follow(self, optimizer: Optimizer) -> Optimizer:
        """Looks before each step of an optimizer from now on; returns it."""
        guard = guard_of(optimizer)
        stepped = guard.inner if guard is not None else optimizer
        call_around(stepped, before=[lambda: self._check(stepped)])
        return optimizer

    def _check(self, optimizer: Optimizer) -> None:
        will_average, self._will_average = self._will_average, False
        if will_average:
            return
        smallest, largest = self._extremes(optimizer)
        if largest - smallest > _ALIKE * largest:
            raise agreed(
                ModelError(
                    "The ranks have gradients of their own, which nobody has averaged",
                    expected="in every step a forward of job.model itself, outside of no_sync, that leads to the loss",
                    got=f"none since the last step, and gradients of norms from {smallest:g} to {largest:g}; the "
                    "weights are as they were",
                    fix="call job.model, whose forward may choose what of it runs, in place of a module in it; where "
                    "ranks are to take steps of their own, use the method outer",
                )
            )

    @torch.no_grad()
    def _extremes(self, optimizer: Optimizer) -> tuple[float, float]:
        """The smallest and the largest norm of all gradients among the ranks."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        device = next(self._replicas.parameters()).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for gradient in gradients:
            if gradient.layout == torch.strided:
                total += gradient.double().square().sum().to(device)
        norm = total.sqrt().nan_to_num(0.0, 0.0, 0.0)  # what is not finite is for others to judge
        both = torch.stack([-norm, norm])
        dist.all_reduce(both, dist.ReduceOp.MAX, self._group)
        smallest, largest = both.tolist()
        return -smallest, largest
