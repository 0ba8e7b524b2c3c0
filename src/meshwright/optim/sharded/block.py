"""A chunk of equal matrices in pieces that fit the cache: what several passes over matrices work on in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from meshwright.optim.sharded.chunk import Chunk
from meshwright.optim.sharded.tensor_list import TensorList

# So many elements make a block: on a CPU what stays in a core's cache with weight, gradient and a temporary; on an
# accelerator what keeps it busy, so that no temporary is as large as the largest parameters.
_BLOCK_ELEMENTS = {"cpu": 1 << 17, "other": 1 << 24}


class Blocks:
    """A chunk cut into blocks: of several small parameters each, or of some rows of one large parameter.

    Tensors of the chunk are written ``(n, …, H, W)`` here, those of a block ``(k, …, h, W)``. Values per row or column
    are split and joined for all blocks at once: next to passes over blocks, small operations cost much.

    Args:
        chunk: Parameters with one local shape of two dims and more.
    """

    def __init__(self, chunk: Chunk) -> None:
        limit = _BLOCK_ELEMENTS["cpu" if chunk.device.type == "cpu" else "other"]
        shard = chunk.weights.tensors[0]
        elements, height = max(1, shard.numel()), shard.shape[-2]
        self._num_members = len(chunk)
        self._members_each = max(1, min(len(chunk), limit // elements))
        self._rows_each = height if elements <= limit else max(1, limit * height // elements)
        self._parts = max(1, -(-height // max(1, self._rows_each)))
        """Blocks that a parameter is cut into."""

    def of(self, tensors: TensorList) -> Iterator[list[torch.Tensor]]:
        """Block by block a view of the part of each of its k parameters, ``(…, h, W)``."""
        for first in range(0, self._num_members, self._members_each):
            members = tensors.tensors[first : first + self._members_each]
            if self._parts == 1:
                yield members
            else:
                yield from ([part] for part in members[0].split(self._rows_each, -2))

    def per_row(self, values: torch.Tensor) -> list[torch.Tensor]:
        """``(n, …, H, 1)`` as views ``(k, …, h, 1)``, one for each block."""
        members = values.split(self._members_each)
        if self._parts == 1:
            return list(members)
        return [part for member in members for part in member.split(self._rows_each, -2)]

    def per_col(self, values: torch.Tensor) -> list[torch.Tensor]:
        """``(n, …)``, where rows do not count, as views ``(k, …)``, one for each block."""
        return [member for member in values.split(self._members_each) for _ in range(self._parts)]

    def rows_joined(self, values: Sequence[torch.Tensor], dim: int = -1) -> torch.Tensor:
        """What every block found for its rows, ``(k, …, h)``, of the whole chunk: ``(n, …, H)``, H at ``dim``."""
        return _joined([_joined(parts, dim) for parts in self._by_parameter(values)], 0)

    def cols_added(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """What every block adds to its columns, ``(k, …, W)``, of the whole chunk: ``(n, …, W)``."""
        return _joined(
            [parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0) for parts in self._by_parameter(values)],
            0,
        )

    def _by_parameter(self, values: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        return [values[first : first + self._parts] for first in range(0, len(values), self._parts)]


def stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One tensor with a dim in front: a view of a single one, a copy of several."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def _joined(values: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return values[0] if len(values) == 1 else torch.cat(list(values), dim)
