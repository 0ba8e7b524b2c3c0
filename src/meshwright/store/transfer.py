"""Move whole tensors between rank 0 and the ranks that hold them, one tensor at a time.

A tensor lies in one of three ways, and each has its own collectives: on every rank, whole or as a DTensor
(:func:`collect`, :func:`spread`); on some ranks only, as ``pipeline_parallel`` leaves it (:func:`collect_owned`,
:func:`spread_owned`); or on one stage of a ``PipelineTransformerBlockList`` (:func:`spread_to_stage`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshwright.errors import CheckpointError, join_names
from meshwright.nn import part_of_whole, stages_of, whole_model
from meshwright.nn.model_layout import laid_out_like
from meshwright.optim.full_state_dict import whole_tensor
from meshwright.runtime import pipe_size, rank, settings, world_size
from meshwright.runtime.agreement import gather_distinct
from meshwright.runtime.torch_internals.dtensor import StridedShard
from meshwright.store.entries import ModelEntries, dtype_named, model_entries, stored_name
from meshwright.store.manifest import TensorRecord, tensor_records


def collect(tensor: torch.Tensor, to: int = 0) -> torch.Tensor | None:
    """Copy the whole tensor to the host of a rank; return None elsewhere. Collective for a DTensor."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.to("cpu", copy=True) if rank() == to else None
    if not _in_rows_over_the_world(tensor):
        whole = whole_tensor(tensor)
        return whole.to("cpu", copy=True) if rank() == to else None
    part = _padded(tensor.to_local().to(tensor.device_mesh.device_type), tensor)  # offloaded ones are on the host
    parts = [torch.empty_like(part) for _ in range(world_size())] if rank() == to else None
    dist.gather(part, parts, dst=to)
    return torch.cat(parts)[: tensor.shape[0]].cpu() if parts is not None else None


def spread(source: torch.Tensor | None, target: torch.Tensor) -> None:
    """Copy a whole tensor, which rank 0 holds, into ``target`` or the ranks' parts of it. Collective.

    Args:
        source: On rank 0 a tensor of the target's shape, of any dtype and device; elsewhere None.
        target: A tensor that all ranks hold whole, or a DTensor.
    """
    target = target.detach()
    if not isinstance(target, DTensor):
        if source is not None:
            target.copy_(source)
        if world_size() > 1:
            dist.broadcast(target, src=0)
        return
    local = target.to_local()
    device = target.device_mesh.device_type  # offloaded shards are on the host
    full = source.to(device, target.dtype) if source is not None else None
    if _in_rows_over_the_world(target):
        part = local.new_empty(_padded_shape(target), device=device)
        parts = [_padded(rows, target) for rows in full.split(part.shape[0])] if full is not None else None
        if parts is not None:
            parts += [torch.empty_like(part)] * (world_size() - len(parts))
        dist.scatter(part, parts, src=0)
        local.copy_(part[: local.shape[0]])
        return
    # Rank 0 is on one of several smaller meshes only; and torch scatters interleaved shards only if they are even.
    if target.device_mesh.size() < world_size() or any(isinstance(each, StridedShard) for each in target.placements):
        full = local.new_empty(target.shape, device=device) if full is None else full.contiguous()
        dist.broadcast(full, src=0)
        local.copy_(distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None).to_local())
        return
    if full is None:  # only its shape counts: takes no memory
        full = local.new_empty((), device=device).expand(target.shape)
    local.copy_(distribute_tensor(full, target.device_mesh, target.placements).to_local())


def _in_rows_over_the_world(tensor: DTensor) -> bool:
    """Return whether a tensor is split along dim 0 over all ranks in their order, as Blocks and FSDP2 do."""
    mesh = tensor.device_mesh
    return mesh.ndim == 1 and tensor.placements == (Shard(0),) and mesh.mesh.tolist() == list(range(world_size()))


def _padded_shape(tensor: DTensor) -> tuple[int, ...]:
    return (-(-tensor.shape[0] // world_size()), *tensor.shape[1:])


def _padded(rows: torch.Tensor, tensor: DTensor) -> torch.Tensor:
    """Pad the rows to the size that every rank sends: collectives want equal sizes."""
    shape = _padded_shape(tensor)
    if rows.shape == shape:
        return rows.contiguous()
    padded = rows.new_zeros(shape)
    padded[: rows.shape[0]] = rows
    return padded


# --- Tensors that some ranks hold
#
# ``pipeline_parallel`` leaves every rank a part of the model under the model's own names; optimizer states go with it.


@dataclass(frozen=True)
class OwnedTensor:
    """A tensor that some ranks hold; equal on every rank."""

    record: TensorRecord
    homes: tuple[int, ...]
    """Ranks that hold it as it is trained, ascending; the first one's is stored."""
    holders: tuple[int, ...]
    """All ranks that hold it, with those whose copy goes stale; loading reaches them all."""

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """Allocate the whole tensor."""
        return torch.empty(self.record.shape, dtype=dtype_named(self.record.dtype), device=device)


def owned_by_ranks(
    tensors: Mapping[str, torch.Tensor], order: Iterable[str] = (), stale: Container[str] = ()
) -> dict[str, OwnedTensor]:
    """Describe the tensors of all ranks, by name; collective.

    Args:
        tensors: This rank's, plain or DTensors; equal wherever they have one name.
        order: Names in the wanted order; others follow.
        stale: Names of tensors that are trained on other ranks only.
    """
    own = {name: (record, name not in stale) for name, record in tensor_records(tensors).items()}
    every: dict[str, list[tuple[list[int], TensorRecord, bool]]] = {}
    for ranks, its in gather_distinct(own, repr(own)):
        for name, (record, is_home) in its.items():
            every.setdefault(name, []).append((ranks, record, is_home))
    found = {}
    for name in dict.fromkeys(name for name in (*order, *every) if name in every):
        holders = sorted(number for ranks, _, _ in every[name] for number in ranks)
        homes = sorted(number for ranks, _, is_home in every[name] if is_home for number in ranks) or holders
        record = next(record for ranks, record, _ in every[name] if homes[0] in ranks)
        found[name] = OwnedTensor(record, tuple(homes), tuple(holders))
    return found


@torch.no_grad()
def collect_owned(tensor: torch.Tensor | None, owner: OwnedTensor, to: int = 0) -> torch.Tensor | None:
    """Copy the whole tensor to the host of a rank; return None elsewhere. Every rank calls it.

    Args:
        tensor: This rank's; not read where others hold it.
        owner: Who holds it.
        to: The rank that gets it.
    """
    first, whole = to if to in owner.homes else owner.homes[0], None
    if tensor is not None and rank() in owner.homes:
        whole = whole_tensor(tensor)
    if rank() == first != to:
        assert whole is not None
        dist.send(whole.to(settings().device).contiguous(), dst=to)
    if rank() != to:
        return None
    if first != to:
        whole = owner.empty(settings().device)
        dist.recv(whole, src=first)
    assert whole is not None
    return whole.to("cpu", copy=True)


@torch.no_grad()
def spread_owned(source: torch.Tensor | None, target: torch.Tensor | None, owner: OwnedTensor) -> None:
    """Copy a whole tensor, which rank 0 has, to the ranks that hold it or shards of it; the others get nothing.

    Args:
        source: On rank 0 a tensor of the whole shape, of any dtype; elsewhere None.
        target: This rank's, filled in place; None where it holds none.
        owner: Who holds it.
    """
    device = settings().device
    whole = None
    if source is not None:
        whole = source.to(device, dtype_named(owner.record.dtype)).contiguous()
        for holder in owner.holders:
            if holder != 0:
                dist.send(whole, dst=holder)
    if target is None:
        return
    if whole is None:
        whole = owner.empty(device)
        dist.recv(whole, src=0)
    target = target.detach()
    if isinstance(target, DTensor):
        part = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(part.to_local())
    else:
        target.copy_(whole)


# --- Tensors that one stage of a PipelineTransformerBlockList holds


def entries_with_stages(model: torch.nn.Module) -> tuple[ModelEntries, dict[str, OwnedTensor]]:
    """Return the entries of a model, with those of other stages on ``meta``, and the owners of those on one stage.

    Raises:
        CheckpointError: When a module on a stage has extra state that is not a tensor.
    """
    with whole_model():
        entries = model_entries(model)
    stages = stages_of(entries.module, entries.raw)
    other = [name for name in stages if not isinstance(entries.raw[name], torch.Tensor)]
    if other:
        raise CheckpointError(
            "Extra state of modules on pipeline stages cannot be stored yet",
            expected="parameters and buffers in a PipelineTransformerBlockList",
            got=join_names(other),
            fix="keep it in buffers, or in a module outside the list",
        )
    records, num_ranks = tensor_records({name: entries.raw[name] for name in stages}), world_size() // pipe_size()
    ranks = {stage: tuple(range(stage * num_ranks, (stage + 1) * num_ranks)) for stage in stages.values()}
    return entries, {name: OwnedTensor(records[name], ranks[s], ranks[s]) for name, s in stages.items()}


def refuse_stages(model: torch.nn.Module, what: str) -> None:
    """Refuse a model that is spread over pipeline stages.

    Raises:
        CheckpointError: Saying that ``what`` does not join them.
    """
    if entries_with_stages(model)[1]:
        raise CheckpointError(
            f"{what} does not join pipeline stages yet",
            expected="a model without PipelineTransformerBlockList, or pipe_size=1",
            got="blocks on other ranks",
            fix="use meshwright.save",
        )


def spread_to_stage(source: torch.Tensor | None, target: torch.Tensor, owner: OwnedTensor) -> None:
    """Copy a whole tensor, which rank 0 has, into the parts of it on one stage. Every rank of the world calls it."""
    target = target.detach()
    if source is not None:
        whole = source.to(settings().device, target.dtype).contiguous()
    else:
        whole = torch.empty(target.shape, dtype=target.dtype, device=settings().device)
    # Broadcast to all: a stage may have many ranks, and rank 0 would send to one after the other.
    dist.broadcast(whole, src=0)
    if rank() not in owner.holders:
        return
    if isinstance(target, DTensor):
        target.to_local().copy_(laid_out_like(target, whole).to_local())
    else:
        target.copy_(whole)


# --- Entries of a model, wherever they are


def collect_named(
    name: str, tensors: Mapping[str, torch.Tensor], owners: Mapping[str, OwnedTensor], to: int = 0
) -> torch.Tensor | None:
    """Copy a whole tensor to the host of a rank; return None elsewhere. Every rank calls it.

    Args:
        name: Name of the tensor.
        tensors: This rank's tensors.
        owners: Who holds the tensors that are not on every rank.
        to: The rank that gets it.
    """
    owner = owners.get(name)
    return collect(tensors[name], to) if owner is None else collect_owned(tensors.get(name), owner, to)


@dataclass(frozen=True)
class WholeEntries:
    """The entries of a model as in a state dict of the whole, whichever ranks hold them; equal on every rank."""

    names: list[str]
    """All names, in the order of the whole model."""
    first: dict[str, str]
    """For every name of a tensor, the first name of the same tensor."""
    shapes: dict[str, tuple[int, ...] | None]
    """By name; None for entries that are not tensors."""
    values: dict[str, object]
    """Entries that are not tensors."""
    owners: dict[str, OwnedTensor]
    """By first name, who holds the tensors that are not on every rank."""
    in_parts: bool
    """Whether ``pipeline_parallel`` has cut the model."""

    @classmethod
    def of(cls, entries: ModelEntries, on_stages: Mapping[str, OwnedTensor] | None = None) -> WholeEntries:
        """Collect the entries of all ranks; collective for a model that a pipeline has cut.

        Args:
            entries: This rank's.
            on_stages: See :func:`entries_with_stages`.
        """
        raw = {stored_name(name): value for name, value in entries.raw.items()}
        first_of = {id(tensor): name for name, tensor in entries.tensors.items()}
        first = {name: first_of[id(value)] for name, value in raw.items() if id(value) in first_of}
        values = {name: value for name, value in raw.items() if not isinstance(value, torch.Tensor)}
        part = part_of_whole(entries.module)
        if part is None:
            shapes = {name: tuple(raw[name].shape) if name in first else None for name in raw}
            owners = {stored_name(name): owner for name, owner in (on_stages or {}).items()}
            return cls(list(raw), first, shapes, values, owners, False)
        owners = owned_by_ranks(entries.tensors, part.names, {n for n in entries.tensors if not part.is_home(n)})
        tied = {name: other for name, other in first.items() if name not in owners}
        first = {name: name for name in owners}
        every: dict[str, object] = {}
        own_values = {name: value for name, value in values.items() if part.is_home(name)}
        for _, (its_tied, its_values) in gather_distinct((tied, own_values), repr((tied, own_values))):
            first |= its_tied
            every |= its_values
        names = [name for name in dict.fromkeys((*part.names, *first, *every)) if name in first or name in every]
        shapes = {name: owners[first[name]].record.shape if name in first else None for name in names}
        return cls(names, first, shapes, every, owners, True)

    def tensors(self) -> list[str]:
        """Return the first name of every tensor."""
        return list(dict.fromkeys(self.first.values()))

    def tied(self) -> dict[str, list[str]]:
        """Return the other names of every tensor, by each of its names."""
        groups: dict[str, list[str]] = {name: [name] for name in self.tensors()}
        for name, first in self.first.items():
            if name != first:
                groups[first].append(name)
        return {name: [each for each in groups[first] if each != name] for name, first in self.first.items()}

    def spread(self, name: str, source: torch.Tensor | None, target: torch.Tensor | None) -> None:
        """Copy a whole tensor, which rank 0 has, into place. Every rank calls it.

        Args:
            name: First name of the tensor.
            source: On rank 0 a tensor of the whole shape; elsewhere None.
            target: This rank's tensor; None where it holds none.
        """
        owner = self.owners.get(name)
        if owner is not None and self.in_parts:
            spread_owned(source, target, owner)
            return
        assert target is not None, "every rank has it, or one on meta"
        if owner is not None:
            spread_to_stage(source, target, owner)
        else:
            spread(source, target)
