"""Batches for data-parallel replicas: the user names the global batch, whatever the number of replicas."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from meshwright.data.order import ShardedSampler, ShardedStream, UndividedOrder, check_replica, forward_epoch
from meshwright.errors import ConfigError, DataError, did_you_mean, join_names

_LOADER_ARGS = tuple(name for name in inspect.signature(DataLoader).parameters if name != "dataset")


class GlobalBatchLoader(DataLoader[Any]):
    """A torch DataLoader that yields this replica's share of every global batch.

    Whoever walks it to its end begins the next epoch, with another order where it shuffles; whoever stops before begins
    the same one again. Every rank must walk it alike. A run that is resumed says where: ``set_epoch``.

    Walking draws no random number of the process, as torch's loaders do at the start of an epoch: a run that is resumed
    within one goes on with the same dropout. Workers are seeded by the epoch and the process's seed.

    Made by :func:`global_batch_loader`.
    """

    def __init__(self, dataset: Dataset[Any], *, replica_batch_size: int, num_replicas: int, **options: Any) -> None:
        super().__init__(dataset, batch_size=replica_batch_size, **options)
        self.replica_batch_size = replica_batch_size
        self.global_batch_size = replica_batch_size * num_replicas
        self._seeds_workers = self.generator is None
        self.epoch = 0
        """Of the walk that is under way, or comes next."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._seeds_workers:
            self.generator = _worker_seeds(self.epoch)
        return self._walk(super().__iter__())  # workers start now, not with the first batch

    def _walk(self, batches: Iterable[Any]) -> Iterator[Any]:
        yield from batches
        self.set_epoch(self.epoch + 1)

    @property
    def last_batch_size(self) -> int | None:
        """Samples of this replica in the last batch of an epoch; None where there is no telling."""
        if isinstance(self.dataset, IterableDataset) or not isinstance(self.sampler, Sized):
            return None
        try:
            rest = len(self.sampler) % self.replica_batch_size
        except TypeError:  # an order without an end
            return None
        return rest if rest and not self.drop_last else self.replica_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch's order; call it before iterating. Reaches samplers and datasets with a ``set_epoch``."""
        self.epoch = epoch
        forward_epoch(self.sampler, epoch)
        forward_epoch(self.dataset, epoch)


def _worker_seeds(epoch: int) -> torch.Generator:
    # The initial seed is the run's and the replica's, and checkpoints keep it beside the generator's state.
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
    """Makes the DataLoader of one data-parallel replica.

    The k-th batches of all replicas, put together, are the k-th batch of a single replica: the number of replicas
    changes neither the batches nor their order. Only where the dataset's length does not divide is the last,
    incomplete batch filled with up to ``num_replicas - 1`` samples from the start, so that all replicas take equally
    many steps; with ``drop_last`` it is dropped on all of them.

    Args:
        dataset: Map-style or iterable. Of an iterable one every replica takes every ``num_replicas``-th item, and
            items behind the last complete round are left out.
        loader_args: Keyword arguments of torch's DataLoader, left untouched, with two differences: ``batch_size`` is
            global (default: ``num_replicas``), and ``shuffle`` is True by default. A ``sampler`` must yield the same
            indices on every replica and is shared out. Of torch's DistributedSampler the order is taken, and divided
            among the replicas there are, whatever its ``num_replicas`` and ``rank`` say.
        replica: Index of this rank's replica; ranks that shall see the same batch share it.
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
        dataset = ShardedStream(dataset, replica, num_replicas)
    elif sampler is not None:
        options["sampler"] = _shared_out(sampler, replica, num_replicas, drop_last)
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
    """Advice: the numbers of replicas that share a global batch out evenly, as in ``", or 1, 2 or 4 replicas"``.

    Args:
        batch_size: Samples in a step over all replicas.
        parts: Micro-batches into which each replica cuts its share.
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


def _shared_out(sampler: Any, replica: int, num_replicas: int, drop_last: bool) -> ShardedSampler:
    if type(sampler) is DistributedSampler:  # as code from DDP has it
        return ShardedSampler(UndividedOrder(sampler), replica, num_replicas, drop_last or sampler.drop_last)
    _check_undivided(sampler)
    _check_same_on_every_replica(sampler, num_replicas)
    return ShardedSampler(sampler, replica, num_replicas, drop_last)


def _check_undivided(sampler: Any) -> None:
    """Refuses a sampler that yields one rank's part already: of that each replica would see a part."""
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
    # replicas would share out different orders, and see some samples twice and others never.
    draws_globally = isinstance(sampler, Sampler) and getattr(sampler, "generator", sampler) is None
    if draws_globally and num_replicas > 1:
        raise DataError(
            f"{type(sampler).__name__} without a generator draws another order on every replica",
            expected="a sampler that yields the same indices on every replica",
            got="generator=None",
            fix="pass generator=torch.Generator().manual_seed(…) to it, or leave it out: shuffling is the default",
        )


def _make_sampler(dataset: Any, sampler_cls: type | None, order: dict[str, Any], drop_last: bool) -> Iterable[Any]:
    if sampler_cls is None:
        # It must drop what the loader drops: otherwise a tail filled up for 4 replicas makes a batch that 1 drops.
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
