"""torch's own optimizers over DTensors, whose kernels then take the local shards."""

from __future__ import annotations

from typing import Any

from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import NAdam, Optimizer, RAdam
from torch.optim.adadelta import Adadelta
from torch.optim.adagrad import Adagrad
from torch.optim.adam import Adam
from torch.optim.adamax import Adamax
from torch.optim.adamw import AdamW
from torch.optim.rmsprop import RMSprop
from torch.optim.rprop import Rprop

# Element by element, and with nothing kept but what they collect in lists. SGD's momentum is not collected but made.
_ELEMENTWISE = (Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)


def step_on_local_tensors(optimizer: Optimizer) -> None:
    """Lets an optimizer update the local shards of its DTensors, as DTensor operations would, without their dispatch.

    States stay DTensors. Nothing changes for optimizers other than torch's element-wise ones, for subclasses of
    theirs, and in steps whose states do not lie as their parameters.
    """
    if type(optimizer) not in _ELEMENTWISE:
        return
    collect = optimizer._init_group  # type: ignore[attr-defined]

    def collect_local(group: dict[str, Any], parameters: list[Any], gradients: list[Any], *states: list[Any]) -> Any:
        found = collect(group, parameters, gradients, *states)
        if not group.get("differentiable"):
            _unwrap(parameters, gradients, states)
        return found

    optimizer._init_group = collect_local  # type: ignore[attr-defined]


def _unwrap(parameters: list[Any], gradients: list[Any], states: tuple[list[Any], ...]) -> None:
    """Replaces DTensors by their local tensors, in all lists or in none."""
    sharded = [index for index, each in enumerate(parameters) if isinstance(each, DTensor)]
    if not sharded:
        return
    filled = [each for each in states if each]  # such as that of amsgrad stays empty
    if any(len(each) != len(parameters) for each in filled):
        return
    for index in sharded:
        parameter = parameters[index]
        if any(isinstance(each[index], DTensor) and not _alike(each[index], parameter) for each in filled):
            return
    increment_version([parameters[index] for index in sharded])  # the wrapper's own: it has one beside the shard's
    for index in sharded:
        parameter, gradient = parameters[index], gradients[index]
        if not _alike(gradient, parameter):
            gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
        parameters[index], gradients[index] = parameter._local_tensor, gradient._local_tensor
        for each in filled:
            if isinstance(each[index], DTensor):
                each[index] = each[index]._local_tensor


def _alike(tensor: DTensor, parameter: DTensor) -> bool:
    if tensor._spec is parameter._spec:  # as of gradients that FSDP2 has sharded
        return True
    same_mesh = tensor._spec.mesh is parameter._spec.mesh or tensor._spec.mesh == parameter._spec.mesh
    return same_mesh and tensor._spec.placements == parameter._spec.placements
