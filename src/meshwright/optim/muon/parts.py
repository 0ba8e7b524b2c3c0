"""What is orthogonalised as one matrix: a weight, one of a stack, or a part of a fused one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from meshwright.errors import ModelError
from meshwright.optim.sharded import Layout, Parts, Region


@dataclass(frozen=True)
class MatrixParts:
    """Names the blocks of a weight that are matrices of their own; equal for equal arguments.

    Args:
        split: Number of equal parts that a matrix consists of, or their sizes.
        split_dim: Along which dim, from the end: −2 for ``Linear`` weights ``(out, in)``.
    """

    split: int | tuple[int, ...] = 1
    split_dim: int = -2

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the parts of each matrix along the split dim.

        Raises:
            ModelError: When they do not make up the matrix.
        """
        total = shape[self.split_dim]
        sizes = (total // self.split,) * self.split if isinstance(self.split, int) else self.split
        if sum(sizes) != total:
            raise ModelError(
                "A matrix does not consist of the parts that it is to be split into",
                expected=f"{self.split!r} along dim {self.split_dim}",
                got=f"shape {shape}",
                fix="give fused weights a parameter group of their own, with the split that they have",
            )
        return sizes

    def first(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Height and width of the first part of a matrix."""
        extent = list(shape[-2:])
        extent[self.split_dim] = self.sizes(shape)[0]
        return extent[0], extent[1]

    def __call__(self, layout: Layout) -> Parts:
        """One block for each matrix, or part of one."""
        shape, axis = layout.shape, layout.ndim + self.split_dim
        sizes = self.sizes(shape)
        starts = list(itertools.accumulate(sizes, initial=0))
        blocks = []
        for index in itertools.product(*map(range, shape[:-2])):
            for start, size in zip(starts, sizes, strict=False):
                offset, extent = [*index, 0, 0], [*(1 for _ in index), *shape[-2:]]
                offset[axis], extent[axis] = start, size
                blocks.append(Region(tuple(offset), tuple(extent)))
        return tuple((block, block) for block in blocks)
