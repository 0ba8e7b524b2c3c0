"""Summaries of models and tensors over all ranks: ``inspect_model``, ``inspect_tensor``, ``format_summary``."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from meshwright.errors import InspectError
from meshwright.inspect.recording import (
    Record,
    Recorded,
    StagePass,
    number_names,
    order_names,
    place_records,
    recording_into,
    refuse_nesting,
)
from meshwright.inspect.statistics import Row, Shape, Table, entry, fill, is_first_of_team, merged
from meshwright.runtime import gather_from
from meshwright.runtime.torch_internals.modules import parameters_of

OUTLINE = "_meshwright_outline"
"""Key in the ``__dict__`` of a placeholder for a module on another rank: that module, on ``meta``."""

# Key in the ``__dict__`` of a model of which ranks hold different parts: all names in order.
_ORDER = "_names_in_order"
# Parts of names that wrapper modules add.
_TRANSPARENT = ("_orig_mod.", "_checkpoint_wrapped_module.")


def keep_name_order(model: nn.Module, names: Sequence[str]) -> None:
    """Set the order of all names of a model of which ranks hold different parts; alike on all of them."""
    model.__dict__[_ORDER] = tuple(names)


def inspect_model(
    model: nn.Module, pattern: str | None = None, prefix: str = "", *, param_name: str | None = None
) -> list[dict[str, Any]]:
    """Return the statistics of parameters with matching names, equal to those of whole tensors on one rank.

    Collective: ranks exchange one small table; no parameter is gathered. Parameters may be plain (equal on all ranks)
    or sharded over any mix of meshes. Ranks may hold different parts of the model, as pipeline stages do; the result
    covers all of them.

    Call it between steps. Weights that FSDP2 still has gathered after a forward are resharded first.

    Args:
        model: Plain, or prepared by ``accelerate``; names are those of the plain model. Tied parameters are listed
            under each of their names.
        pattern: ``fnmatch`` pattern for ``prefix + name``, such as ``"*.linear*"``; None matches all.
        prefix: Prefix of every name.
        param_name: BMTrain's name for ``pattern``.

    Returns:
        One dict per parameter in the model's order, equal on every rank, with keys name, shape, max, min, std, mean,
        grad_std, grad_mean.
        Standard deviations are unbiased (``torch.std``; 0.0 for a single element); gradient statistics are 0.0 where
        there is no gradient. Seed: BMTrain.

    Raises:
        InspectError: When a parameter is on the meta device or complex, a gradient is an unreduced partial sum, or both
            ``pattern`` and ``param_name`` are given.
    """
    wanted = _pattern(pattern, param_name)
    found = gather_from(lambda: (list(_names(model, prefix)), fill(_rows(model, wanted, prefix))))
    tables = [table for _, table in found]
    shapes = {name: shape for table in tables for name, shape in zip(table.names, table.shapes, strict=True)}
    known_order = [prefix + name for name in model.__dict__.get(_ORDER, ())]
    # Otherwise in rank 0's order, followed by names of other ranks.
    order = known_order or list(dict.fromkeys(name for names, _ in found for name in names))
    names, moments = merged(tables, one_team=True, order=order)
    return [entry(name, shapes[name], both, no_grad=0.0) for name, both in zip(names, moments, strict=True)]


def layer_norms(model: nn.Module) -> dict[str, tuple[float, float | None]]:
    """Return the 2-norms of the weights and of the gradients of every layer; collective, and equal on every rank.

    Call it between steps, where gradients are as the update took them: clipped, if they were.

    Args:
        model: Plain, or prepared by ``accelerate``.

    Returns:
        By the name of the module that has the parameters; None for a layer without gradients.
    """
    squares: dict[str, list[float]] = {}
    for each in inspect_model(model):
        count, total = math.prod(each["shape"]), squares.setdefault(each["name"].rpartition(".")[0], [0.0, 0.0])
        for index, kind in enumerate(("", "grad_")):
            total[index] += (count - 1) * each[f"{kind}std"] ** 2 + count * each[f"{kind}mean"] ** 2
    return {name: (math.sqrt(own), math.sqrt(grads) or None) for name, (own, grads) in squares.items()}


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
    """Yield all names of parameters, also of placeholders for other ranks' modules."""
    wrappers = _ddp_paths(model)
    for path, module in model.named_modules(remove_duplicate=False):
        names = [name for name, parameter in parameters_of(module).items() if parameter is not None]
        outline = module.__dict__.get(OUTLINE)
        if outline is not None:
            names += [name for name, _ in outline.named_parameters(remove_duplicate=False)]
        yield from (prefix + _plain_name(f"{path}.{name}" if path else name, wrappers) for name in names)


def _rows(model: nn.Module, pattern: str, prefix: str) -> list[Row]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gathered weights are copies in the compute dtype, and have no gradient.
            module.reshard()
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
    """Return a name without what DDP (at the paths ``wrappers``), torch.compile and torch's checkpoint wrapper add."""
    for path in reversed(wrappers):  # inner ones first, so that outer paths still match
        start = f"{path}." if path else ""
        if name.startswith(f"{start}module."):
            name = start + name[len(start) + len("module.") :]
    for wrapper in _TRANSPARENT:
        name = name.replace(wrapper, "")
    return name


# --- Summaries of recorded tensors.


class Inspector:
    """Tensors recorded inside one :func:`inspect_tensor`, in order; they and their graphs stay alive with it."""

    def __init__(self) -> None:
        self._entries: list[Record | StagePass] = []  # filled while the `with` block runs

    @property
    def summary(self) -> list[dict[str, Any]]:
        """This rank's records: name, summary_name, group, shape (here), requires_grad and ``tensor``.

        The tensors are differentiable, so a loss may use them. With DDP such a loss must reach every parameter, as the
        model's output does; else gradients stay unreduced. FSDP2 gathers weights again in backward only for a module's
        outputs: :mod:`meshwright.inspect.recording` says how a sharded module passes on its records.

        In a pipeline these are the records of this rank's stages, numbered among themselves. A schedule's micro-batches
        are concatenated and detached, with their gradients.
        """
        recorded, records = place_records(self._entries)
        return [
            {
                "name": record.name,
                "summary_name": name,
                "group": record.group,
                "shape": tuple(record.tensor.shape),
                "requires_grad": record.keeps_grad and record.tensor.requires_grad,
                "tensor": record.tensor,
            }
            for name, record in zip(number_names(recorded.labels), records, strict=True)
        ]

    def get_summary(self) -> list[dict[str, Any]]:
        """Return the statistics of every recorded tensor over all ranks.

        Call it after the ``with`` block, on every rank. Ranks exchange one small table. Tensors are read as they are
        now: called again after backward, it includes the gradients.

        In a pipeline it covers all stages, in the order of the model in one process: records before the blocks count on
        the first stage, records between two blocks on the stage of the first of them.

        Returns:
            One dict per tensor, equal on every rank, with keys name (``"{group.}{k}.{name}"`` for the k-th of its
            name), shape, max, min, std, mean, grad_std, grad_mean. Statistics are over the elements of all ranks:
            ``shape[0]`` is the sum over ranks (other dims as on rank 0), std is the unbiased one of all elements.
            BMTrain takes the root of the ranks' mean variance instead, which ignores the differences of their means.
            Gradient statistics are None where no rank has a gradient; gradients are as backward left them, loss scale
            included.

        Raises:
            InspectError: When ranks recorded different names, or a tensor has no statistics.
        """
        every = gather_from(self._table)
        names, of_ranks = order_names([recorded for recorded, _ in every])
        tables = [dataclasses.replace(table, names=own) for (_, table), own in zip(every, of_ranks, strict=True)]
        names, moments = merged(tables, one_team=False, order=names)
        return [
            entry(name, _over_ranks(name, tables), both, no_grad=None)
            for name, both in zip(names, moments, strict=True)
        ]

    def get_tensor(self, name: str, group: str | None = None, index: int | None = None) -> torch.Tensor | None:
        """Return this rank's ``index``-th tensor (or the first) of a name and group; None if there is none."""
        records = place_records(self._entries)[1]
        found = [record.tensor for record in records if (record.name, record.group) == (name, group)]
        wanted = 0 if index is None else index
        return found[wanted] if 0 <= wanted < len(found) else None

    def _table(self) -> tuple[Recorded, Table]:
        recorded, records = place_records(self._entries)
        rows = [
            Row(name, _rows_here(record.source), record.source, record.grad)
            for name, record in zip(number_names(recorded.labels), records, strict=True)
        ]
        return recorded, fill(rows)


def _rows_here(tensor: torch.Tensor) -> Shape:
    """Return the tensor's shape; its first dim counts on one rank of the team only."""
    shape = tuple(tensor.shape)
    return shape if is_first_of_team(tensor) or not shape else (0, *shape[1:])


def _over_ranks(name: str, tables: list[Table]) -> Shape:
    shapes = [table.shapes[table.names.index(name)] for table in tables if name in table.names]
    return (sum(shape[0] for shape in shapes if shape), *shapes[0][1:]) if shapes[0] else ()


@contextlib.contextmanager
def inspect_tensor() -> Iterator[Inspector]:
    """Record the tensors that the model's code passes to ``record_tensor`` inside the ``with`` block.

    Example::

        with inspect_tensor() as inspector:
            loss = model(batch)
            loss.backward()
        print_rank(format_summary(inspector.get_summary()))

    Raises:
        InspectError: When another one is active.
    """
    refuse_nesting()
    inspector = Inspector()
    with recording_into(inspector._entries):
        yield inspector


# --- Summaries as text.

_COLUMNS = ("name", "shape", "max", "min", "std", "mean", "grad_std", "grad_mean")
_LEFT_ALIGNED = 2  # name and shape
# Fixed, so that tables printed one after another line up; a cell that needs more widens its column.
_WIDTHS = (0, 18, *6 * (10,))


def format_summary(summary: Sequence[dict[str, Any]]) -> str:
    """Return a summary as an aligned table, numbers with four decimals.

    Args:
        summary: The result of ``inspect_model`` or ``Inspector.get_summary``, or several of them concatenated.

    Returns:
        A header and one line per tensor. Columns are BMTrain's: those after the name have a fixed width, and are wider
        only where a cell would be cut off.
    """
    rows = [[line[column] for column in _COLUMNS] for line in summary]
    cells = [_COLUMNS, *([f"{each:.4f}" if isinstance(each, float) else str(each) for each in row] for row in rows)]
    widths = [max(least, *map(len, column)) for least, column in zip(_WIDTHS, zip(*cells, strict=True), strict=True)]
    aligns = [str.ljust if index < _LEFT_ALIGNED else str.rjust for index in range(len(_COLUMNS))]
    lines = (
        "  ".join(align(cell, width) for align, cell, width in zip(aligns, row, widths, strict=True)) for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)
