"""``DistributedModule``: BMTrain's base class of sharded modules.

Three parts: the class, which gathers a parameter when it is read; :func:`shard_as_unit`, which packs a module's
parameters into one FSDP2 unit; and :func:`prepare_root`, which makes one FSDP2 tree of a model at its first forward.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
from meshwright.runtime.torch_internals.fsdp import is_root
from meshwright.runtime.torch_internals.modules import parameters_of


class DistributedModule(nn.Module):
    """A module in which ``self.weight`` is the full tensor, although every rank holds a part of the parameter.

    Outside a ``Block``, every access of a ``DistributedParameter`` gathers it (one all-gather; its backward averages
    the gradient over the ranks and splits it), so read it once per forward. Inside a Block the parameters are gathered
    together when the Block runs. Gradients of ordinary parameters are averaged over the ranks. A parameter
    that is split over tensor ranks (``tp_split_dim``) reads as the rank's piece.

    ``state_dict()`` holds the shards (DTensors, under ordinary names) without communication; ``load_state_dict`` takes
    these and full tensors. :func:`meshwright.save` writes full tensors.
    """

    takes_pieces = True
    """In a Block, FSDP2 leaves a DTensor of a split parameter; this class takes the rank's piece out of it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; the outermost one prepares all modules below it on its first call."""
        prepare_root(self)
        return super().__call__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute, gathered if it is a parameter outside a Block."""
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
        """Return the sharded parameter, as ``named_parameters`` has it; ``nn.Module`` would read and so gather it."""
        path, _, name = target.rpartition(".")
        parameter = self.get_submodule(path)._parameters.get(name)
        return parameter if parameter is not None else super().get_parameter(target)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter as ``nn.Module`` does, but without reading the old one, which would gather it."""
        if name in self._parameters:
            self._parameters[name] = param
        else:
            super().register_parameter(name, param)


def distributed_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of ``cls`` under its name that is a DistributedModule."""
    return cls if issubclass(cls, DistributedModule) else subclass_like(cls, DistributedModule)


# --- One FSDP2 unit out of a module's parameters, which are gathered together and reduced together.

# In a module's __dict__: the names of its parameters that are split over tensor ranks.
_PIECES = "_meshwright_pieces"

_Place = tuple[str, nn.Module, str, nn.Parameter]
"""A place of a parameter: its full name, the module that owns it, its name there, and the parameter."""


def shard_as_unit(module: nn.Module, *, reshard_after_forward: bool, axes: ShardAxes | None = None) -> None:
    """Make a module one FSDP2 unit over the ``zero`` axis, in place, without gathering anything.

    FSDP2 shards whole parameters. It is given ones on ``meta``, whose shards are then replaced by the parts that this
    rank holds. Plain parameters, equal on all ranks, are sharded here.

    Args:
        module: Its parameters share one dtype, or sit in submodules that do.
        reshard_after_forward: Whether they are freed after forward and gathered again in backward (ZeRO-3).
        axes: The axes of a pipeline stage, over which distributed parameters are sharded already; None for all ranks.

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
        owner.register_load_state_dict_pre_hook(accept_full_tensors)


def _assign(places: list[_Place], make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Put ``make(parameter)`` into all places of each parameter; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for _, owner, key, parameter in places:
        if id(parameter) not in made:
            made[id(parameter)] = make(parameter)
        # Not into _parameters directly: recurrent modules have a second list.
        setattr(owner, key, made[id(parameter)])


def _places(module: nn.Module) -> Iterator[_Place]:
    for path, owner in module.named_modules(remove_duplicate=True):
        for key, parameter in parameters_of(owner).items():
            if parameter is not None:
                yield f"{path}.{key}" if path else key, owner, key, parameter


def is_piece(owner: nn.Module, name: str) -> bool:
    """Return whether a Block's parameter is split over tensor ranks; gathered by FSDP2, it is a DTensor still."""
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
    check_no_scalars("A Block holds scalar parameters, which", [(name, parameter) for name, _, _, parameter in places])
    foreign = [name for name, _, _, p in places if was_moved(p) or (isinstance(p, DTensor) and not _gathers(p))]
    if foreign or any(isinstance(inner, FSDPModule) for inner in module.modules()):
        raise ModelError(
            "A Block holds parameters that are sharded in another Block",
            expected="parameters of its own; Blocks do not nest and do not share single parameters",
            got=join_names(foreign) if foreign else "a Block inside it",
            fix="put shared parameters outside the Blocks, or use the whole module in several places",
        )


def check_no_scalars(what: str, named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Check that no parameter is 0-dim, for it could not be split over ranks.

    Args:
        what: Beginning of the error's sentence.
        named: Names and parameters.

    Raises:
        ModelError: Naming the scalars.
    """
    scalars = [name for name, parameter in named if parameter.dim() == 0]
    if scalars:
        raise ModelError(
            f"{what} cannot be split over ranks",
            expected="parameters with at least one dimension",
            got=join_names(scalars),
            fix="make them tensors of shape (1,)",
        )


def _check_owners(places: list[_Place]) -> None:
    # FSDP2 leaves a DTensor of a split parameter in the module; only a DistributedModule takes the piece out.
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
    # FSDP2 reduces the gradients of a unit in one buffer, so modules of all dtypes but one need a unit each.
    owners: dict[nn.Module, set[torch.dtype]] = {}
    for _, owner, _, parameter in places:
        if parameter.requires_grad:
            owners.setdefault(owner, set()).add(parameter.dtype)
    numel: Counter[torch.dtype] = Counter()
    for owner, dtypes in owners.items():
        if len(dtypes) > 1:
            raise _mixed(owner)
        numel[next(iter(dtypes))] += sum(parameter.numel() for parameter in owner.parameters(recurse=False))
    rarer = {dtype for dtype, _ in numel.most_common()[1:]}
    units = [owner for owner, dtypes in owners.items() if dtypes & rarer]
    for owner in units:
        if owner is module or len({p.dtype for p in owner.parameters() if p.requires_grad}) > 1:
            raise _mixed(owner)
    return units


def _mixed(module: nn.Module) -> ModelError:
    return ModelError(
        "A module inside a Block mixes parameters of different dtypes",
        expected="one dtype per module (modules of a Block may differ)",
        got=f"{join_names(sorted({str(p.dtype) for p in module.parameters()}))} in {type(module).__name__}",
        fix="cast the module, or move the parameters of one dtype into a module of their own",
    )


def accept_full_tensors(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Shard the full tensors of a state dict that is being loaded, as the module's parameters are sharded.

    Tensors of another shape stay as they are; torch reports them.
    """
    for key, parameter in parameters_of(module).items():
        value = state_dict.get(prefix + key)
        if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == parameter.shape:
            state_dict[prefix + key] = laid_out_like(parameter, value.detach())


# --- The first call of the outermost module.

# In the __dict__ of a prepared module: plain parameters that have been frozen so far.
_FROZEN = "_meshwright_frozen"


def prepare_root(module: nn.Module) -> None:
    """Prepare ``module`` and all modules below it for training, once.

    The units below get one FSDP2 root, so that they share streams and gather ahead of one another. From now on backward
    averages the gradients of plain parameters over the ranks. The first forward of all gives every rank its own seed.
    """
    frozen = module.__dict__.get(_FROZEN)
    if frozen is None:
        _refuse_left_behind(module)
        check_no_renorm(module, world_size())
        _refuse_adapters_of_shards(module)
        for inner in module.modules():
            inner.__dict__[_FROZEN] = []
        # All units are sharded by now, before the first forward: a parameter that is no DTensor is plain.
        frozen = [p for p in module.parameters() if not isinstance(p, DTensor) or _is_reduced_by_unit_only(p)]
        _share_root(module)
        _seed_this_rank()
    if frozen:
        module.__dict__[_FROZEN] = average_gradients(frozen, world_size())


def _is_reduced_by_unit_only(parameter: nn.Parameter) -> bool:
    # In a unit FSDP2 reduces over the ``zero`` axis; outside, gather_parameter reduces over all ranks.
    record = record_of(parameter)
    return is_replicated_over_tensor_group(parameter) and not (record is not None and record.gather_on_use)


_seeded: object = None  # the world in which this rank has seeds of its own


def _seed_this_rank() -> None:
    # Until the first forward all ranks draw the same, so that models are initialised alike. From then on every replica
    # draws its own dropout masks; ranks of a tensor group draw the same ones, for some activations all of them have.
    global _seeded
    if world_size() > 1 and _seeded is not dist.group.WORLD:
        _seeded = dist.group.WORLD
        seed_replica(settings().seed, replica_index())


def _refuse_left_behind(module: nn.Module) -> None:
    # A parameter that was tied to one that a Block has replaced would train apart from it.
    left = [name for name, parameter in module.named_parameters() if was_moved(parameter)]
    if left:
        raise ModelError(
            "A parameter was shared with a Block, which holds a sharded one in its place now",
            expected="parameters that are shared within one Block, or outside all Blocks",
            got=join_names(left),
            fix="share the whole module between Blocks, or keep the parameter out of them",
        )


def _refuse_adapters_of_shards(module: nn.Module) -> None:
    # peft takes sharded weights for tensor-parallel ones, and makes its LoRA as large as a rank's part.
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
    # A unit that has run on its own is a root, and stays one.
    if not units or module in units or any(has_run(unit) for unit in units):
        return
    # All parameters are ignored: units shard their own, and the others are gathered when they are read. In a list, for
    # torch 2.11 rejects subclasses of ModuleList, even callable ones.
    fully_shard([module], mesh=zero_mesh(), reshard_after_forward=False, ignored_params=set(module.parameters()))
    for inner in module.modules():
        link = getattr(inner, "link_prefetch", None)
        if link is not None:
            link()


def has_run(unit: FSDPModule) -> bool:
    """Return whether FSDP2 has run a unit's forward, which fixes its buffers and its root."""
    return is_root(fully_shard.state(unit)) is not None  # type: ignore[attr-defined]
