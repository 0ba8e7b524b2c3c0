"""Packing a module's parameters into one FSDP2 unit: gathered together, reduced together."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from meshwright.errors import ModelError, join_names
from meshwright.nn.fresh_weights import reshard_at_updates
from meshwright.nn.fsdp_exchange import exchange_on_host
from meshwright.nn.fsdp_failure import recover_in_forward
from meshwright.nn.layout import laid_out_like, sharded, tensor_dim, without_memory
from meshwright.nn.parameter import ParameterRecord, mark_moved, record_of, recorded_parameter, was_moved
from meshwright.runtime import ShardAxes, shard_axes

# In a module's __dict__: the names of its parameters of which a tensor rank computes with a piece.
_PIECES = "_meshwright_pieces"

_Place = tuple[str, nn.Module, str, nn.Parameter]
"""Where a parameter is: its full name, the module that owns it, its name there, itself."""


def shard_as_unit(module: nn.Module, *, reshard_after_forward: bool, axes: ShardAxes | None = None) -> None:
    """Makes a module one FSDP2 unit over the ``zero`` axis, in place; sharded parameters are taken over as they are.

    FSDP2 wants whole parameters to shard. It gets ones without memory (``meta``), and afterwards the parts that this
    rank holds: nothing is ever gathered. Plain parameters are split here, of equal values on all ranks.

    Args:
        module: Its parameters share one dtype, or sit in submodules that do.
        reshard_after_forward: Whether they are freed after forward and gathered again in backward (ZeRO-3).
        axes: Those of a pipeline stage, on which distributed parameters are already; None for all ranks.

    Raises:
        ModelError: For scalar parameters, ones that another unit shards, and mixed dtypes within a module.
    """
    axes = axes or shard_axes()
    places = list(_places(module))
    _check(module, places)
    _check_owners(places)
    small_units = _units_of_rarer_dtypes(module, places)
    for _, owner, key, parameter in places:
        if tensor_dim(parameter) is not None:
            owner.__dict__.setdefault(_PIECES, set()).add(key)
    _assign(places, functools.partial(without_memory, axes=axes))
    for unit in (*small_units, module):
        fully_shard(unit, mesh=axes.zero, reshard_after_forward=reshard_after_forward)
        recover_in_forward(unit)
    reshard_at_updates((*small_units, module))
    if axes.zero.device_type == "cpu":
        exchange_on_host(module, is_block=True)
    _assign(places, functools.partial(_inside_unit, axes=axes))
    for _, _, _, parameter in places:
        mark_moved(parameter)
    for owner in {owner for _, owner, _, _ in places}:
        owner.register_load_state_dict_pre_hook(_load_hook)


def _assign(places: list[_Place], make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Puts ``make(parameter)`` into all places of each parameter: what is tied stays tied."""
    made: dict[int, nn.Parameter] = {}
    for _, owner, key, parameter in places:
        if id(parameter) not in made:
            made[id(parameter)] = make(parameter)
        setattr(owner, key, made[id(parameter)])  # not into _parameters: recurrent modules keep a second list


def _places(module: nn.Module) -> Iterator[_Place]:
    """Every place of every parameter."""
    for path, owner in module.named_modules(remove_duplicate=True):
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                yield f"{path}.{key}" if path else key, owner, key, parameter


def is_piece(owner: nn.Module, name: str) -> bool:
    """Whether a Block's parameter is split over tensor ranks: gathered by FSDP2, it still is a DTensor."""
    return name in owner.__dict__.get(_PIECES, ())


def _inside_unit(parameter: nn.Parameter, axes: ShardAxes) -> nn.Parameter:
    record = record_of(parameter)
    part = parameter.detach()
    part = part if isinstance(part, DTensor) else sharded(part, axes)
    record = ParameterRecord(
        record.init_method if record else None, record.group if record else None, gather_on_use=False
    )
    return recorded_parameter(part, parameter.requires_grad, record)


def _check(module: nn.Module, places: list[_Place]) -> None:
    scalars = [name for name, _, _, parameter in places if parameter.dim() == 0]
    if scalars:
        raise ModelError(
            "A Block holds scalar parameters, which cannot be split over ranks",
            expected="parameters with at least one dimension",
            got=join_names(scalars),
            fix="make them tensors of shape (1,)",
        )
    foreign = [name for name, _, _, p in places if was_moved(p) or (isinstance(p, DTensor) and not _gathers(p))]
    if foreign or any(isinstance(inner, FSDPModule) for inner in module.modules()):
        raise ModelError(
            "A Block holds parameters that are sharded in another Block",
            expected="parameters of its own; Blocks do not nest and do not share single parameters",
            got=join_names(foreign) if foreign else "a Block inside it",
            fix="put shared parameters outside the Blocks, or use the whole module in several places",
        )


def _check_owners(places: list[_Place]) -> None:
    """FSDP2 leaves a DTensor in the module where ranks have pieces; only a DistributedModule takes the piece out."""
    foreign = [name for name, owner, _, p in places if tensor_dim(p) is not None and not hasattr(owner, "takes_pieces")]
    if foreign:
        raise ModelError(
            "An ordinary module in a Block holds parameters that are split over tensor ranks",
            expected="a DistributedModule around them",
            got=join_names(foreign),
            fix="derive the module that holds them from meshwright.DistributedModule",
        )


def _gathers(parameter: nn.Parameter) -> bool:
    record = record_of(parameter)
    return record is not None and record.gather_on_use


def _units_of_rarer_dtypes(module: nn.Module, places: list[_Place]) -> list[nn.Module]:
    """FSDP2 reduces the gradients of a unit in one buffer, so modules of all dtypes but one get a unit each."""
    owners: dict[nn.Module, set[torch.dtype]] = {}
    for _, owner, _, parameter in places:
        if parameter.requires_grad:
            owners.setdefault(owner, set()).add(parameter.dtype)
    numel: Counter[torch.dtype] = Counter()
    for owner, dtypes in owners.items():
        if len(dtypes) > 1:
            raise _mixed(owner)
        numel[next(iter(dtypes))] += _own_numel(owner)
    rarer = {dtype for dtype, _ in numel.most_common()[1:]}
    units = [owner for owner, dtypes in owners.items() if dtypes & rarer]
    for owner in units:
        if owner is module or len({p.dtype for p in owner.parameters() if p.requires_grad}) > 1:
            raise _mixed(owner)
    return units


def _own_numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))


def _mixed(module: nn.Module) -> ModelError:
    return ModelError(
        "A module inside a Block mixes parameters of different dtypes",
        expected="one dtype per module (modules of a Block may differ)",
        got=f"{join_names(sorted({str(p.dtype) for p in module.parameters()}))} in {type(module).__name__}",
        fix="cast the module, or move the parameters of one dtype into a module of their own",
    )


def _load_hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    accept_full_tensors(module, state_dict, prefix)


def accept_full_tensors(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Replaces full tensors in a state dict that is being loaded by this rank's parts, where parameters are sharded.

    Tensors of another shape stay as they are: torch reports them.
    """
    for key, parameter in module._parameters.items():
        value = state_dict.get(prefix + key)
        if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == parameter.shape:
            state_dict[prefix + key] = laid_out_like(parameter, value.detach())
