"""The ops of a model as plain data, by the paths of its blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from meshwright.cost import Op, pass_flops
from meshwright.nn import find_blocks

if TYPE_CHECKING:
    from meshwright.planner.profile.recorder import Ops


@dataclass(frozen=True)
class ModelOps:
    """What a micro-batch computes on one rank.

    Args:
        blocks: The path of every block that ran, with its ops.
        outside: Before the blocks and between them.
        behind: After the last block.
        runs: How often each of the blocks ran, by its path.
    """

    blocks: tuple[tuple[str, tuple[Op, ...]], ...]
    outside: tuple[Op, ...]
    behind: tuple[Op, ...]
    runs: Mapping[str, int]

    @functools.cached_property
    def by_path(self) -> dict[str, tuple[Op, ...]]:
        """The ops of every block, equal ones together."""
        alike = {id(ops): ops for _, ops in self.blocks}  # equal blocks have one description
        counted = {key: together(ops) for key, ops in alike.items()}
        return {path: counted[id(ops)] for path, ops in self.blocks}

    def outside_of(self, blocks: Container[str], last_rank: int | None) -> tuple[Op, ...]:
        """The ops of no block, and of blocks that are not among these; equal ones together.

        Args:
            blocks: Paths.
            last_rank: The pipeline rank that runs what is behind the blocks; None: there is no pipeline. What is before
                them runs on all of its ranks.
        """
        others = [op for path, ops in self.blocks if path not in blocks for op in ops]
        behind = together(self.behind)
        return (*together((*self.outside, *others)), *(dataclasses.replace(op, on_rank=last_rank) for op in behind))

    @property
    def flops(self) -> int:
        """Floating-point operations of forward and backward."""
        return sum(sum(pass_flops(op)) for op in self._every())

    def flops_in(self, dtype: str) -> int:
        """Those of one precision."""
        return sum(sum(pass_flops(op)) for op in self._every() if op.dtype == dtype)

    def _every(self) -> Iterator[Op]:
        for _, ops in self.blocks:
            yield from ops
        yield from self.outside
        yield from self.behind


def together(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Equal ops as one that counts them."""
    found: dict[Op, int] = {}
    for op in ops:
        found[op] = found.get(op, 0) + 1
    return tuple(dataclasses.replace(op, count=count * op.count) for op, count in found.items())


def model_ops(model: nn.Module, ops: Ops) -> ModelOps:
    """The ops with paths in place of modules."""
    paths = tuple((path, ops.inside[block]) for path, block in find_blocks(model) if block in ops.inside)
    runs = {path: ops.runs[block] for path, block in find_blocks(model) if block in ops.inside}
    return ModelOps(paths, ops.outside, ops.behind, runs)
