"""The shard of a parameter that each rank of a sharding axis holds, as FSDP2 cuts it.

[Note: the dim that is sharded] FSDP2 cuts dim 0, the last ranks' shards being smaller or empty. Of stacked matrices
(experts: number, in, out) with fewer of them than ranks, that leaves whole matrices to some ranks and nothing to all
others, and pads what is gathered and reduced to as many matrices as there are ranks. So these are cut inside of the
matrices, where that gives equal parts. FSDP2 copies them once more as they are gathered and reduced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_STACKED = 3  # dims


def shard_dim(shape: Sequence[int], parts: int) -> int:
    """Return the dim along which a parameter is sharded; see [Note: the dim that is sharded].

    Args:
        shape: Of the parameter, or of the part that a tensor or expert axis leaves to a rank.
        parts: Number of ranks.
    """
    if len(shape) != _STACKED or shape[0] >= parts:
        return 0
    return next((dim for dim in range(1, _STACKED) if shape[dim] and shape[dim] % parts == 0), 0)


def local_shape(shape: tuple[int, ...], parts: int, index: int, dim: int = 0) -> tuple[int, ...]:
    """Return the shape of chunk ``index`` of ``parts`` along a dim, as ``torch.chunk`` and FSDP2 cut it.

    A scalar stays whole.
    """
    if not shape or parts == 1:
        return shape
    rows = math.ceil(shape[dim] / parts)
    here = max(0, min(shape[dim], rows * (index + 1)) - rows * index)
    return (*shape[:dim], here, *shape[dim + 1 :])


def padded_numel(shape: Sequence[int], parts: int, dim: int = 0) -> int:
    """Return the elements of a parameter in a collective over its ranks: every rank sends equally many rows."""
    rows = math.ceil(shape[dim] / parts) * parts if shape else 1
    return math.prod(size if at != dim else rows for at, size in enumerate(shape))
