"""Mix several sources by weight, in an order that depends on nothing but the seed and the position in the run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

from meshwright.data.loader import GlobalOrder
from meshwright.errors import ConfigError

# 2**64 divided by the golden ratio: its multiples, modulo 2**64, are spread as evenly as can be (Knuth, TAOCP 3, §6.4).
_STEP = 11400714819323198485
_BLOCK = 2**16  # positions that are computed at once


class MixedOrder(Sampler[int]):
    """The endless order of samples of a run over several sources, each with a share of them.

    Position ``k`` of the run takes its source by the ``k``-th point of a sequence that covers 0 to 1 evenly, so every
    stretch of the run holds the sources in the asked proportion, within a few samples. Of its source, it takes the next
    sample in that source's own :class:`GlobalOrder`: small sources with large shares are repeated, in another order
    each time. The order is the same on any number of ranks, and a run resumed at any position sees what the
    uninterrupted one would have.

    Indices count through all sources, as ``torch.utils.data.ConcatDataset`` does.

    Args:
        lengths: Number of samples of each source.
        weights: Share of each source; they are divided by their sum.
        seed: Seed of the run, 0 or more.
        start: Position of the first sample: the number of samples seen before, over all ranks.

    Raises:
        DataError: When a source has no samples.
        ConfigError: When a weight is no positive number, or there are not as many weights as lengths.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[float], seed: int, start: int = 0) -> None:
        if not lengths or len(lengths) != len(weights) or not all(0 < each < float("inf") for each in weights):
            raise ConfigError(
                "The shares of a mixture do not fit its sources",
                expected="a positive number for each source",
                got=f"weights {list(weights)} for {len(lengths)} sources",
                fix="give every source a weight; leave a source out instead of giving it none",
            )
        self.orders = [GlobalOrder(length, seed) for length in lengths]
        self.seed, self.start = seed, start
        shares = np.cumsum(np.array(weights, dtype=np.float64) / np.sum(weights))
        # Of whole numbers, for floating-point sums of thresholds may differ between machines.
        self._thresholds = np.array([int(share * 2**63) for share in shares[:-1]], dtype=np.uint64)
        self._first = np.cumsum([0, *lengths[:-1]])

    def __iter__(self) -> Iterator[int]:
        seen = zip(self.orders, self.counts(self.start), strict=True)
        own = [iter(GlobalOrder(order.num_samples, self.seed, start)) for order, start in seen]
        for first in itertools.count(self.start, _BLOCK):
            for source in self._sources(first, _BLOCK).tolist():
                yield int(self._first[source]) + next(own[source])

    def samples(self, first: int, count: int) -> list[int]:
        """Return the indices of ``count`` samples from position ``first`` on, such as one batch; ignores ``start``."""
        counts, found = self.counts(first), np.empty(count, dtype=np.int64)
        sources = self._sources(first, count)
        for number, order in enumerate(self.orders):
            here = np.flatnonzero(sources == number)
            found[here] = np.array(order.samples(counts[number], len(here)), dtype=np.int64) + self._first[number]
        return found.tolist()

    def counts(self, position: int) -> list[int]:
        """Return how many samples of each source come before a position of the run."""
        counts = np.zeros(len(self.orders), dtype=np.int64)
        for first in range(0, position, _BLOCK):
            counts += np.bincount(self._sources(first, min(_BLOCK, position - first)), minlength=len(counts))
        return counts.tolist()

    def epochs(self, position: int) -> list[float]:
        """Return how often each source has been seen before a position of the run."""
        return [seen / order.num_samples for seen, order in zip(self.counts(position), self.orders, strict=True)]

    def _sources(self, first: int, count: int) -> np.ndarray:
        """Return the number of the source at each position."""
        positions = np.arange(first, first + count, dtype=np.uint64) + np.uint64(self.seed)
        points = (positions * np.uint64(_STEP)) >> np.uint64(1)
        return np.searchsorted(self._thresholds, points, side="right")


IndexOrder = GlobalOrder | MixedOrder
"""Orders of the samples of a whole run, by index."""
