"""Orders of a whole run: streams repeated without end, shards of a source in a fixed order, mixtures by weight."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from meshwright.data.loader import forward_epoch, skips
from meshwright.errors import ConfigError, DataError


class GlobalOrder(Sampler[int]):
    """The endless order of samples of a whole run, over all its epochs.

    Sample ``k``, counted over the whole run, is ``permutation_of_epoch(k // n)[k % n]``. The order depends on the seed
    alone: a run resumed at position ``p`` sees what the uninterrupted run would have seen, on any number of ranks.
    Under ``ShardedSampler`` replica ``r`` of ``R`` sees samples ``start + r``, ``start + r + R``, …

    Args:
        num_samples: Length ``n`` of the dataset.
        seed: Seed of the run, 0 or more.
        start: Position of the first sample: the number of samples seen before, over all ranks.
        shuffle: False for the dataset's own order in every epoch.

    Raises:
        DataError: When there are no samples.
        ConfigError: When seed or start is negative.
    """

    def __init__(self, num_samples: int, seed: int, start: int = 0, shuffle: bool = True) -> None:
        if num_samples < 1:
            raise DataError(
                "There are no samples to put into order",
                expected="1 or more",
                got=str(num_samples),
                fix="check the dataset's files",
            )
        for name, value in (("seed", seed), ("start", start)):
            if value < 0:
                raise ConfigError(f"{name} is negative", expected="0 or more", got=str(value), fix=f"correct {name}")
        self.num_samples, self.seed, self.start, self.shuffle = num_samples, seed, start, shuffle

    def __iter__(self) -> Iterator[int]:
        first_epoch, offset = divmod(self.start, self.num_samples)
        for epoch in itertools.count(first_epoch):
            yield from map(int, self.permutation_of_epoch(epoch)[offset:])
            offset = 0

    def samples(self, first: int, count: int) -> list[int]:
        """Return the indices of ``count`` samples from position ``first`` on, such as one batch; ignores ``start``."""
        found: list[int] = []
        while len(found) < count:
            epoch, offset = divmod(first + len(found), self.num_samples)
            found += self.permutation_of_epoch(epoch)[offset : offset + count - len(found)].tolist()
        return found

    def permutation_of_epoch(self, epoch: int) -> np.ndarray:
        """Return the order within one epoch: int64 of shape (num_samples,)."""
        if not self.shuffle:
            return np.arange(self.num_samples)
        # numpy guarantees a bit generator's raw words for all versions, but not the results of Generator.permutation,
        # and a run may be resumed after an update.
        words = np.random.PCG64([self.seed, epoch]).random_raw(self.num_samples)
        return np.argsort(words, kind="stable")


class RepeatedStream(IterableDataset[Any]):
    """An endless stream that iterates its source anew whenever it ends, setting its epoch if it has one.

    Args:
        source: Yields the same samples on every rank, each time that it is iterated.
        start: Number of samples seen before, over all ranks. They are read and skipped, unless the source has a length
            and leaves out what it need not read, as :class:`InterleavedShards` does.

    Raises:
        DataError: When iterating finds nothing: an empty source, or one that can be iterated only once.
    """

    def __init__(self, source: Iterable[Any], start: int = 0) -> None:
        self.source, self.start = source, start

    def __iter__(self) -> Iterator[Any]:
        return self.every(0, 1)

    @property
    def can_skip(self) -> bool:
        """Return whether ``every`` need not read what it leaves out."""
        return skips(self.source) and isinstance(self.source, Sized) and len(self.source) > 0

    def every(self, first: int, step: int) -> Iterator[Any]:
        """Iterate over samples ``first``, ``first + step``, … from ``start`` on."""
        if not self.can_skip:
            return itertools.islice(self._read(), first, None, step)
        source: Any = self.source
        return self._seek(source, len(source), self.start + first, step)

    def _seek(self, source: Any, length: int, position: int, step: int) -> Iterator[Any]:
        while True:
            epoch, offset = divmod(position, length)
            forward_epoch(source, epoch)
            for item in source.every(offset, step):
                yield item
                position += step

    def _read(self) -> Iterator[Any]:
        to_skip, epoch = self.start, 0
        while True:
            forward_epoch(self.source, epoch)
            count = 0
            for count, item in enumerate(self.source, start=1):  # noqa: B007 - used after the loop
                if to_skip:
                    to_skip -= 1
                else:
                    yield item
            if count == 0:
                raise DataError(
                    "The stream of samples is empty",
                    expected="1 sample or more every time that it is iterated",
                    got="none in its first epoch" if epoch == 0 else f"none in epoch {epoch + 1}",
                    fix="check its source; return a dataset or a list instead of a generator, which ends for good",
                )
            epoch += 1


class InterleavedShards(IterableDataset[Any]):
    """Shards of known lengths as one stream: the first item of each shard, then the second of each, and so on.

    The order does not depend on the number of ranks, and a replica opens only the shards that hold its items. Those are
    few where the number of replicas is a multiple of the number of shards, or divides it, until shorter shards end.

    Args:
        shards: Datasets, or other iterables that can be iterated again; those with a ``set_epoch`` hear of epochs.
        lengths: Number of items in each; None asks the shards.

    Raises:
        DataError: When lengths and shards do not fit, and while iterating when a shard ends before its length.
    """

    def __init__(self, shards: Sequence[Iterable[Any]], lengths: Sequence[int] | None = None) -> None:
        self.shards = list(shards)
        sized: Any = self.shards
        self.lengths = list(map(len, sized)) if lengths is None else list(lengths)
        if len(self.lengths) != len(self.shards):
            raise DataError(
                "InterleavedShards has not as many lengths as shards",
                expected=f"{len(self.shards)} lengths",
                got=str(len(self.lengths)),
                fix="give the number of items of each shard",
            )

    def __len__(self) -> int:
        return sum(self.lengths)

    def __iter__(self) -> Iterator[Any]:
        return self.every(0, 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the shards that have one."""
        for each in self.shards:
            forward_epoch(each, epoch)

    def every(self, first: int, step: int) -> Iterator[Any]:
        """Iterate over items ``first``, ``first + step``, …, and read no shard that has none of them.

        Raises:
            DataError: When a shard ends before its length, or each of several workers would read all items.
        """
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise DataError(
                "InterleavedShards is read in one order, by one worker",
                expected="num_workers of 0 or 1",
                got=f"num_workers={worker.num_workers}, of which each would read every item",
                fix="leave num_workers out, or take a dataset with a length and indices",
            )
        opened: dict[int, tuple[Iterator[Any], int]] = {}
        for number, index in itertools.islice(self._places(), first, None, step):
            items, done = opened.get(number) or (iter(self.shards[number]), 0)
            try:
                yield next(itertools.islice(items, index - done, None))
            except StopIteration:
                raise DataError(
                    f"Shard {number} has ended before its length",
                    expected=f"{self.lengths[number]} items",
                    got=f"no item {index}",
                    fix="correct lengths",
                ) from None
            opened[number] = items, index + 1

    def _places(self) -> Iterator[tuple[int, int]]:
        """Iterate over shard and index within it of all items, in order."""
        for index in range(max(self.lengths, default=0)):
            for number, length in enumerate(self.lengths):
                if index < length:
                    yield number, index


# --- Mixtures of several sources

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
