"""Process groups that all ranks make together."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from meshwright.runtime import gather_objects

_MADE: dict[tuple[int, ...], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
"""Groups by their ranks, each with the world in which it was made."""


def groups_of_ranks(wanted: Sequence[tuple[int, ...]]) -> list[dist.ProcessGroup]:
    """The groups of the given ranks, made once per world; collective over the world.

    All ranks make all groups, in one order: torch names a group that its members make alone by their ranks, and one
    that is made a second time finds what the first has left in the store, and waits for ever.

    Args:
        wanted: Ascending ranks of every group that this rank belongs to and needs; others may need other groups.
    """
    world = dist.group.WORLD
    assert world is not None
    for ranks in sorted({ranks for each in gather_objects(list(wanted)) for ranks in each}):
        if ranks not in _MADE or _MADE[ranks][0] is not world:
            _MADE[ranks] = (world, dist.new_group(list(ranks)))
    return [_MADE[ranks][1] for ranks in wanted]
