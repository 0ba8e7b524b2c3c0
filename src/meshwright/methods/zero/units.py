"""Which modules are gathered together: the units of sharding, and what must stay out of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from meshwright.errors import ModelError, join_names
from meshwright.methods.zero.config import ZeroMethod
from meshwright.nn import find_blocks, modules_of, outermost

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # have no forward of their own


@dataclass(frozen=True)
class Units:
    """What FSDP2 is told: units inside the model (outer before inner), and parameters that stay whole."""

    modules: list[tuple[str, nn.Module]]
    trainable: list[nn.Module]  # gathered together as one group when wrap_trainable_outmost asks for it
    ignored: set[nn.Parameter]


def choose_units(config: ZeroMethod, model: nn.Module) -> Units:
    """Finds the units that a config asks for, and checks that FSDP2 can shard them.

    Raises:
        ModelError: For classes that are not in the model, scalar parameters, and parameters shared between units.
    """
    ignored_modules = list(outermost(modules_of(model, config.atorch_ignored_cls, method=config.method_name)))
    ignored = {parameter for _, module in ignored_modules for parameter in module.parameters()}
    units = [
        (path, module)
        for path, module in _candidates(config, model)
        if any(parameter not in ignored for parameter in module.parameters())
    ]
    trainable = _trainable_modules(model, ignored) if config.wrap_trainable_outmost else []
    _check_parameters(config.method_name, model, units, ignored)
    return Units(units, trainable, ignored)


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
    scalars = [name for name, parameter in model.named_parameters() if not parameter.shape and parameter not in ignored]
    if scalars:
        raise ModelError(
            f"{method}: scalar parameters cannot be sharded",
            expected="parameters with at least one dimension",
            got=join_names(scalars),
            fix="make them tensors of shape (1,), or keep their modules whole with atorch_ignored_cls",
        )
    home: dict[nn.Parameter, str] = {}
    paths = [path for path, _ in units]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = [path for path in paths if name.startswith(path + ".")]
        unit = max(inside, key=len) if inside else ""
        if parameter not in ignored and home.setdefault(parameter, unit) != unit:
            raise ModelError(
                f"{method}: a parameter is shared between modules that are gathered separately",
                expected="tied parameters within one unit, or all of them outside the units",
                got=f"{name} in {unit or 'the model'} and in {home[parameter] or 'the model'}",
                fix="name classes with atorch_wrap_cls that hold both, or neither",
            )
    _check_dtypes(method, model, units, ignored)


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
