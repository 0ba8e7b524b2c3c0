"""Tensors of which ranks hold different ones by name, between rank 0 and those ranks, one at a time.

``pipeline_parallel`` leaves every rank a part of the model under the model's own names; states go with it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from meshwright.nn import Part, part_of_whole
from meshwright.runtime import gather_objects, rank, settings
from meshwright.store.entries import ModelEntries, stored_name
from meshwright.store.plain import dtype_named
from meshwright.store.record import TensorRecord, tensor_records


@dataclass(frozen=True)
class Held:
    """One tensor, and who holds it; equal on every rank."""

    record: TensorRecord
    homes: tuple[int, ...]
    """Ranks that hold it as it is trained, ascending; the first one's is stored."""
    holders: tuple[int, ...]
    """All that hold it: loading reaches them all."""

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """Room for the whole of it."""
        return torch.empty(self.record.shape, dtype=dtype_named(self.record.dtype), device=device)


def held_by_ranks(
    tensors: Mapping[str, torch.Tensor], order: Iterable[str] = (), stale: Container[str] = ()
) -> dict[str, Held]:
    """What all ranks hold together; collective.

    Args:
        tensors: This rank's, plain or DTensors; equal wherever they have one name.
        order: Names in the order wanted; others follow.
        stale: Names of those that are trained elsewhere only.
    """
    every = gather_objects({name: (record, name not in stale) for name, record in tensor_records(tensors).items()})
    names = dict.fromkeys(name for told in every for name in told)
    found = {}
    for name in dict.fromkeys(name for name in (*order, *names) if name in names):
        holders = [number for number, told in enumerate(every) if name in told]
        homes = [number for number in holders if every[number][name][1]] or holders
        found[name] = Held(every[homes[0]][name][0], tuple(homes), tuple(holders))
    return found


@torch.no_grad()
def collect_held(tensor: torch.Tensor | None, held: Held) -> torch.Tensor | None:
    """A copy of the whole tensor on the host of rank 0; None elsewhere. Every rank calls it.

    Args:
        tensor: This rank's; None where it holds none.
        held: Who holds it.
    """
    first, whole = held.homes[0], None
    if tensor is not None and rank() in held.homes:
        whole = tensor.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    if rank() == first != 0:
        assert whole is not None
        dist.send(whole.to(settings().device).contiguous(), dst=0)
    if rank() > 0:
        return None
    if first > 0:
        whole = held.empty(settings().device)
        dist.recv(whole, src=first)
    assert whole is not None
    return whole.to("cpu", copy=True)


@torch.no_grad()
def spread_held(source: torch.Tensor | None, target: torch.Tensor | None, held: Held) -> None:
    """Copies a whole tensor, which rank 0 holds, to the ranks that hold it or shards of it; the others get nothing.

    Args:
        source: On rank 0 a tensor of the whole shape, of any dtype; elsewhere None.
        target: This rank's, filled in place; None where it holds none.
        held: Who holds it.
    """
    device = settings().device
    whole = None
    if source is not None:
        whole = source.to(device, dtype_named(held.record.dtype)).contiguous()
        for holder in held.holders:
            if holder != 0:
                dist.send(whole, dst=holder)
    if target is None:
        return
    if whole is None:
        whole = held.empty(device)
        dist.recv(whole, src=0)
    target = target.detach()
    if isinstance(target, DTensor):
        part = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(part.to_local())
    else:
        target.copy_(whole)


@dataclass(frozen=True)
class PartEntries:
    """The entries of a model of which ranks hold parts: as a state dict of the whole has them, equal on every rank."""

    held: dict[str, Held]
    """By stored name, of tied tensors the first."""
    tied: dict[str, str]
    """Further names of tied tensors, and the first."""
    values: dict[str, object]
    """What is no tensor."""
    names: list[str]
    """All of them, in the order of the whole model."""

    @classmethod
    def of(cls, entries: ModelEntries) -> PartEntries | None:
        """Of a model that a pipeline has cut, collective; None of one that every rank holds."""
        part = part_of_whole(entries.module)
        if part is None:
            return None
        held = held_by_ranks(entries.tensors, part.names, _stale(entries, part))
        first = {id(tensor): name for name, tensor in entries.tensors.items()}
        raw = {stored_name(name): value for name, value in entries.raw.items()}
        tied = {name: first[id(value)] for name, value in raw.items() if id(value) in first and name not in held}
        values = {name: value for name, value in raw.items() if not isinstance(value, torch.Tensor)}
        others: dict[str, str] = {}
        every: dict[str, object] = {}
        for told, given in gather_objects((tied, {name: each for name, each in values.items() if part.is_home(name)})):
            others |= told
            every |= given
        known = {*held, *others, *every}
        names = list(dict.fromkeys(name for name in (*part.names, *known) if name in known))
        return cls(held, others, every, names)

    def tied_names(self) -> dict[str, list[str]]:
        """For every name of a tied tensor its other names."""
        groups: dict[str, list[str]] = {}
        for name, first in self.tied.items():
            groups.setdefault(first, [first]).append(name)
        return {name: [each for each in group if each != name] for group in groups.values() for name in group}

    def described(self) -> dict[str, tuple[int, ...] | None]:
        """The shape of every entry, None of what is no tensor."""
        shapes = {name: each.record.shape for name, each in self.held.items()}
        return {name: shapes.get(self.tied.get(name, name)) for name in self.names}


def _stale(entries: ModelEntries, part: Part) -> set[str]:
    return {name for name in entries.tensors if not part.is_home(name)}
