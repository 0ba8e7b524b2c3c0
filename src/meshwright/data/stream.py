"""A stream of samples for a whole run, over as many epochs as it takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from meshwright.data.order import forward_epoch
from meshwright.errors import DataError


class RepeatedStream(IterableDataset[Any]):
    """An iterable from its beginning again whenever it ends; its ``set_epoch``, if it has one, is told each time.

    Args:
        source: Yields the same samples on every rank, each time that it is iterated.
        start: Samples already seen, over all ranks: they are read and passed over, for a stream has no places.

    Raises:
        DataError: When iterating finds nothing: an empty source, or one that can be iterated only once.
    """

    def __init__(self, source: Iterable[Any], start: int = 0) -> None:
        self.source, self.start = source, start

    def __iter__(self) -> Iterator[Any]:
        to_skip, epoch = self.start, 0
        while True:
            forward_epoch(self.source, epoch)
            count = 0
            for count, item in enumerate(self.source, start=1):  # noqa: B007 - counted for what follows
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
