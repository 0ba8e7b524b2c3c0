"""Which sample comes when, and on which replica: orders that do not depend on the number of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler, IterableDataset, Sampler

from meshwright.errors import ConfigError, DataError


class GlobalOrder(Sampler[int]):
    """The endless order of samples of a whole run, over all its epochs.

    Sample number ``k``, counted over the whole run, is ``permutation_of_epoch(k // n)[k % n]``. The order depends on
    the seed alone; so a run resumed at position ``p`` sees exactly what the uninterrupted run would have seen, on
    however many ranks. Under ``ShardedSampler`` replica ``r`` of ``R`` sees numbers ``start + r``, ``start + r + R``, …

    Args:
        num_samples: Length ``n`` of the dataset.
        seed: Seed of the run, 0 or more.
        start: Position of the first sample: samples already seen, over all ranks.
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
        """The indices of so many samples from a position on, for instance those of one batch; ``start`` is ignored."""
        found: list[int] = []
        while len(found) < count:
            epoch, offset = divmod(first + len(found), self.num_samples)
            found += self.permutation_of_epoch(epoch)[offset : offset + count - len(found)].tolist()
        return found

    def permutation_of_epoch(self, epoch: int) -> np.ndarray:
        """The order within one epoch: int64 of shape (num_samples,)."""
        if not self.shuffle:
            return np.arange(self.num_samples)
        # numpy promises the raw words of a bit generator for ever, the results of Generator.permutation only until
        # the next version; and a run may be resumed after an update.
        words = np.random.PCG64([self.seed, epoch]).random_raw(self.num_samples)
        return np.argsort(words, kind="stable")


class ShardedSampler(Sampler[Any]):
    """Every ``num_replicas``-th index of any sampler, beginning at ``replica``.

    All replicas get equally many indices. When the sampler's length does not divide, the last round is filled with
    indices from the start, as torch's DistributedSampler does; or it is dropped. The sampler must yield the same
    indices on every replica.

    Args:
        sampler: Any iterable of indices that can be iterated again for the next epoch; may be endless.
        replica: This replica's number, 0 to ``num_replicas - 1``.
        num_replicas: Number of replicas.
        drop_last: Drops the incomplete last round instead of filling it.

    Raises:
        DataError: When there is no such replica.
    """

    def __init__(self, sampler: Iterable[Any], replica: int, num_replicas: int, drop_last: bool = False) -> None:
        check_replica(replica, num_replicas)
        self.sampler, self.replica, self.num_replicas, self.drop_last = sampler, replica, num_replicas, drop_last

    def __iter__(self) -> Iterator[Any]:
        indices = iter(self.sampler)
        first: tuple[Any, ...] = ()
        while round_ := tuple(itertools.islice(indices, self.num_replicas)):
            first = first or round_
            missing = self.num_replicas - len(round_)
            if missing and self.drop_last:
                return
            yield (round_ + tuple(itertools.islice(itertools.cycle(first), missing)))[self.replica]

    def __len__(self) -> int:
        """Indices per replica; TypeError, as usual, when the sampler has no length."""
        return _share(self.sampler, self.num_replicas, self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Tells the sampler the epoch, if it listens."""
        forward_epoch(self.sampler, epoch)


class UndividedOrder(Sampler[int]):
    """The order that a torch DistributedSampler divides among its ranks, before it does.

    A :class:`ShardedSampler` around it yields what the DistributedSampler would, on any number of replicas.

    Args:
        sampler: Stays the one whose ``set_epoch`` counts: its owner goes on calling it.
    """

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        own = self.sampler
        whole: DistributedSampler[Any] = DistributedSampler(
            own.dataset, num_replicas=1, rank=0, shuffle=own.shuffle, seed=own.seed
        )
        whole.set_epoch(own.epoch)
        return iter(whole)

    def __len__(self) -> int:
        return len(self.sampler.dataset)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Tells the sampler the epoch."""
        self.sampler.set_epoch(epoch)


class ShardedStream(IterableDataset[Any]):
    """Every ``num_replicas``-th item of a stream, beginning at ``replica``.

    All replicas get equally many items: those behind the last complete round are left out, for a stream cannot be
    asked for its start again. The stream must be the same on every replica. As always in torch, a stream that is read
    by several DataLoader workers must share itself out between them (``torch.utils.data.get_worker_info``).

    Args:
        stream: The dataset.
        replica: This replica's number, 0 to ``num_replicas - 1``.
        num_replicas: Number of replicas.

    Raises:
        DataError: When there is no such replica.
    """

    def __init__(self, stream: IterableDataset[Any], replica: int, num_replicas: int) -> None:
        check_replica(replica, num_replicas)
        self.stream, self.replica, self.num_replicas = stream, replica, num_replicas

    def __iter__(self) -> Iterator[Any]:
        mine: Any = None
        for index, item in enumerate(self.stream):
            if index % self.num_replicas == self.replica:
                mine = item
            if index % self.num_replicas == self.num_replicas - 1:
                yield mine

    def __len__(self) -> int:
        """Items per replica; TypeError, as usual, when the stream has no length."""
        return _share(self.stream, self.num_replicas, drop_last=True)

    def set_epoch(self, epoch: int) -> None:
        """Tells the stream the epoch, if it listens."""
        forward_epoch(self.stream, epoch)


def check_replica(replica: int, num_replicas: int) -> None:
    """Refuses a replica that does not exist.

    Raises:
        DataError: Unless ``0 <= replica < num_replicas``.
    """
    if not 0 <= replica < num_replicas:
        raise DataError(
            "There is no such data-parallel replica",
            expected=f"0 to {num_replicas - 1}" if num_replicas > 0 else "1 replica or more",
            got=f"replica {replica} of {num_replicas}",
            fix="pass this rank's index along the data axes, and their size",
        )


def forward_epoch(listener: Any, epoch: int) -> None:
    """Calls ``listener.set_epoch(epoch)`` where there is such a method."""
    set_epoch = getattr(listener, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def _share(whole: Any, num_replicas: int, drop_last: bool) -> int:
    if not isinstance(whole, Sized):
        raise TypeError(f"{type(whole).__name__} has no length")
    return len(whole) // num_replicas if drop_last else math.ceil(len(whole) / num_replicas)
