"""``inspect_model``: the statistics of a model's parameters and gradients, however they are sharded."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from meshwright.errors import InspectError
from meshwright.inspect.table import Row, entry, fill, merged
from meshwright.runtime import gather_from

OUTLINE = "_meshwright_outline"
"""In the ``__dict__`` of a module that stands for one on another rank: that module, without memory."""

_ORDER = "_names_in_order"  # of a model of which ranks hold different parts
# Wrapper modules that a name passes through.
_TRANSPARENT = ("_orig_mod.", "_checkpoint_wrapped_module.")


def keep_name_order(model: nn.Module, names: Sequence[str]) -> None:
    """Notes the order of all names of a model of which ranks hold different parts, on all of them alike."""
    model.__dict__[_ORDER] = tuple(names)


def inspect_model(
    model: nn.Module, pattern: str | None = None, prefix: str = "", *, param_name: str | None = None
) -> list[dict[str, Any]]:
    """Statistics of the parameters whose names match, equal to those of the whole tensors on one rank.

    Collective: every rank calls it, and all together exchange one small table, whatever the number and size of the
    parameters; no parameter is gathered. Parameters may be plain (equal on all ranks) or sharded over any mix of
    meshes. Ranks may hold different parts of the model, as pipeline stages do: the result is of all of them.

    Call it between steps. FSDP2 modules that hold gathered weights after a forward are sharded again first.

    Args:
        model: Plain, or prepared by ``accelerate``; names are those of the plain model. Tied parameters are listed
            under each of their names.
        pattern: ``fnmatch`` pattern for ``prefix + name``, such as ``"*.linear*"``; None means all of them.
        prefix: Put before every name.
        param_name: BMTrain's name for ``pattern``.

    Returns:
        One dict per parameter in the model's order, equal on every rank, with keys name, shape, max, min, std, mean,
        grad_std, grad_mean.
        Standard deviations are unbiased (``torch.std``; 0.0 for a single element); gradient statistics are 0.0 where
        there is no gradient. Seed: BMTrain.

    Raises:
        InspectError: When a parameter is on the meta device or complex, or a gradient an unreduced partial sum; and
            for both ``pattern`` and ``param_name``.
    """
    wanted = _pattern(pattern, param_name)
    found = gather_from(lambda: (list(_names(model, prefix)), fill(_rows(model, wanted, prefix))))
    tables = [table for _, table in found]
    shapes = {name: shape for table in tables for name, shape in zip(table.names, table.shapes, strict=True)}
    told = [prefix + name for name in model.__dict__.get(_ORDER, ())]
    # Else rank 0's order, in which ranks that stand at other places of a model follow.
    order = told or list(dict.fromkeys(name for names, _ in found for name in names))
    names, moments = merged(tables, one_team=True, order=order)
    return [entry(name, shapes[name], both, no_grad=0.0) for name, both in zip(names, moments, strict=True)]


def _pattern(pattern: str | None, param_name: str | None) -> str:
    if pattern is not None and param_name is not None:
        raise InspectError(
            "inspect_model was given two patterns",
            expected="pattern, or BMTrain's name for it, param_name",
            got=f"{pattern!r} and {param_name!r}",
            fix="leave param_name out",
        )
    given = param_name if pattern is None else pattern
    return "*" if given is None else given


def _names(model: nn.Module, prefix: str) -> Iterator[str]:
    """All names of parameters, those of other ranks too where something stands for them here."""
    wrappers = _ddp_paths(model)
    for path, module in model.named_modules(remove_duplicate=False):
        names = [name for name, parameter in module._parameters.items() if parameter is not None]
        outline = module.__dict__.get(OUTLINE)
        if outline is not None:
            names += [name for name, _ in outline.named_parameters(remove_duplicate=False)]
        yield from (prefix + _plain_name(f"{path}.{name}" if path else name, wrappers) for name in names)


def _rows(model: nn.Module, pattern: str, prefix: str) -> list[Row]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # gathered weights are copies in another precision, and have no gradient
    wrappers = _ddp_paths(model)
    named = [
        (prefix + _plain_name(name, wrappers), parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    ]
    return [
        Row(name, tuple(parameter.shape), parameter, parameter.grad)
        for name, parameter in named
        if fnmatch.fnmatchcase(name, pattern)
    ]


def _ddp_paths(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, DistributedDataParallel)]


def _plain_name(name: str, wrappers: list[str]) -> str:
    """The name without what DDP (at the paths ``wrappers``), torch.compile and torch's checkpoint wrapper add."""
    for path in reversed(wrappers):  # inner ones first: outer paths stay as they were
        start = f"{path}." if path else ""
        if name.startswith(f"{start}module."):
            name = start + name[len(start) + len("module.") :]
    for wrapper in _TRANSPARENT:
        name = name.replace(wrapper, "")
    return name
