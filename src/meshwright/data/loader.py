"""Load global batches for data-parallel replicas, in an order that does not depend on the number of ranks."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from meshwright.errors import ConfigError, DataError, did_you_mean, join_names

if TYPE_CHECKING:
    from meshwright.data.host_reader import HostLoader

_END = object()
_LOADER_ARGS = tuple(name for name in inspect.signature(DataLoader).parameters if name != "dataset")


class GlobalBatchLoader(DataLoader[Any]):
    """A torch DataLoader that yields this replica's share of every global batch; made by :func:`global_batch_loader`.

    Iterating to the end begins the next epoch, with another order if it shuffles; stopping before repeats the same
    epoch. Every rank must iterate alike. A resumed run calls ``set_epoch``.

    Unlike torch's loaders, it draws no random number of the process at the start of an epoch: a run that is resumed
    within one has the same dropout. Workers are seeded by the epoch and the process's seed.
    """

    def __init__(self, dataset: Dataset[Any], *, replica_batch_size: int, num_replicas: int, **options: Any) -> None:
        super().__init__(dataset, batch_size=replica_batch_size, **options)
        self._options = {"batch_size": replica_batch_size, **options}
        self._host: HostLoader | None = None
        self.replica_batch_size = replica_batch_size
        self.global_batch_size = replica_batch_size * num_replicas
        self.num_replicas = num_replicas
        self._seeds_workers = self.generator is None
        self.epoch = 0
        """Number of the current iteration, or of the next one."""
        self.waiting: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        """Entered around the wait for every batch, by a profile."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._seeds_workers:
            self.generator = _worker_seeds(self.epoch)
        # Workers start now, not with the first batch.
        host = self._host
        if host is None:
            return self._iterate(super().__iter__())
        return self._iterate(self._from_host(host, host.batches(self.epoch, self.generator)))

    def _from_host(self, host: HostLoader, batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        if host.reads_nothing:
            self._host = None
            yield from super().__iter__()

    def read_once_per_host(self) -> None:
        """Let one rank of each host read a stream for the others; collective.

        Does nothing for datasets that can be indexed, and for streams that leave out what they need not read.
        :mod:`meshwright.data.host_reader` says how.
        """
        stream = self.dataset
        if not isinstance(stream, ShardedStream) or skips(stream.stream):
            return
        from meshwright.data.host_reader import join_host  # late: few runs need it

        if (host := join_host(stream.replica)) is not None:
            rounds = ShardedRounds(stream.stream, host.replicas, stream.num_replicas, stream.epoch)
            self._host = host.loader(rounds, self.collate_fn, self._options)

    def _iterate(self, batches: Iterable[Any]) -> Iterator[Any]:
        last_counts = self._last_counts()
        last = len(self) - 1 if last_counts is not None else None
        every = (self.replica_batch_size,) * self.num_replicas if last_counts is not None else None
        for number, batch in enumerate(self._waited_for(batches)):
            _CURRENT[:] = [last_counts if number == last else every]
            if number == last and last_counts is not None:
                # It stays after the end: whoever reads ahead takes it only then.
                _FILLED_UP[self] = (batch, last_counts)
            elif self in _FILLED_UP and _FILLED_UP[self][0] is batch:  # a dataset's own object, whole this time
                del _FILLED_UP[self]
            yield batch
        _CURRENT.clear()
        self.set_epoch(self.epoch + 1)

    def _waited_for(self, batches: Iterable[Any]) -> Iterator[Any]:
        ahead = iter(batches)
        while True:
            with self.waiting():
                batch = next(ahead, _END)
            if batch is _END:
                return
            yield batch

    def _last_counts(self) -> tuple[int, ...] | None:
        """Return how many samples of the last batch are no repeats, on each replica; None if all are, or unknown."""
        size = self.last_batch_size
        order: Any = self.sampler
        if size is None or self.drop_last:
            return None
        if isinstance(order, ShardedSampler):
            order = order.sampler
        elif type(order) is DistributedSampler:
            order = order.dataset
        else:
            return None
        rest = len(order) % self.num_replicas if isinstance(order, Sized) else 0
        return tuple(size - (replica >= rest) for replica in range(self.num_replicas)) if rest else None

    @property
    def last_batch_size(self) -> int | None:
        """Return the number of this replica's samples in the last batch of an epoch; None if it is unknown."""
        if isinstance(self.dataset, IterableDataset) or not isinstance(self.sampler, Sized):
            return None
        try:
            rest = len(self.sampler) % self.replica_batch_size
        except TypeError:  # an order without an end
            return None
        return rest if rest and not self.drop_last else self.replica_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also of samplers and datasets with a ``set_epoch``; call it before iterating."""
        self.epoch = epoch
        forward_epoch(self.sampler, epoch)
        forward_epoch(self.dataset, epoch)


# Of the batch that was yielded last, by any loader, and of each loader's latest batch that was filled up with repeats:
# how many samples are no repeats, on each replica.
_CURRENT: list[tuple[int, ...] | None] = []
_FILLED_UP: weakref.WeakKeyDictionary[GlobalBatchLoader, tuple[Any, tuple[int, ...]]] = weakref.WeakKeyDictionary()


def real_counts(batch: Any) -> tuple[int, ...] | None:
    """Return how many samples of a batch are no repeats, on each replica; None unless it was filled up with some.

    Args:
        batch: The very object that a :class:`GlobalBatchLoader` has yielded.
    """
    return next((counts for found, counts in _FILLED_UP.values() if found is batch), None)


def current_counts() -> tuple[int, ...] | None:
    """Return the same of the batch that was yielded last; None if no batch of its epoch is filled up."""
    return _CURRENT[0] if _CURRENT else None


def _worker_seeds(epoch: int) -> torch.Generator:
    # The initial seed is the run's and the replica's, and checkpoints save it beside the generator's state.
    (word,) = np.random.SeedSequence([torch.initial_seed(), epoch]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(word))


def global_batch_loader(
    dataset: Dataset[Any],
    *,
    loader_args: Mapping[str, Any] | None,
    replica: int,
    num_replicas: int,
    sampler_cls: type | None = None,
    sampler_seed: int = 0,
) -> GlobalBatchLoader:
    """Make the DataLoader of one data-parallel replica.

    The k-th batches of all replicas together are the k-th batch of a single replica: the number of replicas changes
    neither the batches nor their order. Only if the dataset's length does not divide, the last, incomplete batch is
    filled with up to ``num_replicas - 1`` samples from the start, so that all replicas take equally many steps; with
    ``drop_last`` it is dropped on all of them.

    Args:
        dataset: Map-style or iterable. Of an iterable one, every replica takes every ``num_replicas``-th item; items
            after the last complete round are left out. :class:`ShardedStream` says how it need not read the others,
            and ``read_once_per_host`` of the loader lets one rank read for all of a host.
        loader_args: Keyword arguments of torch's DataLoader, not modified, with two differences: ``batch_size`` is
            global (default: ``num_replicas``), and ``shuffle`` is True by default. A ``sampler`` must yield the same
            indices on every replica, and is divided among them. A torch DistributedSampler gives the order, which is
            divided among these replicas, whatever its ``num_replicas`` and ``rank`` are.
        replica: Index of this rank's replica, equal on ranks that get the same batches.
        num_replicas: Number of data-parallel replicas.
        sampler_cls: Used instead of torch's DistributedSampler and called like it:
            ``sampler_cls(dataset, shuffle=, num_replicas=, rank=, seed=)``.
        sampler_seed: Seed of the order, equal on all ranks.

    Raises:
        ConfigError: When a key is no argument of DataLoader, or ``sampler_cls`` cannot be called as above.
        DataError: When batch size, dataset and sampler do not fit together.
    """
    check_replica(replica, num_replicas)
    options = dict(loader_args or {})
    _check_keys(options)
    batch_size = options.pop("batch_size", num_replicas)
    _check_batch_size(batch_size, num_replicas)
    _check_dataset(dataset, batch_size, bool(options.get("drop_last")))
    shuffle, sampler = options.pop("shuffle", None), options.pop("sampler", None)
    _check_order(dataset, shuffle, sampler, options.pop("batch_sampler", None), sampler_cls)
    drop_last = bool(options.get("drop_last"))
    if isinstance(dataset, IterableDataset):
        _check_whole(dataset)
        dataset = ShardedStream(dataset, replica, num_replicas)
    elif sampler is not None:
        options["sampler"] = _divided(sampler, replica, num_replicas, drop_last)
    else:
        shuffle = True if shuffle is None else bool(shuffle)
        order = {"shuffle": shuffle, "num_replicas": num_replicas, "rank": replica, "seed": sampler_seed}
        options["sampler"] = _make_sampler(dataset, sampler_cls, order, drop_last)
    size = batch_size // num_replicas
    return GlobalBatchLoader(dataset, replica_batch_size=size, num_replicas=num_replicas, **options)


def _check_keys(options: Mapping[str, Any]) -> None:
    for key in options:
        if key not in _LOADER_ARGS:
            raise ConfigError(
                f"loader_args has an unknown key {key!r}{did_you_mean(str(key), _LOADER_ARGS)}",
                expected=f"keyword arguments of torch.utils.data.DataLoader: {join_names(_LOADER_ARGS, limit=20)}",
                got=repr(key),
                fix="correct the key or leave it out",
            )


def _check_batch_size(batch_size: Any, num_replicas: int) -> None:
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise DataError(
            "batch_size is not a count",
            expected="the global batch size, an integer of 1 or more",
            got=repr(batch_size),
            fix="give the number of samples that all replicas together take in one step",
        )
    below = batch_size - batch_size % num_replicas
    if below != batch_size:
        nearest = f"{below} or {below + num_replicas}" if below else f"{num_replicas}"
        raise DataError(
            "The global batch does not divide between the data-parallel replicas",
            expected=f"a batch_size that is a multiple of {num_replicas} (batch_size counts samples over all replicas)",
            got=f"batch_size {batch_size} for {num_replicas} replicas",
            fix=f"use {nearest}{numbers_that_divide(batch_size)}",
        )


def numbers_that_divide(batch_size: int, parts: int = 1) -> str:
    """Return advice on numbers of replicas that divide a global batch, such as ``", or 1, 2 or 4 replicas"``.

    Args:
        batch_size: Samples in a step over all replicas.
        parts: Micro-batches per replica.
    """
    samples = batch_size // parts if batch_size % parts == 0 else 0
    found = [str(number) for number in range(1, samples + 1) if samples % number == 0]
    shown = found if len(found) <= 8 else [*found[:7], "…"]
    if not shown:
        return ""
    several = f"{', '.join(shown[:-1])} or {shown[-1]}" if len(shown) > 1 else shown[0]
    return f", or {several} replica{'s' if several != '1' else ''}"


def _check_dataset(dataset: Any, batch_size: int, drop_last: bool) -> None:
    if isinstance(dataset, IterableDataset):
        return
    if isinstance(dataset, str | bytes | os.PathLike):
        raise DataError(
            "A path is no dataset",
            expected="a dataset with __getitem__ and __len__, or a torch IterableDataset",
            got=f"{dataset!r:.80}",
            fix="read it: meshwright.data's TokenDataset(token_cache([FILE], ByteTokenizer(), CACHE_DIR), seq_len) has "
            "the tokens of a text file; meshwright train takes names of files",
        )
    if not isinstance(dataset, Sized):
        raise DataError(
            f"{type(dataset).__name__} has no length",
            expected="a dataset with __getitem__ and __len__, or a torch IterableDataset",
            got=f"{type(dataset).__name__} without __len__",
            fix="add __len__, or derive it from torch.utils.data.IterableDataset",
        )
    if len(dataset) == 0:
        raise DataError("The dataset is empty", expected="1 sample or more", got="0 samples", fix="check its source")
    if drop_last and len(dataset) < batch_size:
        raise DataError(
            "drop_last leaves no batch",
            expected=f"at least one global batch of {batch_size} samples",
            got=f"{len(dataset)} samples",
            fix="use a smaller batch_size, more data, or drop_last=False",
        )


def _check_order(dataset: Any, shuffle: Any, sampler: Any, batch_sampler: Any, sampler_cls: type | None) -> None:
    if batch_sampler is not None:
        raise DataError(
            "batch_sampler cannot be shared out between replicas: only it knows how its batches may be divided",
            expected="batch_size and, for an order of your own, sampler or sampler_cls",
            got=f"batch_sampler={type(batch_sampler).__name__}",
            fix="pass the sampler inside it as 'sampler' and its batch size, over all replicas, as 'batch_size'",
        )
    given = {"shuffle": bool(shuffle), "sampler": sampler is not None, "sampler_cls": sampler_cls is not None}
    names = [name for name, is_given in given.items() if is_given]
    if isinstance(dataset, IterableDataset):
        owner, surplus = "the IterableDataset, which has its own order", names
    elif sampler is not None:
        owner, surplus = "the sampler", [name for name in names if name != "sampler"]
    else:  # sampler_cls takes shuffle as an argument
        return
    if surplus:
        raise DataError(
            "The order of samples is decided more than once",
            expected=f"{owner}, alone",
            got=f"{type(dataset).__name__} with {' and '.join(names)}",
            fix=f"leave out {' and '.join(surplus)}",
        )


def _divided(sampler: Any, replica: int, num_replicas: int, drop_last: bool) -> ShardedSampler:
    if type(sampler) is DistributedSampler:  # usual in code written for DDP
        return ShardedSampler(UndividedOrder(sampler), replica, num_replicas, drop_last or sampler.drop_last)
    _check_undivided(sampler)
    _check_same_on_every_replica(sampler, num_replicas)
    return ShardedSampler(sampler, replica, num_replicas, drop_last)


def _check_undivided(sampler: Any) -> None:
    # A sampler that yields one rank's part already would be divided a second time.
    parts = getattr(sampler, "num_replicas", 1)
    if isinstance(parts, int) and parts > 1:
        raise DataError(
            f"{type(sampler).__name__} has been divided among ranks already, and would be divided once more",
            expected="a sampler that yields the indices of the whole order on every replica",
            got=f"num_replicas={parts}",
            fix="leave it out: shuffling by epochs is the default; or pass its class, called like torch's "
            "DistributedSampler, as distributed_sampler_cls",
        )


def _check_same_on_every_replica(sampler: Any, num_replicas: int) -> None:
    # torch's random samplers without a generator draw from the global one, which is seeded per replica for dropout:
    # replicas would divide different orders, and see some samples twice and others never.
    draws_globally = isinstance(sampler, Sampler) and getattr(sampler, "generator", sampler) is None
    if draws_globally and num_replicas > 1:
        raise DataError(
            f"{type(sampler).__name__} without a generator draws another order on every replica",
            expected="a sampler that yields the same indices on every replica",
            got="generator=None",
            fix="pass generator=torch.Generator().manual_seed(…) to it, or leave it out: shuffling is the default",
        )


def _check_whole(stream: Any) -> None:
    # ``split_dataset_by_node`` of Hugging Face's datasets leaves this mark.
    if getattr(stream, "_distributed", None) is not None:
        raise DataError(
            f"The {type(stream).__name__} has been divided among ranks already, and would be divided once more",
            expected="the whole stream on every rank, of which each replica takes its share",
            got="the result of split_dataset_by_node",
            fix="leave split_dataset_by_node out",
        )


def _make_sampler(dataset: Any, sampler_cls: type | None, order: dict[str, Any], drop_last: bool) -> Iterable[Any]:
    if sampler_cls is None:
        # It must drop what the loader drops: a tail filled up for 4 replicas would be a batch that 1 replica drops.
        return DistributedSampler(dataset, drop_last=drop_last, **order)
    try:
        inspect.signature(sampler_cls).bind(dataset, **order)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{sampler_cls.__name__} cannot be used as sampler_cls",
            expected="a class called as sampler_cls(dataset, shuffle=, num_replicas=, rank=, seed=)",
            got=str(error),
            fix="give its __init__ these arguments, as torch's DistributedSampler has them",
        ) from error
    sampler: Iterable[Any] = sampler_cls(dataset, **order)
    return sampler


# --- The division of orders and streams among replicas.


class ShardedSampler(Sampler[Any]):
    """Every ``num_replicas``-th index of any sampler, beginning at ``replica``.

    All replicas get equally many indices. If the sampler's length does not divide, the last round is filled with
    indices from the start, as torch's DistributedSampler does, or dropped. The sampler must yield the same indices on
    every replica.

    Args:
        sampler: Any iterable of indices that can be iterated again for the next epoch; may be endless.
        replica: This replica's number, 0 to ``num_replicas - 1``.
        num_replicas: Number of replicas.
        drop_last: Drop the incomplete last round instead of filling it.

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
        """Return the indices per replica; TypeError if the sampler has no length."""
        return _share(self.sampler, self.num_replicas, self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler, if it has one."""
        forward_epoch(self.sampler, epoch)


class UndividedOrder(Sampler[int]):
    """The order that a torch DistributedSampler divides among its ranks.

    A :class:`ShardedSampler` around it yields what the DistributedSampler would, on any number of replicas.

    Args:
        sampler: Decides the epoch still, for user code goes on calling its ``set_epoch``.
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
        """Set the epoch of the sampler."""
        self.sampler.set_epoch(epoch)


class SharedEpoch:
    """The epoch of a stream, for workers that have begun before it (``persistent_workers``) and have copies of it."""

    def __init__(self) -> None:
        self._shared = torch.tensor(-1).share_memory_()
        self._known = -1  # in this process: where workers begin anew, their copies are of this epoch already

    def set(self, epoch: int) -> None:
        """Let the workers know of the epoch of their next walk."""
        self._shared.fill_(epoch)
        self._known = epoch

    def forward(self, stream: Any) -> None:
        """Set the epoch of this process's copy of the stream, if another process has set it since."""
        epoch = int(self._shared)
        if epoch != self._known:
            forward_epoch(stream, epoch)
            self._known = epoch


class ShardedStream(IterableDataset[Any]):
    """Every ``num_replicas``-th item of a stream, beginning at ``replica``.

    All replicas get equally many items: those after the last complete round are left out, for a stream cannot be
    rewound to fill it. The stream must be the same on every replica. As always in torch, a stream that is read by
    several DataLoader workers must divide itself among them (``torch.utils.data.get_worker_info``).

    Whoever iterates it reads the whole stream, and drops the others' items; ``accelerate`` lets one rank of each host
    do so for all. A stream that can do without has a method ``every(first, step)``, which iterates over items
    ``first``, ``first + step``, … alone, and a length unless it is endless. :class:`InterleavedShards` has it.

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
        self.epoch = SharedEpoch()

    def __iter__(self) -> Iterator[Any]:
        self.epoch.forward(self.stream)
        if skips(self.stream):
            count = len(self) if isinstance(self.stream, Sized) else None
            stream: Any = self.stream
            yield from itertools.islice(stream.every(self.replica, self.num_replicas), count)
            return
        for (item,) in ShardedRounds(self.stream, [self.replica], self.num_replicas):
            yield item

    def __len__(self) -> int:
        """Return the items per replica; TypeError if the stream has no length."""
        return _share(self.stream, self.num_replicas, drop_last=True)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the stream, if it has one."""
        forward_epoch(self.stream, epoch)
        self.epoch.set(epoch)


class ShardedRounds(IterableDataset[Any]):
    """Lists of the items that :class:`ShardedStream` yields to several replicas, read once.

    Args:
        stream: The dataset.
        replicas: Their numbers; one may stand there several times.
        num_replicas: Number of all replicas.
        epoch: That of the :class:`ShardedStream`, which hears of the next one; None if there is none.
    """

    def __init__(
        self,
        stream: IterableDataset[Any],
        replicas: Sequence[int],
        num_replicas: int,
        epoch: SharedEpoch | None = None,
    ) -> None:
        self.stream, self.replicas, self.num_replicas = stream, list(replicas), num_replicas
        self._own, self._epoch = set(replicas), epoch

    def __iter__(self) -> Iterator[list[Any]]:
        if self._epoch is not None:
            self._epoch.forward(self.stream)
        mine: dict[int, Any] = {}
        for index, item in enumerate(self.stream):
            place = index % self.num_replicas
            if place in self._own:
                mine[place] = item
            if place == self.num_replicas - 1:
                yield [mine[replica] for replica in self.replicas]


def check_replica(replica: int, num_replicas: int) -> None:
    """Check that a replica exists.

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
    """Call ``listener.set_epoch(epoch)`` if it has such a method."""
    set_epoch = getattr(listener, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def skips(stream: Any) -> bool:
    """Return whether a stream can leave items out without reading them: see :class:`ShardedStream`."""
    return callable(getattr(stream, "every", None)) and getattr(stream, "can_skip", True)


def _share(whole: Any, num_replicas: int, drop_last: bool) -> int:
    if not isinstance(whole, Sized):
        raise TypeError(f"{type(whole).__name__} has no length")
    return len(whole) // num_replicas if drop_last else math.ceil(len(whole) / num_replicas)
