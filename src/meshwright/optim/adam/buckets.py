"""Parameters cut into buckets of bounded size: the unit that is copied and updated at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from meshwright.optim.clip import local_tensor

# Kernels work on vectors of a few elements: cutting at multiples of this leaves every element in the lane it had.
_ALIGNMENT = 1024


class Piece(NamedTuple):
    """A range of the elements of one parameter's local shard."""

    parameter: torch.Tensor
    """As the optimizer knows it: plain or DTensor."""
    start: int
    stop: int
    whole: bool
    """Whether it is the whole shard."""

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The piece's part of a tensor that is laid out like the shard; in the tensor's own shape when whole."""
        return local if self.whole else local.view(-1)[self.start : self.stop]


Bucket = list[Piece]


def cut(parameters: Iterable[torch.Tensor], max_elements: int | None) -> list[Bucket]:
    """Cuts the local shards of parameters, in their order, into buckets.

    Args:
        parameters: Plain tensors and DTensors; empty shards are left out.
        max_elements: Most elements of a bucket, rounded up to a multiple of 1024; None for one bucket of everything.
            A shard that is not contiguous stays whole, however large it is.
    """
    limit = None if max_elements is None else -(-max_elements // _ALIGNMENT) * _ALIGNMENT
    buckets: list[Bucket] = []
    room = 0
    for parameter in parameters:
        local = local_tensor(parameter)
        start, end = 0, local.numel()
        while start < end:
            if not buckets or (limit is not None and room <= 0):
                buckets.append([])
                room = limit or 0
            if limit is None or not local.is_contiguous() or end - start <= room:
                stop = end
            else:
                stop = start + room
            buckets[-1].append(Piece(parameter, start, stop, whole=stop - start == local.numel()))
            # Rounded up: the next piece must not begin between two vectors.
            room -= -(-(stop - start) // _ALIGNMENT) * _ALIGNMENT
            start = stop
    return buckets
