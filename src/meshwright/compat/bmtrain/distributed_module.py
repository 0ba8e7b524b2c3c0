"""``DistributedModule``: BMTrain's sharded base class, and the root that prepares a model of them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from meshwright.compat.bmtrain.parameter import (
    ParameterRecord,
    keeping_records,
    mark_moved,
    record_of,
    recorded_parameter,
    was_moved,
)
from meshwright.errors import ModelError, join_names
from meshwright.nn.fsdp_units import (
    average_gradients,
    is_replicated_over_tensor_group,
    recover_in_forward,
    reshard_at_updates,
)
from meshwright.nn.host_exchange import exchange_on_host
from meshwright.nn.model_layout import (
    gather_parameter,
    gathered_piece,
    laid_out_like,
    sharded,
    tensor_dim,
    without_memory,
)
from meshwright.nn.module_structure import check_no_renorm, subclass_like
from meshwright.runtime import ShardAxes, replica_index, seed_replica, settings, shard_axes, world_size, zero_mesh


class DistributedModule(nn.Module):
    """A module in which ``self.weight`` is the full tensor, whichever rank holds which part of the parameter.

    Outside a :class:`Block`, every access of a ``DistributedParameter`` gathers it (one all-gather; its backward
    averages the gradient over the ranks and splits it), so read it once per forward. Inside a Block the parameters are
    gathered together when the Block runs. Gradients of ordinary parameters are averaged over the ranks. Of a parameter
    that is split over tensor ranks (``tp_split_dim``) it is the rank's piece.

    ``state_dict()`` holds the shards (DTensors, under ordinary names) without communication; ``load_state_dict`` takes
    these and full tensors. :func:`meshwright.save` writes full tensors.
    """

    takes_pieces = True
    """In a Block, FSDP2 leaves a DTensor where tensor ranks have pieces: this class takes the piece out of it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; the outermost one prepares what is below it on its first call."""
        prepare_root(self)
        return super().__call__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Gather parameters that gather on use; all else as ``nn.Module``."""
        value = super().__getattr__(name)
        if isinstance(value, DTensor):
            record = record_of(value)
            if record is not None and record.gather_on_use:
                return gather_parameter(value)
            if record is None and is_piece(self, name):
                return gathered_piece(value)
        return value

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        accept_full_tensors(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        with keeping_records(self.parameters(recurse=False)):
            return super()._apply(fn, recurse)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return the parameter itself, as ``named_parameters`` has it; ``nn.Module`` would gather it first."""
        path, _, name = target.rpartition(".")
        parameter = self.get_submodule(path)._parameters.get(name)
        return parameter if parameter is not None else super().get_parameter(target)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As ``nn.Module``, without gathering to find out whether the name is taken."""
        if name in self._parameters:
            self._parameters[name] = param
        else:
            super().register_parameter(name, param)


def distributed_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``cls`` that is a DistributedModule, with the same name."""
    return cls if issubclass(cls, DistributedModule) else subclass_like(cls, DistributedModule)


# --- Packing a module's parameters into one FSDP2 unit: gathered together, reduced together.

# In a module's __dict__: the names of its parameters of which a tensor rank computes with a piece.
_PIECES = "_meshwright_pieces"

_Place = tuple[str, nn.Module, str, nn.Parameter]
"""Where a parameter is: its full name, the module that owns it, its name there, itself."""


def shard_as_unit(module: nn.Module, *, reshard_after_forward: bool, axes: ShardAxes | None = None) -> None:
    """Make a module one FSDP2 unit over the ``zero`` axis, in place; sharded parameters are taken over as they are.

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
    """Put ``make(parameter)`` into all places of each parameter: what is tied stays tied."""
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
    """Return whether a Block's parameter is split over tensor ranks: gathered by FSDP2, it still is a DTensor."""
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
    """Replace full tensors in a state dict that is being loaded by this rank's parts, where parameters are sharded.

    Tensors of another shape stay as they are: torch reports them.
    """
    for key, parameter in module._parameters.items():
        value = state_dict.get(prefix + key)
        if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == parameter.shape:
            state_dict[prefix + key] = laid_out_like(parameter, value.detach())


# --- What the outermost module prepares on its first call: one FSDP2 root over all units, and averaged gradients.

# In a module's __dict__: plain parameters that were frozen so far. Its presence says that the module is prepared.
_FROZEN = "_meshwright_frozen"


def prepare_root(module: nn.Module) -> None:
    """Prepare everything below ``module`` for training, once; modules below it have nothing left to do.

    The units below get one FSDP2 root, so that they share streams and gather ahead of one another. Gradients of plain
    parameters are averaged over the ranks: nobody else would. The first forward of all gives every rank its own seed.
    """
    frozen = module.__dict__.get(_FROZEN)
    if frozen is None:
        _refuse_left_behind(module)
        check_no_renorm(module, world_size())
        _refuse_adapters_of_shards(module)
        for inner in module.modules():
            inner.__dict__[_FROZEN] = []
        # All units are sharded now, before the first forward: what is no DTensor is plain.
        frozen = [p for p in module.parameters() if not isinstance(p, DTensor) or _reduced_by_unit_only(p)]
        _share_root(module)
        _seed_this_rank()
    if frozen:
        module.__dict__[_FROZEN] = average_gradients(frozen, world_size())


def _reduced_by_unit_only(parameter: nn.Parameter) -> bool:
    """In a unit: outside, gathering reduces over all ranks."""
    record = record_of(parameter)
    return is_replicated_over_tensor_group(parameter) and not (record is not None and record.gather_on_use)


_seeded: object = None  # the world in which this rank has seeds of its own


def _seed_this_rank() -> None:
    """From the first forward of a world on, every replica draws its own dropout masks; models were made alike before.

    Ranks of a tensor group draw the same ones: some of what they drop from, all of them have.
    """
    global _seeded
    if world_size() > 1 and _seeded is not dist.group.WORLD:
        _seeded = dist.group.WORLD
        seed_replica(settings().seed, replica_index())


def _refuse_left_behind(module: nn.Module) -> None:
    """Refuse parameters that were tied to one that a Block has taken: they would train apart."""
    left = [name for name, parameter in module.named_parameters() if was_moved(parameter)]
    if left:
        raise ModelError(
            "A parameter was shared with a Block, which holds a sharded one in its place now",
            expected="parameters that are shared within one Block, or outside all Blocks",
            got=join_names(left),
            fix="share the whole module between Blocks, or keep the parameter out of them",
        )


def _refuse_adapters_of_shards(module: nn.Module) -> None:
    """Refuse the LoRA of peft that is as large as a rank's part: it takes sharded weights for tensor parallel ones."""
    wrong = []
    for path, layer in module.named_modules():
        base, downs, ups = (getattr(layer, name, None) for name in ("base_layer", "lora_A", "lora_B"))
        if isinstance(base, nn.Linear) and isinstance(downs, nn.ModuleDict) and isinstance(ups, nn.ModuleDict):
            off = any(getattr(each, "in_features", base.in_features) != base.in_features for each in downs.values())
            off |= any(getattr(each, "out_features", base.out_features) != base.out_features for each in ups.values())
            wrong += [path] if off else []
    if wrong:
        raise ModelError(
            "peft has made adapters for the shards of weights, and not for the weights",
            expected="adapters that are made before the model is wrapped",
            got=f"adapters of other sizes than their layers: {join_names(wrong)}",
            fix="change the order: BMTrainModelWrapper(get_peft_model(model, …))",
        )


def _share_root(module: nn.Module) -> None:
    units = [inner for inner in module.modules() if isinstance(inner, FSDPModule)]
    # A unit that ran on its own before is a root of its own, and stays one.
    if not units or module in units or any(has_run(unit) for unit in units):
        return
    # All parameters are ignored: those of the units are theirs, and the others gather on use. In a list, for torch 2.11
    # refuses what derives from ModuleList, even where it can be called.
    fully_shard([module], mesh=zero_mesh(), reshard_after_forward=False, ignored_params=set(module.parameters()))
    for inner in module.modules():
        link = getattr(inner, "link_prefetch", None)
        if link is not None:
            link()


def has_run(unit: FSDPModule) -> bool:
    """Return whether FSDP2 has run a unit's forward: what it set up then is fixed."""
    return fully_shard.state(unit)._is_root is not None  # type: ignore[attr-defined]
