"""Dividing experts over the axis: the ``apply`` of ``expert_parallel``, and what other methods must know of it.

Stacked parameters become DTensors, ``Shard(0)`` over the axis. Of listed experts a rank keeps its own, under the names
they had, as a pipeline's rank keeps its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.methods.expert.exchange import ExpertAxis
from meshwright.methods.expert.layers import ExpertLayer, ListedExperts, StackedExperts
from meshwright.methods.expert.listed import DividedExperts, ListedDispatch
from meshwright.methods.expert.stacked import StackedDispatch
from meshwright.methods.replicas import broadcast_states
from meshwright.nn import wrap_method
from meshwright.optim import Stages


@dataclass
class Experts:
    """The experts of this rank, as methods that shard and average see them."""

    axis: ExpertAxis
    modules: list[nn.Module] = field(default_factory=list)  # of stacked parameters, and in the places of lists
    dispatches: list[StackedDispatch] = field(default_factory=list)

    def parameters(self) -> set[nn.Parameter]:
        """This rank's part of all experts."""
        return {parameter for module in self.modules for parameter in module.parameters()}

    def inside(self) -> set[nn.Module]:
        """The modules of experts and all in them."""
        return {each for module in self.modules for each in module.modules()}

    def compute_in(self, dtype: torch.dtype | None) -> None:
        """Sets the precision in which weights compute that nobody gathers."""
        for dispatch in self.dispatches:
            dispatch.compute_dtype = dtype
        for module in self.modules:
            if isinstance(module, DividedExperts):
                module.compute_dtype = dtype

    def run_always(self) -> None:
        """Lets experts run that no token was sent to: their gradients are then zeros, where none would be missed."""
        for module in self.modules:
            if isinstance(module, DividedExperts):
                module.run_always = True

    def stages(self, model: nn.Module, device: torch.device) -> Stages | None:
        """For norms, where ranks hold experts under names of their own; None where all experts are DTensors."""
        listed = [module for module in self.modules if isinstance(module, DividedExperts)]
        if not listed:
            return None
        own = {parameter for module in listed for parameter in module.parameters()}
        alike = frozenset(parameter for parameter in model.parameters() if parameter not in own)
        return Stages(self.axis.group, device, frozenset(), alike)


def divide(
    model: nn.Module, layers: Sequence[tuple[ExpertLayer, int | None]], mesh: DeviceMesh, device: torch.device
) -> Experts:
    """Leaves each rank its part of the experts, in place, and lets layers send tokens to them. Collective.

    Args:
        model: A plain module, on ``device`` or the CPU; rank 0's values are taken over first.
        layers: What to divide, each with the features that a row of it is known to have.
        mesh: The axis.
        device: Where experts go; only this rank's part is ever there.
    """
    broadcast_states(model, device)
    experts = Experts(ExpertAxis(mesh))
    for layer, features in layers:
        if isinstance(layer, StackedExperts):
            _divide_stack(layer, experts, device)
        else:
            _divide_list(layer, experts, features, device)
    return experts


def _divide_stack(layer: StackedExperts, experts: Experts, device: torch.device) -> None:
    axis, module = experts.axis, layer.module
    per_rank = layer.num_experts // axis.size
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = parameter.detach().narrow(0, axis.index * per_rank, per_rank).clone().to(device)
        shard: DTensor = DTensor.from_local(
            part, axis.mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        setattr(module, name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
    for name in layer.counters:
        setattr(module, name, per_rank)
    dispatch = StackedDispatch(layer, axis)
    wrap_method(module, "forward", dispatch)
    experts.modules.append(module)
    experts.dispatches.append(dispatch)


def _divide_list(layer: ListedExperts, experts: Experts, features: int | None, device: torch.device) -> None:
    axis, per_rank = experts.axis, layer.num_experts // experts.axis.size
    divided = DividedExperts(layer.experts, range(axis.index * per_rank, (axis.index + 1) * per_rank))
    setattr(layer.block, layer.name, divided.to(device))
    wrap_method(layer.block, "forward", ListedDispatch(layer.block, divided, axis, features))
    experts.modules.append(divided)
