"""Pieces of a chunk of equal matrices that fit the cache: what several passes over matrices work on in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from meshwright.optim.sharded.chunk import Chunk
from meshwright.optim.sharded.tensor_list import TensorList

# So many elements make a block: on a CPU what stays in a core's cache with weight, gradient and a temporary; on an
# accelerator what keeps it busy, so that no temporary is as large as the largest parameters.
_BLOCK_ELEMENTS = {"cpu": 1 << 17, "other": 1 << 24}


@dataclass(frozen=True, slots=True)
class Block:
    """Several small parameters of a chunk, or a range of the rows of one; all of the chunk have the same local shape.

    Tensors of a whole chunk are written ``(n, …, H, W)`` here, those of a block ``(k, …, h, W)``.
    """

    members: slice
    rows: slice | None = None
    """Of dim −2; None for all."""

    def views(self, tensors: TensorList) -> list[torch.Tensor]:
        """Its part of each of its k parameters, ``(…, h, W)``."""
        mine = tensors.tensors[self.members]
        return mine if self.rows is None else [tensor[..., self.rows, :] for tensor in mine]

    def of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Its part of one number per row, ``(n, …, H)`` to ``(k, …, h)``; a view."""
        return values[self.members] if self.rows is None else values[self.members, ..., self.rows]

    def of_members(self, values: torch.Tensor) -> torch.Tensor:
        """Its part of values per parameter, ``(n, …)`` to ``(k, …)``; a view."""
        return values[self.members]


def blocks(chunk: Chunk) -> Iterator[Block]:
    """Cuts a chunk of matrices (or stacks of them) of one local shape."""
    limit = _BLOCK_ELEMENTS["cpu" if chunk.device.type == "cpu" else "other"]
    shard = chunk.weights.tensors[0]
    if shard.numel() <= limit:
        count = limit // max(1, shard.numel())
        for first in range(0, len(chunk), count):
            yield Block(slice(first, first + count))
        return
    height = shard.shape[-2]
    rows = max(1, limit * height // shard.numel())
    for member in range(len(chunk)):
        for first in range(0, height, rows):
            yield Block(slice(member, member + 1), slice(first, first + rows))


def stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One tensor with a dim in front: a view of a single one, a copy of several."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)
