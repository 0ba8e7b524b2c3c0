"""A model as plain data: its distinct blocks, their parameters, and what an optimizer keeps for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.cost import Block, Buffer, Parameter, Updating
from meshwright.nn import class_name, class_names, find_blocks
from meshwright.optim import average_of, local_tensor
from meshwright.optim.wrapped import is_outer
from meshwright.planner.offloaded import OffloadedBytes

if TYPE_CHECKING:
    from meshwright.methods import Cut
    from meshwright.methods.pipeline.cut import Outside
    from meshwright.planner.profile.model_ops import ModelOps
    from meshwright.planner.states import StatesOf


@dataclass(frozen=True)
class Marks:
    """What methods make of single parameters, and the optimizer holds of them for a moment."""

    tensor_dims: Mapping[nn.Parameter, int] = field(default_factory=dict)  # the dim that a tensor axis divides
    experts: Mapping[nn.Parameter, tuple[int | None, int]] = field(default_factory=dict)  # see ``Parameter.expert``
    num_fp8: Mapping[nn.Parameter, int] = field(default_factory=dict)  # layers that multiply with it in 8 bits
    updating: Callable[[nn.Parameter], Updating | None] = lambda parameter: None


@dataclass(frozen=True)
class Described:
    """A model's blocks one by one.

    Args:
        blocks: With parameters of their own, by path.
        outside: Parameters in no block.
    """

    blocks: tuple[tuple[str, Block], ...]
    outside: tuple[Parameter, ...]


def describe_blocks(
    model: nn.Module,
    states_of: StatesOf,
    marks: Marks | None = None,
    cut: Cut | None = None,
) -> tuple[Block, ...]:
    """Lists the distinct blocks of a model; what lies in no repeated block is the block ``outside``.

    Args:
        model: A plain module, not wrapped or sharded.
        states_of: What the optimizer keeps for a parameter.
        marks: What methods make of single parameters.
        cut: Where a pipeline axis cuts the model.
    """
    return group_blocks(describe_each(model, states_of, marks, cut), cut)


def describe_each(
    model: nn.Module, states_of: StatesOf, marks: Marks | None = None, cut: Cut | None = None
) -> Described:
    """The parameters of every block, and of what is in none; arguments as of :func:`describe_blocks`."""
    seen: set[nn.Parameter] = set()
    owners, marks = _owners(model), marks or Marks()
    places = {item.name: item for item in cut.outside} if cut is not None else {}
    blocks = []
    for path, module in find_blocks(model):
        parameters = _describe(module, path + ".", owners, seen, states_of, marks, places)
        if parameters:
            blocks.append((path, Block(class_name(type(module)), 1, parameters)))
    return Described(tuple(blocks), _describe(model, "", owners, seen, states_of, marks, places))


def group_blocks(described: Described, cut: Cut | None = None, ops: ModelOps | None = None) -> tuple[Block, ...]:
    """Equal blocks together, then the block ``outside``.

    Args:
        described: One by one.
        cut: Where a pipeline axis cuts the model.
        ops: What they compute; None: not known. Those of blocks without parameters of their own are ``outside``.
    """
    entries: dict[Block, list[int]] = {}  # per distinct block, how many of them every pipeline rank holds
    for path, block in described.blocks:
        rank = cut.rank_of(path) if cut is not None else 0
        if ops is not None:
            block = dataclasses.replace(block, ops=ops.by_path.get(path, ()), runs=ops.runs.get(path, 1))
        if rank is not None:
            entries.setdefault(block, [0] * _ranks(cut))[rank] += 1
        else:
            entries.setdefault(block, []).append(1)
    blocks = [
        dataclasses.replace(
            block, count=sum(counts), on_ranks=tuple(counts) if cut is not None and _in_list(block) else ()
        )
        for block, counts in entries.items()
    ]
    apart = ops.outside_of(dict(described.blocks), cut.ranks[-1] if cut is not None else None) if ops else ()
    outside = Block("outside", 1, described.outside, (), apart)
    return (*blocks, *([outside] if described.outside or apart else []))


def _ranks(cut: Cut | None) -> int:
    return cut.num_ranks if cut is not None else 1


def _in_list(block: Block) -> bool:
    return all(parameter.trained_on is None for parameter in block.parameters)


def describe_buffers(model: nn.Module, cut: Cut | None = None) -> tuple[Buffer, ...]:
    """Lists the buffers of a model, with the pipeline rank of those that lie in a block."""
    return tuple(
        Buffer(b.numel(), b.element_size(), b.is_floating_point(), cut.rank_of(name) if cut is not None else None)
        for name, b in model.named_buffers()
    )


def _owners(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For every module path: the qualified class names of the modules it lies in, itself included."""
    owners: dict[str, tuple[str, ...]] = {}
    for path, module in model.named_modules():
        above = owners.get(path.rpartition(".")[0], ()) if path else ()
        owners[path] = (*above, *class_names(module)) if path else ()
    return owners


def _describe(
    module: nn.Module,
    prefix: str,
    owners: dict[str, tuple[str, ...]],
    seen: set[nn.Parameter],
    states_of: StatesOf,
    marks: Marks,
    places: Mapping[str, Outside],
) -> tuple[Parameter, ...]:
    described = []
    for name, parameter in module.named_parameters():
        if parameter in seen:  # tied, or already in a block
            continue
        seen.add(parameter)
        place = places.get(prefix + name)
        described.append(
            Parameter(
                name=name,
                shape=tuple(parameter.shape),
                itemsize=parameter.element_size(),
                trainable=parameter.requires_grad,
                floating=parameter.is_floating_point(),
                owners=owners.get((prefix + name).rpartition(".")[0], ()),
                states=states_of(parameter) if parameter.requires_grad else (),
                updating=marks.updating(parameter) if parameter.requires_grad else None,
                tensor_dim=marks.tensor_dims.get(parameter),
                expert=marks.experts.get(parameter),
                num_fp8=marks.num_fp8.get(parameter, 0),
                trained_on=place.trained_on if place is not None else None,
                lent_to=place.lent_to if place is not None else (),
            )
        )
    return tuple(described)


def measured_state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, int]:
    """Bytes this rank really holds, by class: the local part of parameters, gradients, states, master and buffers."""
    parameters = list(model.parameters())
    updated = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
    own = set(parameters)
    masters = [parameter for parameter in updated if parameter not in own]
    gradients = {p.grad for p in (*parameters, *masters) if p.grad is not None}
    offloaded = OffloadedBytes(model, optimizer)
    average, on_host = average_of(optimizer), offloaded.copies | offloaded.parameters
    averages = average.of if average is not None else {}
    return {
        "parameters": _bytes(p for p in parameters if p not in offloaded.parameters),
        "master": _bytes(master for master in masters if master not in offloaded.copies),
        "gradients": _bytes(gradients - offloaded.gradients),
        "optimizer": _bytes(offloaded.states("device")),
        "buffers": _bytes(model.buffers()),
        "outer": _outer_bytes(optimizer),
        "average": _bytes(averages[p] for p in averages.keys() - on_host),
        "host_parameters": _bytes(offloaded.parameters),
        "host_master": 0 if offloaded.on_disk else _bytes(offloaded.copies),
        "host_gradients": _bytes(offloaded.gradients),
        "host_optimizer": _bytes(offloaded.states("host")),
        "host_average": _bytes(averages[p] for p in averages.keys() & on_host),
        "disk_master": _bytes(offloaded.copies) if offloaded.on_disk else 0,
        "disk_optimizer": _bytes(offloaded.states("disk")),
    }


def _outer_bytes(optimizer: Optimizer | None) -> int:
    if not is_outer(optimizer):
        return 0
    values = [value for state in optimizer.outer.state.values() for value in state.values()]
    states = [value for value in values if isinstance(value, torch.Tensor)]
    return _bytes([*optimizer.synchronizer.copy.of.values(), *states])


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local.numel() * local.element_size() for local in map(local_tensor, tensors))
