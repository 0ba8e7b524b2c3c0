"""The ranks that hold shards of the same tensors, and the process group of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.optim.sharded.layout import Layout
from meshwright.optim.sharded.regions import Region, held_regions

_GROUPS: dict[tuple[int, ...], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
"""Groups made here by their ranks, each with the world in which it was made."""


@dataclass(frozen=True)
class Meeting:
    """Ranks that exchange shards."""

    ranks: tuple[int, ...]
    """Global ranks, in the order of the group."""
    rank: int
    """This one."""
    device: torch.device
    """Where they meet."""
    group: dist.ProcessGroup = field(compare=False, repr=False)

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> Meeting:
        """All ranks of a mesh. Collective over them when a mesh of several axes is seen for the first time."""
        return cls._of(_group_of(mesh), mesh.device_type)

    @classmethod
    def of_replicas(cls, group: dist.ProcessGroup) -> Meeting:
        """Ranks that hold the same plain tensors."""
        return cls._of(group, "cuda" if "nccl" in dist.get_backend_config(group) else "cpu")

    @classmethod
    def _of(cls, group: dist.ProcessGroup, device_type: str) -> Meeting:
        ranks = tuple(dist.get_process_group_ranks(group))
        return cls(ranks, dist.get_rank(), torch.device(device_type), group)

    def held(self, layout: Layout) -> dict[int, Region]:
        """The region of a tensor that every rank holds; all of a plain one."""
        if layout.mesh is None:
            return dict.fromkeys(self.ranks, Region.of(layout.shape))
        return held_regions(layout)


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of a mesh: an existing one where there is one."""
    wide = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    if len(wide) == 1:
        return mesh.get_group(wide[0])
    if mesh.size() == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    return _made_group(tuple(sorted(mesh.mesh.flatten().tolist())))


def _made_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A group that is made when it is first wanted. Collective over its ranks then."""
    made_in, group = _GROUPS.get(ranks, (None, None))
    if group is None or made_in is not dist.group.WORLD:
        group = dist.new_group(list(ranks), use_local_synchronization=True)
        assert dist.group.WORLD is not None
        _GROUPS[ranks] = (dist.group.WORLD, group)
    return group
