"""``inspect_tensor``: collects the tensors that a model records, and summarises them over all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from meshwright.inspect.passes import Recorded, in_order, numbered, placed
from meshwright.inspect.recording import Record, StagePass, recording_into, refuse_nesting
from meshwright.inspect.shares import is_first_of_team
from meshwright.inspect.table import Row, Shape, Table, entry, fill, merged
from meshwright.runtime import gather_from


class Inspector:
    """The tensors recorded inside one :func:`inspect_tensor`, in the order of their recording.

    It keeps them, and the graphs they are part of, alive.
    """

    def __init__(self) -> None:
        self._entries: list[Record | StagePass] = []  # filled while the `with` block runs

    @property
    def summary(self) -> list[dict[str, Any]]:
        """This rank's records: name, summary_name, group, shape (here), requires_grad and ``tensor``.

        The tensors are differentiable: a loss may be built from them and go backward. DDP asks that such a loss
        reaches every parameter, as the model's output does; else it leaves gradients unreduced. FSDP2 gathers weights
        again in backward only for a module's outputs: see :mod:`meshwright.inspect.recording` for how a sharded module
        passes on what is recorded inside it.

        Of a pipeline these are the records of this rank's stages, numbered among themselves. A schedule's micro-batches
        are put together, detached, with their gradients.
        """
        told, records = placed(self._entries)
        return [
            {
                "name": record.name,
                "summary_name": name,
                "group": record.group,
                "shape": tuple(record.tensor.shape),
                "requires_grad": record.keeps_grad and record.tensor.requires_grad,
                "tensor": record.tensor,
            }
            for name, record in zip(numbered(told.labels), records, strict=True)
        ]

    def get_summary(self) -> list[dict[str, Any]]:
        """Statistics of every recorded tensor over all ranks; call it after the ``with`` block, on every rank.

        Costs one exchange of a small table. It reads the tensors as they are now: called again after backward, it
        has the gradients.

        Of a pipeline all stages' records are there, in the order of the model in one process: what is recorded before
        the blocks counts on the first stage, what is between two blocks on the stage of the first of them.

        Returns:
            One dict per tensor, equal on every rank, with keys name (``"{group.}{k}.{name}"`` for the k-th of its
            name), shape, max, min, std, mean, grad_std, grad_mean. The elements of all ranks are taken together:
            ``shape[0]`` is the sum over ranks (other dims as on rank 0), std is the unbiased one of all elements.
            BMTrain takes the root of the ranks' mean variance instead, which leaves out how far their means are
            apart. Gradient statistics are None where no rank has a gradient; gradients are as backward left them,
            loss scale included.

        Raises:
            InspectError: When ranks recorded different names, or a tensor has no statistics.
        """
        every = gather_from(self._told)
        names, of_ranks = in_order([recorded for recorded, _ in every])
        tables = [dataclasses.replace(table, names=own) for (_, table), own in zip(every, of_ranks, strict=True)]
        names, moments = merged(tables, one_team=False, order=names)
        return [
            entry(name, _over_ranks(name, tables), both, no_grad=None)
            for name, both in zip(names, moments, strict=True)
        ]

    def get_tensor(self, name: str, group: str | None = None, index: int | None = None) -> torch.Tensor | None:
        """The tensor recorded here as ``name`` in ``group``: the ``index``-th, or the first; None if there is none."""
        records = placed(self._entries)[1]
        found = [record.tensor for record in records if (record.name, record.group) == (name, group)]
        wanted = 0 if index is None else index
        return found[wanted] if 0 <= wanted < len(found) else None

    def _told(self) -> tuple[Recorded, Table]:
        told, records = placed(self._entries)
        rows = [
            Row(name, _rows_here(record.source), record.source, record.grad)
            for name, record in zip(numbered(told.labels), records, strict=True)
        ]
        return told, fill(rows)


def _rows_here(tensor: torch.Tensor) -> Shape:
    """The tensor's shape, its first dim counted on one rank of those that hold it together."""
    shape = tuple(tensor.shape)
    return shape if is_first_of_team(tensor) or not shape else (0, *shape[1:])


def _over_ranks(name: str, tables: list[Table]) -> Shape:
    shapes = [table.shapes[table.names.index(name)] for table in tables if name in table.names]
    return (sum(shape[0] for shape in shapes if shape), *shapes[0][1:]) if shapes[0] else ()


@contextlib.contextmanager
def inspect_tensor() -> Iterator[Inspector]:
    """Records, inside the ``with`` block, what the model's code passes to :func:`record_tensor`.

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
