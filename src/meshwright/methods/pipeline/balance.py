"""Where to cut: the dearest stage as cheap as possible, among the cuts whose ranks hold no more than they may."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

Range = tuple[int, int]
"""Blocks of a stage: the first, and the end."""

Need = Callable[[int, tuple[Range, ...]], int]
"""``need(rank, ranges)``: bytes that a pipeline rank holds which computes these blocks; ranges are those of its first
stages, in order, so that a part of a rank can be asked for. It grows with every block."""

_MOST_VISITS = 10_000  # of one search; only ranks of several stages can come near


class Balancer:
    """Searches cuts into consecutive stages, none empty.

    Args:
        costs: Time of every block, in any unit.
        ranks: The pipeline rank of every stage.
        need: What a rank holds.
    """

    def __init__(self, costs: Sequence[float], ranks: Sequence[int], need: Need) -> None:
        self._costs, self.ranks = list(costs), tuple(ranks)
        self._sums: list[float] = [0, *itertools.accumulate(costs)]
        self._ask = need
        self._known: dict[tuple[int, tuple[Range, ...]], int] = {}
        self._visits = 0
        self.is_exhaustive = True
        """Whether every search so far has looked at all there is."""

    def fastest(self, limit_bytes: int) -> tuple[int, ...] | None:
        """The bounds of the cut whose dearest stage is the cheapest of those that fit; None when none is found."""
        blocks = range(len(self._costs))
        bounds = sorted({self._sums[end + 1] - self._sums[first] for first in blocks for end in blocks[first:]})
        best = self._within(bounds[-1], limit_bytes)
        low, high = 0, len(bounds) - 1
        while best is not None and low < high:  # the more time, the more cuts fit
            middle = (low + high) // 2
            found = self._within(bounds[middle], limit_bytes)
            best, low, high = (found, low, middle) if found is not None else (best, middle + 1, high)
        return best

    def smallest(self) -> tuple[int, ...]:
        """The bounds of the cut whose neediest rank needs least, but for a thousandth."""
        best = (*range(self.num_stages), len(self._costs))
        low, high = 0, self._most(best)
        while high - low > high // 1000:
            found = self._within(float("inf"), middle := (low + high) // 2)
            best, low, high = (found, low, self._most(found)) if found is not None else (best, middle + 1, high)
        return best

    @property
    def num_stages(self) -> int:
        """Over all ranks."""
        return len(self.ranks)

    def _most(self, bounds: Sequence[int]) -> int:
        return max(size for _, size in self.needs(bounds))

    def needs(self, bounds: Sequence[int]) -> list[tuple[int, int]]:
        """``(rank, bytes)`` of every rank under a cut."""
        ranges = list(itertools.pairwise(bounds))
        every = sorted(set(self.ranks))
        return [(rank, self._need(rank, self._of(rank, ranges))) for rank in every]

    def _of(self, rank: int, ranges: Sequence[Range]) -> tuple[Range, ...]:
        return tuple(each for each, owner in zip(ranges, self.ranks, strict=False) if owner == rank)

    def _need(self, rank: int, ranges: tuple[Range, ...]) -> int:
        if (rank, ranges) not in self._known:
            self._known[rank, ranges] = self._ask(rank, ranges)
        return self._known[rank, ranges]

    def _within(self, most_time: float, most_bytes: int) -> tuple[int, ...] | None:
        """A cut whose stages take and whose ranks hold no more than that: the first in the order of its bounds."""
        fewest = self._fewest_stages(most_time)
        dead: set[tuple[int, int, tuple[Range, ...]]] = set()
        self._visits = 0

        def complete(ranges: tuple[Range, ...]) -> tuple[Range, ...] | None:
            stage, first = len(ranges), ranges[-1][1] if ranges else 0
            left = len(self.ranks) - stage
            if left == 0:
                return ranges if first == len(self._costs) else None
            open_ranks = set(self.ranks[stage:])  # what these hold already matters from here on
            held = tuple(each for each, rank in zip(ranges, self.ranks, strict=False) if rank in open_ranks)
            if first + left > len(self._costs) or fewest[first] > left or (stage, first, held) in dead:
                return None
            self._visits += 1
            if self._visits > _MOST_VISITS:
                self.is_exhaustive = False
                return None
            rank = self.ranks[stage]
            last = len(self._costs) - left + 1
            for end in range(last if left == 1 else first + 1, last + 1):
                following = (*ranges, (first, end))
                takes, holds = self._sums[end] - self._sums[first], self._need(rank, self._of(rank, following))
                if takes > most_time or holds > most_bytes:
                    break  # more blocks take and hold more
                found = complete(following)
                if found is not None:
                    return found
            dead.add((stage, first, held))
            return None

        found = complete(())
        return (0, *(end for _, end in found)) if found is not None else None

    def _fewest_stages(self, most_time: float) -> list[int]:
        """Per block: stages that all blocks from it on take at least."""
        count = len(self._costs)
        fewest = [0] * (count + 1)
        for first in reversed(range(count)):
            end = first
            while end < count and self._sums[end + 1] - self._sums[first] <= most_time:
                end += 1
            fewest[first] = fewest[end] + 1 if end > first else count + 1
        return fewest


def balanced_bounds(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """The cut into consecutive stages, none empty, whose dearest stage is the cheapest possible.

    Args:
        costs: Of every block, in any unit of time; those of what is around the blocks belong to the first and the last.
        stages: How many.
    """
    bounds = Balancer(costs, range(stages), lambda rank, ranges: 0).fastest(0)
    assert bounds is not None, "there are as many blocks as stages"
    return bounds
