"""Layouts of tensors over mesh axes, the region of a tensor that each rank holds, and the ranks that share it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshwright.errors import ModelError
from meshwright.optim.dtensors import local_tensor
from meshwright.runtime import flat_mesh, largest, make_group
from meshwright.runtime.torch_internals.dtensor import DTensorSpec, StridedShard, TensorMeta


@dataclass(frozen=True)
class Axis:
    """A mesh axis that splits a tensor."""

    name: str
    """Name of the process group: equal for equal groups, also of different meshes."""
    size: int
    device_type: str
    """Device type of the mesh."""
    group: dist.ProcessGroup = field(compare=False, repr=False)

    @classmethod
    def of(cls, mesh: DeviceMesh, mesh_dim: int) -> Axis:
        """Return one axis of a mesh."""
        group = mesh.get_group(mesh_dim)
        return cls(str(group.group_name), mesh.size(mesh_dim), mesh.device_type, group)


@dataclass(frozen=True)
class Kept:
    """The form of a state tensor: its shape, and the dims that it shares with its parameter.

    Args:
        shape: Shape of the whole state.
        dims: For each of its dims the parameter's dim that it shares, sharding included, or None for a dim of its own,
            which every rank holds whole. A shared dim may be shorter than the parameter's, with one element for several
            of these, where every rank's part is a multiple of that number.
        dtype: Element type.
    """

    shape: tuple[int, ...]
    dims: tuple[int | None, ...]
    dtype: torch.dtype = torch.float32


class Layout:
    """The shape of a tensor and the axes that split each of its dims; no axes for a plain tensor.

    Args:
        shape: Shape of the whole tensor.
        local_shape: Shape of this rank's part.
        mesh: The DTensor's mesh; None for a plain tensor.
        placements: The DTensor's placements.

    Raises:
        ModelError: When the tensor is an unreduced partial sum, or has an unknown placement.
    """

    def __init__(
        self,
        shape: Sequence[int],
        local_shape: Sequence[int],
        mesh: DeviceMesh | None = None,
        placements: tuple[Placement, ...] = (),
    ) -> None:
        self.shape, self.local_shape = tuple(shape), tuple(local_shape)
        self.mesh, self.placements = mesh, placements
        self.numel, self.ndim = math.prod(self.shape), len(self.shape)
        split: list[list[Axis]] = [[] for _ in self.shape]
        for mesh_dim, placement in enumerate(placements):
            dim = _split_dim(placement)
            if dim is not None and mesh is not None and mesh.size(mesh_dim) > 1:
                split[dim].append(Axis.of(mesh, mesh_dim))
        self.axes: tuple[tuple[Axis, ...], ...] = tuple(map(tuple, split))
        """The axes that split each dim."""
        self.signature: tuple[Any, ...] = tuple(tuple(axis.name for axis in axes) for axes in self.axes)
        """A key that is equal for tensors whose sums need the same reductions."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """Return the layout of a plain tensor or a DTensor."""
        if not isinstance(tensor, DTensor):
            return cls(tensor.shape, tensor.shape)
        return cls(tensor.shape, local_tensor(tensor).shape, tensor.device_mesh, tensor.placements)

    @property
    def shard_index(self) -> int:
        """Return a number of this rank's shard, equal on ranks that hold the same shard."""
        index = 0
        for mesh_dim, placement in enumerate(self.placements):
            if self.mesh is not None and _split_dim(placement) is not None:
                index = index * self.mesh.size(mesh_dim) + self.mesh.get_local_rank(mesh_dim)
        return index

    def splitting(self, dims: Sequence[int] | None) -> tuple[Axis, ...]:
        """Return the axes that split any of ``dims`` (None for all), over which sums along these are reduced."""
        wanted = range(self.ndim) if dims is None else [dim % self.ndim for dim in dims]
        return tuple(axis for dim in wanted for axis in self.axes[dim])

    def is_whole(self, *dims: int) -> bool:
        """Return whether this rank holds the given dims whole (all dims, when none is given)."""
        return not self.splitting(dims or None)

    def new(self, form: Kept, device: torch.device | str, fill: float = 0.0) -> torch.Tensor:
        """Make a state of the form ``form``: a DTensor with the placements that follow, or a plain tensor."""
        return self.wrapped(torch.full(self._local_shape_of(form), fill, dtype=form.dtype, device=device), form)

    def wrapped(self, local: torch.Tensor, form: Kept) -> torch.Tensor:
        """Wrap this rank's part of a state into a DTensor, on its own device; return it as it is for a plain one."""
        if self.mesh is None:
            return local
        meta = TensorMeta(torch.Size(form.shape), _contiguous_stride(form.shape), local.dtype)
        spec = DTensorSpec(self.mesh, self.placements_of(form), tensor_meta=meta)
        return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]

    def placements_of(self, form: Kept) -> tuple[Placement, ...]:
        """Return the placements of a state: split where it shares a split dim, replicated elsewhere."""
        return tuple(_moved(placement, form.dims) for placement in self.placements)

    def restricted(self, form: Kept) -> Layout:
        """Return the layout of a state of this parameter."""
        return Layout(form.shape, self._local_shape_of(form), self.mesh, self.placements_of(form))

    def _local_shape_of(self, form: Kept) -> list[int]:
        return [
            size if dim is None else size * self.local_shape[dim] // max(self.shape[dim], 1)
            for size, dim in zip(form.shape, form.dims, strict=True)
        ]


def _split_dim(placement: Placement) -> int | None:
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, Shard | StridedShard):
        return placement.dim
    what = "an unreduced partial sum" if isinstance(placement, Partial) else "placed in an unknown way"
    raise ModelError(
        f"A parameter is {what}",
        expected="Replicate, Shard or a strided shard on every mesh axis",
        got=str(placement),
        fix="build the optimizer over parameters as FSDP2 or tensor parallelism leaves them",
    )


def _moved(placement: Placement, dims: tuple[int | None, ...]) -> Placement:
    dim = _split_dim(placement)
    if dim is None or dim not in dims:
        return Replicate()
    here = dims.index(dim)
    if isinstance(placement, StridedShard):
        return StridedShard(here, split_factor=placement.split_factor)
    return Shard(here)


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


# --- Regions: the box of a whole tensor that each rank of a mesh holds


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a whole tensor: its offset and size in every dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> Region:
        """Return the region of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.size)

    def common(self, other: Region) -> Region:
        """Return the intersection of two regions, which may be empty."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = zip(self.offset, self.size, other.offset, other.size, strict=True)
        end = [min(o + s, other_o + other_s) for o, s, other_o, other_s in ends]
        return Region(offset, tuple(max(stop - start, 0) for start, stop in zip(offset, end, strict=True)))

    def inside(self, around: Region) -> tuple[slice, ...]:
        """Return the indices of this region in a tensor that covers ``around``."""
        starts = [mine - outer for mine, outer in zip(self.offset, around.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.size, strict=True))


def regions_by_rank(layout: Layout) -> dict[int, Region]:
    """Return the region that every rank of the layout's mesh holds, by global rank; regions may be empty or equal.

    Args:
        layout: The layout of a DTensor.
    """
    assert layout.mesh is not None
    sizes = tuple(layout.mesh.shape)
    order = _cutting_order(layout.placements)
    coordinates = itertools.product(*map(range, sizes))
    ranks = layout.mesh.mesh.flatten().tolist()
    return {rank: _region_at(layout, sizes, order, at) for rank, at in zip(ranks, coordinates, strict=True)}


def own_region(layout: Layout) -> Region:
    """Return the region that this rank holds: all of a plain tensor."""
    if layout.mesh is None:
        return Region.of(layout.shape)
    at = layout.mesh.get_coordinate()
    assert at is not None
    return _region_at(layout, tuple(layout.mesh.shape), _cutting_order(layout.placements), at)


def _cutting_order(placements: Sequence[Placement]) -> list[int]:
    """Return the mesh axes in the order in which they cut: from left to right, strided ones after those to their right.

    The split factor of a strided shard (FSDP2 over tensor parallelism) is the number of parts that are there before.
    """

    def rank(axis: int) -> tuple[int, int]:
        placement = placements[axis]
        return (int(placement.split_factor) if isinstance(placement, StridedShard) else 0, axis)

    cutting = [axis for axis, placement in enumerate(placements) if isinstance(placement, Shard | StridedShard)]
    return sorted(cutting, key=rank)


def _region_at(layout: Layout, sizes: Sequence[int], order: Sequence[int], at: Sequence[int]) -> Region:
    offset, size = [0] * layout.ndim, list(layout.shape)
    for axis in order:
        dim: int = layout.placements[axis].dim  # type: ignore[attr-defined]
        largest = -(-size[dim] // sizes[axis])  # the last parts are smaller or empty, as with torch.chunk
        start = min(at[axis] * largest, size[dim])
        offset[dim] += start
        size[dim] = min(largest, size[dim] - start)
    return Region(tuple(offset), tuple(size))


# --- The ranks that hold shards of the same tensors, and their process group

# The groups made here by their ranks, each with the world in which it was made.
_GROUPS: dict[tuple[int, ...], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


@dataclass(frozen=True)
class ShardGroup:
    """Ranks that exchange shards."""

    ranks: tuple[int, ...]
    """Global ranks, in the order of the group."""
    rank: int
    """The global rank of this process."""
    device: torch.device
    """The device of the exchange."""
    group: dist.ProcessGroup = field(compare=False, repr=False)

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> ShardGroup:
        """Return all ranks of a mesh; collective over them when a mesh of several axes is seen for the first time."""
        return cls._of(_group_of(mesh), mesh.device_type)

    @classmethod
    def of_replicas(cls, group: dist.ProcessGroup) -> ShardGroup:
        """Return ranks that hold the same plain tensors."""
        return cls._of(group, "cuda" if "nccl" in dist.get_backend_config(group) else "cpu")

    @classmethod
    def _of(cls, group: dist.ProcessGroup, device_type: str) -> ShardGroup:
        ranks = tuple(dist.get_process_group_ranks(group))
        return cls(ranks, dist.get_rank(), torch.device(device_type), group)

    def regions(self, layout: Layout) -> dict[int, Region]:
        """Return the region of a tensor that every rank holds: all of a plain tensor."""
        if layout.mesh is None:
            return dict.fromkeys(self.ranks, Region.of(layout.shape))
        return regions_by_rank(layout)


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of all ranks of a mesh, an existing one if there is one."""
    wide = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    if len(wide) == 1:
        return mesh.get_group(wide[0])
    if mesh.size() == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    return _made_group(_ranks_of(mesh))


def _ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def _made_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return a group made by an earlier call, or make it, collectively over its ranks."""
    made_in, group = _GROUPS.get(ranks, (None, None))
    if group is None or made_in is not dist.group.WORLD:
        group = make_group(ranks, use_local_synchronization=True)
        assert dist.group.WORLD is not None
        _GROUPS[ranks] = (dist.group.WORLD, group)
    return group


def make_groups_of(parameters: Iterable[torch.Tensor], mesh: DeviceMesh) -> None:
    """Make the groups of parameters that are split over several axes of a mesh; collective over the world.

    A step would make them, too, but on the ranks alone that have such parameters: see [Note: groups by split] in
    :mod:`meshwright.runtime.processes`.

    Args:
        parameters: This rank's; those of other ranks may lie on other axes.
        mesh: The mesh of the world.
    """
    assert mesh.mesh_dim_names is not None
    wide = [name for name in mesh.mesh_dim_names if mesh[name].size() > 1]
    several = [axes for number in range(2, len(wide)) for axes in itertools.combinations(wide, number)]
    if not several:
        return
    own = {_ranks_of(each) for each in {p.device_mesh for p in parameters if isinstance(p, DTensor)}}
    ranks = [_ranks_of(mesh[axes]) for axes in several]
    needed = largest([int(each in own) for each in ranks])
    for axes, each, is_needed in zip(several, ranks, needed, strict=True):
        if is_needed:
            assert dist.group.WORLD is not None
            _GROUPS[each] = (dist.group.WORLD, flat_mesh(mesh, axes).get_group())
