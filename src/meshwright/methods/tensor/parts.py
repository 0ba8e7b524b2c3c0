"""Which part of a parameter a rank of the tensor axis holds, where several things are fused in one.

A fused projection lists all queries, then all keys, then all values, and a rank needs some of each. So its whole tensor
is kept in the order of ranks: rank 0's queries, keys and values, then rank 1's. The DTensor is an ordinary Shard, FSDP2
cuts it as any other, and what is stored is put into the model's own order (``meshwright.nn.fused``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def part_of(tensor: torch.Tensor, dim: int, parts: Sequence[int], rank: int, ranks: int) -> torch.Tensor:
    """The part of a whole tensor that one rank holds, along ``dim``; a view where nothing is fused.

    Args:
        tensor: Whole, in the model's own order.
        dim: What is divided.
        parts: Sizes of what is fused along it; empty for one thing.
        rank: Whose part.
        ranks: Size of the axis; divides every size.
    """
    if len(parts) < 2:
        return tensor.chunk(ranks, dim)[rank]
    return torch.cat([part.chunk(ranks, dim)[rank] for part in tensor.split(list(parts), dim)], dim)
