"""Who holds what of a region of a tensor, looked up once for the many tensors of a model that are laid out alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.optim.sharded.regions import Region


@dataclass(frozen=True, slots=True)
class Overlap:
    """What ranks hold of one region."""

    regions: Mapping[int, Region]
    """By rank; only of those that hold anything of it."""
    holders: Mapping[Region, list[int]]
    """The ranks that hold each of these."""
    whole: list[int]
    """Ranks that hold all of it."""


@dataclass
class Overlaps:
    """The regions of one layout, by rank."""

    held: Mapping[int, Region]
    _known: dict[Region, Overlap] = field(default_factory=dict)

    def of(self, region: Region) -> Overlap:
        """What every rank holds of a region."""
        if region not in self._known:
            common = {rank: held.common(region) for rank, held in self.held.items()}
            regions = {rank: part for rank, part in common.items() if part.numel > 0}
            holders: dict[Region, list[int]] = defaultdict(list)
            for rank, part in regions.items():
                holders[part].append(rank)
            self._known[region] = Overlap(regions, dict(holders), holders.get(region, []))
        return self._known[region]
