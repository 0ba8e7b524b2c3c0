"""A model as plain data: its distinct blocks, their parameters, and what an optimizer keeps for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.cost import Block, Parameter, StateTensor
from meshwright.errors import ConfigError
from meshwright.nn import class_name, class_names, find_blocks
from meshwright.optim import local_tensor
from meshwright.runtime import preserved_rng

_PROBE_SIZES = (3, 5, 7, 11, 13, 17)  # distinct, so that every dim of a state tensor can be told apart

StatesOf = Callable[[nn.Parameter], tuple[StateTensor, ...]]


def describe_blocks(
    model: nn.Module, states_of: StatesOf, tensor_dims: Mapping[nn.Parameter, int] | None = None
) -> tuple[Block, ...]:
    """Lists the distinct blocks of a model; what lies in no repeated block is the block ``outside``.

    Args:
        model: A plain module, not wrapped or sharded.
        states_of: What the optimizer keeps for a parameter.
        tensor_dims: The dim of each parameter that a tensor axis divides.
    """
    seen: set[nn.Parameter] = set()
    owners, dims = _owners(model), tensor_dims or {}
    entries: Counter[Block] = Counter()
    for path, module in find_blocks(model):
        parameters = _describe(module, path + ".", owners, seen, states_of, dims)
        if parameters:
            entries[Block(class_name(type(module)), 1, parameters)] += 1
    outside = _describe(model, "", owners, seen, states_of, dims)
    blocks = [Block(block.name, count, block.parameters) for block, count in entries.items()]
    return (*blocks, *([Block("outside", 1, outside)] if outside else []))


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
    tensor_dims: Mapping[nn.Parameter, int],
) -> tuple[Parameter, ...]:
    described = []
    for name, parameter in module.named_parameters():
        if parameter in seen:  # tied, or already in a block
            continue
        seen.add(parameter)
        described.append(
            Parameter(
                name=name,
                shape=tuple(parameter.shape),
                itemsize=parameter.element_size(),
                trainable=parameter.requires_grad,
                floating=parameter.is_floating_point(),
                owners=owners.get((prefix + name).rpartition(".")[0], ()),
                states=states_of(parameter) if parameter.requires_grad else (),
                tensor_dim=tensor_dims.get(parameter),
            )
        )
    return tuple(described)


def probe_optimizer(optim_func: Callable[[Any], Optimizer] | None, device: torch.device) -> StatesOf:
    """Finds what an optimizer keeps per parameter by letting it update tiny ones of the same rank and dtype.

    Args:
        optim_func: Builds the optimizer from a list of parameters; None keeps nothing.
        device: Where the tiny parameters live.

    Returns:
        A function from a parameter to its state tensors.
    """
    known: dict[tuple[int, torch.dtype], tuple[StateTensor, ...]] = {}

    def states_of(parameter: nn.Parameter) -> tuple[StateTensor, ...]:
        if optim_func is None:
            return ()
        kind = (parameter.dim(), parameter.dtype)
        if kind not in known:
            known[kind] = _probe(optim_func, *kind, device)
        return known[kind]

    return states_of


def _probe(
    optim_func: Callable[[Any], Optimizer], num_dims: int, dtype: torch.dtype, device: torch.device
) -> tuple[StateTensor, ...]:
    sizes = _PROBE_SIZES[:num_dims]
    with preserved_rng(), torch.enable_grad():
        tiny = nn.Parameter(torch.ones(sizes, dtype=dtype, device=device))
        tiny.grad = torch.full_like(tiny, 0.5)
        optimizer = optim_func([tiny])
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                "optim_func did not return an optimizer",
                expected="a torch.optim.Optimizer",
                got=type(optimizer).__name__,
                fix="pass a class such as torch.optim.AdamW, or a function (parameters, **optim_args) -> Optimizer",
            )
        optimizer.step()
    tensors = [value for value in optimizer.state[tiny].values() if isinstance(value, torch.Tensor)]
    return tuple(StateTensor(_dims_of(tensor.shape, sizes), tensor.element_size()) for tensor in tensors)


def _dims_of(shape: Iterable[int], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Which dims of the parameter a state tensor has; dims of size one are none."""
    return tuple(sizes.index(size) for size in shape if size in sizes)


def measured_state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, int]:
    """Bytes this rank really holds, by class: the local part of parameters, gradients, states, master and buffers."""
    parameters = list(model.parameters())
    updated = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
    own = set(parameters)
    masters = [parameter for parameter in updated if parameter not in own]
    states = [v for state in (optimizer.state.values() if optimizer else ()) for v in state.values()]
    gradients = {p.grad for p in (*parameters, *masters) if p.grad is not None}
    return {
        "parameters": _bytes(parameters),
        "master": _bytes(masters),
        "gradients": _bytes(gradients),
        "optimizer": _bytes(value for value in states if isinstance(value, torch.Tensor)),
        "buffers": _bytes(model.buffers()),
    }


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local.numel() * local.element_size() for local in map(local_tensor, tensors))
