"""Which region of a whole tensor each rank of a mesh holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.optim.sharded.layout import Layout


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a whole tensor: where it begins and how large it is, in every dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> Region:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.size)

    def common(self, other: Region) -> Region:
        """What both cover; it may be empty."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = zip(self.offset, self.size, other.offset, other.size, strict=True)
        end = [min(o + s, other_o + other_s) for o, s, other_o, other_s in ends]
        return Region(offset, tuple(max(stop - start, 0) for start, stop in zip(offset, end, strict=True)))

    def inside(self, around: Region) -> tuple[slice, ...]:
        """The indices of this region in a tensor that holds ``around``."""
        starts = [mine - outer for mine, outer in zip(self.offset, around.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.size, strict=True))


def held_regions(layout: Layout) -> dict[int, Region]:
    """The region that every rank of the layout's mesh holds, by global rank; empty regions included.

    Ranks that share a region are replicas of each other.

    Args:
        layout: Of a DTensor.
    """
    assert layout.mesh is not None
    sizes = tuple(layout.mesh.shape)
    order = _cutting_order(layout.placements)
    coordinates = itertools.product(*map(range, sizes))
    ranks = layout.mesh.mesh.flatten().tolist()
    return {rank: _region_at(layout, sizes, order, at) for rank, at in zip(ranks, coordinates, strict=True)}


def own_region(layout: Layout) -> Region:
    """The region that this rank holds; all of a plain tensor."""
    if layout.mesh is None:
        return Region.of(layout.shape)
    at = layout.mesh.get_coordinate()
    assert at is not None
    return _region_at(layout, tuple(layout.mesh.shape), _cutting_order(layout.placements), at)


def _cutting_order(placements: Sequence[Placement]) -> list[int]:
    """The mesh axes in the order in which they cut: from left to right, strided ones after those to their right.

    The split factor of a strided shard (FSDP2 over tensor parallelism) is the number of parts that it finds.
    """

    def rank(axis: int) -> tuple[int, int]:
        placement = placements[axis]
        return (int(placement.split_factor) if isinstance(placement, _StridedShard) else 0, axis)

    cutting = [axis for axis, placement in enumerate(placements) if isinstance(placement, Shard | _StridedShard)]
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
