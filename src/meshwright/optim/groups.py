"""Process groups that are made when they are first wanted, and found again after that."""

from __future__ import annotations

import torch.distributed as dist

_GROUPS: dict[tuple[int, ...], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
"""Groups made here by their ranks, each with the world in which it was made."""


def made_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of some ranks. Collective over them when it is first asked for, in ascending order of ranks.

    torch names such groups by their ranks: one that is made again while an older one is alive on some ranks and gone on
    others has two names, and its ranks wait for each other for ever.
    """
    made_in, group = _GROUPS.get(ranks, (None, None))
    if group is None or made_in is not dist.group.WORLD:
        group = dist.new_group(list(ranks), use_local_synchronization=True)
        assert dist.group.WORLD is not None
        _GROUPS[ranks] = (dist.group.WORLD, group)
    return group
