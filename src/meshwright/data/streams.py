"""Streams in an order of a whole run: repeated without end, and shards of a source in a fixed order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

from torch.utils.data import IterableDataset

from meshwright.data.loader import forward_epoch, skips
from meshwright.errors import DataError


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
        """Iterate over items ``first``, ``first + step``, …, and read no shard that has none of them."""
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
