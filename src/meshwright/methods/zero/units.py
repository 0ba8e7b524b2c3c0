"""Which modules are gathered together: the units of sharding, and what must stay out of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from meshwright.errors import ModelError, join_names
from meshwright.methods.zero.config import ZeroMethod
from meshwright.nn import class_name, find_blocks, modules_of, outermost
from meshwright.strategy import Strategy

KEPT_IN_HALF = class_name(_NormBase)
"""The modules that compute beside running statistics, which sharding leaves in fp32 while it gathers in half."""

_REDUCED_TOGETHER = ("pipeline", "expert")  # axes beside which no gradient is averaged apart from the others
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # have no forward of their own


@dataclass(frozen=True)
class Units:
    """What FSDP2 is told: units inside the model (outer before inner), and parameters that stay whole."""

    modules: list[tuple[str, nn.Module]]
    trainable: list[nn.Module]  # gathered together as one group when wrap_trainable_outmost asks for it
    ignored: set[nn.Parameter]
    kept: set[nn.Parameter] = field(default_factory=set)  # of them, those that no key asks for


def units_of(config: ZeroMethod, model: nn.Module, strategy: Strategy, sizes: Mapping[str, int]) -> Units:
    """The units of a config in a strategy on a mesh.

    Args:
        config: The method's keys.
        model: Plain, or as the methods before have left it.
        strategy: Resolved; it says in which precision units are gathered.
        sizes: Of the mesh axes.

    Raises:
        ModelError: As :func:`choose_units` does, and for parameters that must stay whole beside an axis that does not
            allow it.
    """
    units = choose_units(config, model, in_half=_gathers_in_half(config, strategy))
    beside = [axis for axis in _REDUCED_TOGETHER if sizes.get(axis, 1) > 1]
    if units.kept and beside:
        raise ModelError(
            f"{config.method_name}: some parameters have to stay whole, which does not go together with {beside[0]}",
            expected="no scalar parameters, and under mixed precision no batch normalisation",
            got=join_names(name for name, parameter in model.named_parameters() if parameter in units.kept),
            fix=f"leave out the sharding method or the axis {beside[0]}, or make scalars tensors of shape (1,)",
        )
    return units


def choose_units(config: ZeroMethod, model: nn.Module, *, in_half: bool = False) -> Units:
    """Finds the units that a config asks for, and checks that FSDP2 can shard them.

    Scalars and empty parameters stay whole: there is nothing to divide. So do, where units are gathered in half, the
    few numbers of modules that compute with running statistics: these stay in fp32, and torch normalises in one
    precision.

    Raises:
        ModelError: For classes that are not in the model, and parameters shared between units
            or with sparse gradients.
    """
    ignored_modules = list(outermost(modules_of(model, config.atorch_ignored_cls, method=config.method_name)))
    asked = {parameter for _, module in ignored_modules for parameter in module.parameters()}
    kept = _kept_whole(model, in_half=in_half) - asked
    ignored = asked | kept
    units = [
        (path, module)
        for path, module in _candidates(config, model)
        if any(parameter not in ignored for parameter in module.parameters())
    ]
    trainable = _trainable_modules(model, ignored) if config.wrap_trainable_outmost else []
    _check_parameters(config.method_name, model, units, ignored)
    return Units(units, trainable, ignored, kept)


def _gathers_in_half(config: ZeroMethod, strategy: Strategy) -> bool:
    """Whether parameters are gathered in half beside buffers that are not: ``half`` casts these too."""
    asked = config.mixed_precision.param_dtype if config.mixed_precision is not None else None
    lower = asked != "fp32" if asked is not None else "amp_native" in strategy
    return lower and "half" not in strategy


def _kept_whole(model: nn.Module, *, in_half: bool) -> set[nn.Parameter]:
    kept = {parameter for parameter in model.parameters() if not parameter.shape or not parameter.numel()}
    for module in model.modules() if in_half else ():
        if isinstance(module, _NormBase):
            kept.update(module.parameters())
    return kept


def unit_of(name: str, blocks: list[str]) -> str:
    """The path of the block that a parameter lies in; ``""`` where it is in none."""
    return next((path for path in blocks if name.startswith(path + ".")), "")


def _candidates(config: ZeroMethod, model: nn.Module) -> list[tuple[str, nn.Module]]:
    if config.atorch_wrap_cls is not None:
        return modules_of(model, config.atorch_wrap_cls, method=config.method_name)
    if config.atorch_size_based_min_num_params is not None:
        found: list[tuple[str, nn.Module]] = []
        _by_size("", model, config.atorch_size_based_min_num_params, found)
        return [(path, module) for path, module in reversed(found) if path]
    return find_blocks(model)


def _by_size(path: str, module: nn.Module, minimum: int, found: list[tuple[str, nn.Module]]) -> int:
    """Collects modules, inner first, that hold ``minimum`` parameters not yet in a unit; returns what is left over."""
    left = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    for name, child in module.named_children():
        left += _by_size(f"{path}.{name}" if path else name, child, minimum, found)
    if left >= minimum and not isinstance(module, _CONTAINERS):
        found.append((path, module))
        return 0
    return left


def _trainable_modules(model: nn.Module, ignored: set[nn.Parameter]) -> list[nn.Module]:
    """Outermost modules all of whose parameters train, in a model in which some are frozen."""
    if all(parameter.requires_grad for parameter in model.parameters()):
        return []
    found = []
    for path, module in model.named_modules():
        parameters = list(module.parameters())
        trains = parameters and all(p.requires_grad and p not in ignored for p in parameters)
        if path and trains and not isinstance(module, _CONTAINERS):
            found.append((path, module))
    return [module for _, module in outermost(found)]


def _check_parameters(
    method: str, model: nn.Module, units: list[tuple[str, nn.Module]], ignored: set[nn.Parameter]
) -> None:
    _check_dense(method, model, ignored)
    home: dict[nn.Parameter, str] = {}
    first = {module: path for path, module in units}  # one that is listed several times is one unit
    paths = {path: first[each] for path, each in model.named_modules(remove_duplicate=False) if each in first}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = [path for path in paths if name.startswith(path + ".")]
        unit = paths[max(inside, key=len)] if inside else ""
        if parameter not in ignored and home.setdefault(parameter, unit) != unit:
            raise ModelError(
                f"{method}: a parameter is shared between modules that are gathered separately",
                expected="tied parameters within one unit, or all of them outside the units",
                got=f"{name} in {unit or 'the model'} and in {home[parameter] or 'the model'}",
                fix="name classes with atorch_wrap_cls that hold both, or neither",
            )
    _check_dtypes(method, model, units, ignored)


def _check_dense(method: str, model: nn.Module, ignored: set[nn.Parameter]) -> None:
    """FSDP2 packs gradients into one buffer, which takes no sparse ones."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight not in ignored:
            raise ModelError(
                f"{method}: a layer has sparse gradients, which cannot be sharded",
                expected="dense gradients",
                got=f"{path or type(module).__name__} with sparse=True",
                fix="build it with sparse=False, or train without a method that shards",
            )


def _check_dtypes(
    method: str, model: nn.Module, units: list[tuple[str, nn.Module]], ignored: set[nn.Parameter]
) -> None:
    """FSDP2 packs a unit into one buffer: its parameters must share a dtype."""
    in_units = {parameter for _, module in units for parameter in module.parameters()}
    groups: list[tuple[str, set[nn.Parameter]]] = [(path, set(module.parameters())) for path, module in units]
    groups.append(("the model outside its blocks", set(model.parameters()) - in_units))
    for path, parameters in groups:
        dtypes: set[torch.dtype] = {parameter.dtype for parameter in parameters - ignored}
        if len(dtypes) > 1:
            raise ModelError(
                f"{method}: parameters of one unit have different dtypes",
                expected="one dtype per unit",
                got=f"{join_names(sorted(map(str, dtypes)))} in {path}",
                fix="cast them alike, for example with model.float(), or keep a class whole with atorch_ignored_cls",
            )
