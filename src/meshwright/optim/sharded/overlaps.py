"""Who holds what of a block of a tensor, looked up once for the many tensors of a model that are laid out alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.optim.sharded.regions import Block


@dataclass(frozen=True, slots=True)
class Overlap:
    """What ranks hold of one block."""

    blocks: Mapping[int, Block]
    """By rank; only of those that hold anything of it."""
    holders: Mapping[Block, list[int]]
    """The ranks that hold each of these."""
    whole: list[int]
    """Ranks that hold all of it."""


@dataclass
class Overlaps:
    """The blocks of one layout, by rank."""

    held: Mapping[int, Block]
    _known: dict[Block, Overlap] = field(default_factory=dict)

    def of(self, block: Block) -> Overlap:
        """What every rank holds of a block."""
        if block not in self._known:
            common = {rank: held.common(block) for rank, held in self.held.items()}
            blocks = {rank: part for rank, part in common.items() if part.numel > 0}
            holders: dict[Block, list[int]] = defaultdict(list)
            for rank, part in blocks.items():
                holders[part].append(rank)
            self._known[block] = Overlap(blocks, dict(holders), holders.get(block, []))
        return self._known[block]
