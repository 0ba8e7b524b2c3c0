import copy

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from meshwright.data import GlobalOrder, global_batch_loader, numbers_that_divide
from meshwright.errors import ConfigError, DataError
from tests.data.helpers import refused
from tests.data.test_loader_order import Stream


class Numbers(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


def _global_batches(dataset, replicas, epoch=0, **arguments):
    """Batches of all replicas: one sorted list per step."""
    loaders = [
        global_batch_loader(dataset, replica=replica, num_replicas=replicas, **arguments) for replica in range(replicas)
    ]
    for loader in loaders:
        loader.set_epoch(epoch)
    return [sorted(torch.cat(parts).tolist()) for parts in zip(*loaders, strict=True)]


@given(st.integers(1, 60), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 3))
def test_the_number_of_replicas_changes_no_full_batch(size, quarter, shuffle, drop_last, epoch):
    batch_size = 4 * quarter
    if drop_last and size < batch_size:
        return
    loader_args = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last}
    answers = {
        replicas: _global_batches(Numbers(size), replicas, epoch, loader_args=loader_args, sampler_seed=5)
        for replicas in (1, 2, 4)
    }
    alone = answers[1]
    num_full = size // batch_size
    assert len(alone) == (num_full if drop_last else -(-size // batch_size))
    for replicas, batches in answers.items():
        assert batches[:num_full] == alone[:num_full]
        assert len(batches) == len(alone)
        # The incomplete batch is filled up to a multiple of the replicas, and holds all that it held alone.
        for filled, whole in zip(batches[num_full:], alone[num_full:], strict=True):
            assert 0 <= len(filled) - len(whole) < replicas
            assert set(filled) >= set(whole)


def test_restarts_on_4_2_and_3_replicas_repeat_and_lose_nothing():
    batch, dataset = 12, Numbers(31)  # five epochs, whose ends lie within batches and on both sides of restarts

    def steps(number, start, replicas):
        """The samples of each step, as the replicas take them."""
        loaders = [
            iter(
                global_batch_loader(
                    dataset,
                    loader_args={"batch_size": batch, "sampler": GlobalOrder(31, seed=3, start=start)},
                    replica=replica,
                    num_replicas=replicas,
                )
            )
            for replica in range(replicas)
        ]
        return [torch.stack([next(loader) for loader in loaders], dim=1).flatten().tolist() for _ in range(number)]

    whole = steps(13, 0, 1)
    assert steps(4, 0, 4) + steps(2, 4 * batch, 2) + steps(7, 6 * batch, 3) == whole
    seen = [sample for step in whole for sample in step]
    assert all(sorted(seen[start : start + 31]) == list(range(31)) for start in range(0, 5 * 31, 31))


def test_numbers_of_replicas_that_divide_are_named():
    assert numbers_that_divide(8) == ", or 1, 2, 4 or 8 replicas"
    assert numbers_that_divide(8, parts=2) == ", or 1, 2 or 4 replicas"
    assert numbers_that_divide(1) == ", or 1 replica"
    assert numbers_that_divide(8, parts=3) == ""
    assert numbers_that_divide(720720).endswith("7 or … replicas")


def test_the_last_batch_of_an_epoch_is_known_ahead():
    def last(dataset, **loader_args):
        given = {"batch_size": 8, **loader_args}
        made = global_batch_loader(dataset, loader_args=given, replica=0, num_replicas=2)
        return made.last_batch_size

    assert last(Numbers(24)) == 4
    assert last(Numbers(27)) == 2
    assert last(Numbers(27), drop_last=True) == 4
    assert last(Numbers(27), sampler=range(27)) == 2
    assert last(Numbers(27), sampler=GlobalOrder(27, seed=0)) is None
    assert last(Stream(27)) is None


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_one_epoch_is_the_dataset(replicas):
    batches = _global_batches(Numbers(24), replicas, loader_args={"batch_size": 8})
    assert sorted(number for batch in batches for number in batch) == list(range(24))
    assert all(len(batch) == 8 for batch in batches)


def test_shuffling_is_the_default_and_follows_seed_and_epoch():
    def order(loader_args=None, seed=0, epoch=0):
        loader = global_batch_loader(Numbers(16), loader_args=loader_args, replica=0, num_replicas=1, sampler_seed=seed)
        loader.set_epoch(epoch)
        return [int(batch) for batch in loader]

    assert order() == order({"shuffle": True}) == order({"shuffle": None}) != list(range(16))
    assert order({"shuffle": False}) == list(range(16))
    assert len({tuple(order()), tuple(order(seed=1)), tuple(order(epoch=5))}) == 3


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_an_epoch_that_was_walked_to_its_end_is_followed_by_the_next(workers):
    def loader(**options):
        options = {"batch_size": 2, "num_workers": workers, **options}
        return global_batch_loader(Numbers(16), loader_args=options, replica=1, num_replicas=2)

    def walked(loader):
        return [int(batch) for batch in loader]

    by_itself, by_hand = loader(), loader()
    orders = [walked(by_itself) for _ in range(3)]
    for epoch in (1, 2, 0):
        by_hand.set_epoch(epoch)
        assert walked(by_hand) == orders[epoch]
    assert len(set(map(tuple, orders))) == 3
    assert by_itself.epoch == 3
    begun = [int(batch) for _, batch in zip(range(3), by_itself, strict=False)]  # a walk that stops: the same again
    assert walked(by_itself)[:3] == begun
    kept = loader(shuffle=False)
    assert walked(kept) == walked(kept)


def test_walking_draws_no_random_number_of_the_process():
    """A run that is resumed within an epoch walks once more than one that goes on: its dropout must be the same."""

    def seed(epoch, **options):
        loader = global_batch_loader(Numbers(4), loader_args=options, replica=0, num_replicas=1)
        loader.set_epoch(epoch)
        before = torch.get_rng_state()
        next(iter(loader))
        assert torch.equal(torch.get_rng_state(), before)
        return loader.generator.initial_seed()

    assert seed(0) == seed(0) != seed(1), "of the workers"
    assert seed(1, generator=torch.Generator().manual_seed(5)) == 5


def test_sizes_are_known_and_the_callers_dict_stays_as_it_was():
    loader_args = {"batch_size": 12, "shuffle": False, "drop_last": True, "num_workers": 0}
    untouched = copy.deepcopy(loader_args)
    for _ in range(2):
        loader = global_batch_loader(Numbers(30), loader_args=loader_args, replica=2, num_replicas=3)
        assert (loader.global_batch_size, loader.replica_batch_size, loader.batch_size) == (12, 4, 4)
        assert len(loader) == len(list(loader)) == 2
    assert loader_args == untouched
    assert global_batch_loader(Numbers(9), loader_args=None, replica=0, num_replicas=3).global_batch_size == 3


def test_other_arguments_reach_torch():
    def double(samples):
        return [2 * sample for sample in samples]

    loader = global_batch_loader(
        Numbers(4), loader_args={"shuffle": False, "collate_fn": double}, replica=1, num_replicas=2
    )
    assert list(loader) == [[2], [6]]


def test_a_class_of_the_users_own_makes_the_order():
    class Backwards(torch.utils.data.Sampler):
        def __init__(self, dataset, *, shuffle, num_replicas, rank, seed):
            self.indices = list(range(len(dataset)))[::-1][rank::num_replicas]
            self.seen = shuffle, seed

        def __iter__(self):
            return iter(self.indices)

    arguments = {"loader_args": {"batch_size": 2}, "sampler_cls": Backwards, "sampler_seed": 9}
    assert _global_batches(Numbers(4), 2, **arguments) == [[2, 3], [0, 1]]
    loader = global_batch_loader(Numbers(4), replica=0, num_replicas=2, **arguments)
    assert loader.sampler.seen == (True, 9)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_sampler_is_shared_out(replicas):
    loader_args = {"batch_size": 4, "sampler": list(range(0, 20, 2))}
    assert _global_batches(Numbers(20), replicas, loader_args=loader_args)[:2] == [[0, 2, 4, 6], [8, 10, 12, 14]]
    seeded = RandomSampler(Numbers(20), generator=torch.Generator().manual_seed(1))
    loader = global_batch_loader(
        Numbers(20), loader_args={"batch_size": 4, "sampler": seeded}, replica=0, num_replicas=replicas
    )
    assert len(list(loader)) == len(loader) == 5


@pytest.mark.parametrize(("drop_last", "size"), [(False, 24), (True, 22), (False, 22), (False, 3)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_yields_what_it_does_beside_ddp(drop_last, size, shuffle):
    def sampler(rank):
        return DistributedSampler(Numbers(size), 4, rank, shuffle=shuffle, seed=7, drop_last=drop_last)

    for replica in range(4):
        by_ddp, given = sampler(replica), sampler(replica)
        loader = global_batch_loader(
            Numbers(size), loader_args={"batch_size": 8, "sampler": given}, replica=replica, num_replicas=4
        )
        given.set_epoch(2)  # as code for DDP does it
        by_ddp.set_epoch(2)
        wanted = DataLoader(Numbers(size), batch_size=2, sampler=by_ddp)
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in wanted]
        assert len(loader) == len(wanted)


def test_a_distributed_sampler_of_other_ranks_is_divided_anew():
    given = DistributedSampler(Numbers(24), num_replicas=4, rank=3, shuffle=False)  # ranks of two tensor groups
    batches = _global_batches(Numbers(24), 2, loader_args={"batch_size": 4, "sampler": given})
    assert [sample for batch in batches for sample in batch] == list(range(24))


def test_an_endless_sampler_may_be_resumed():
    def first_batches(start, replicas):
        loader_args = {"batch_size": 4, "sampler": GlobalOrder(10, seed=3, start=start)}
        loaders = [
            iter(global_batch_loader(Numbers(10), loader_args=loader_args, replica=replica, num_replicas=replicas))
            for replica in range(replicas)
        ]
        return [sorted(torch.cat([next(loader) for loader in loaders]).tolist()) for _ in range(6)]

    assert first_batches(0, 2)[2:] == first_batches(8, 4)[:4] == first_batches(8, 1)[:4]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_stream_is_shared_out(replicas):
    batches = _global_batches(Stream(18), replicas, loader_args={"batch_size": 4})
    assert batches[:4] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert batches[4:] == ([] if replicas == 4 else [[16, 17]])


def test_a_stream_hears_the_epoch_and_workers_read_it():
    stream = Stream(8)
    loader = global_batch_loader(stream, loader_args={"batch_size": 4, "num_workers": 1}, replica=1, num_replicas=2)
    loader.set_epoch(3)
    assert stream.epoch == 3
    assert [batch.tolist() for batch in loader] == [[1, 3], [5, 7]]


class OfTheEpoch(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([10 * self.epoch, 10 * self.epoch + 1])


@pytest.mark.parametrize("stays", [False, True])
def test_workers_that_stay_hear_of_the_next_epoch_too(stays):
    options = {"batch_size": 1, "num_workers": 1, "persistent_workers": stays}
    loader = global_batch_loader(OfTheEpoch(), loader_args=options, replica=0, num_replicas=1)
    assert [batch.item() for _ in range(3) for batch in loader] == [0, 1, 10, 11, 20, 21]
    loader.set_epoch(7)
    assert [batch.item() for batch in loader] == [70, 71]
    own = OfTheEpoch()
    loader = global_batch_loader(own, loader_args=options, replica=0, num_replicas=1)
    own.set_epoch(4)  # as a user may, who does not ask the loader
    assert [batch.item() for batch in loader] == [40, 41]


class Endless(IterableDataset):
    def __iter__(self):
        return iter(int, 1)


class NoLength:
    def __getitem__(self, index):
        return index


class NoRank:
    def __init__(self, dataset, shuffle, seed):
        pass


class Halves(DistributedSampler):
    """With an order of its own, which only it can divide."""


_SAMPLER = SequentialSampler(range(8))


@pytest.mark.parametrize(
    ("dataset", "loader_args", "words"),
    [
        (
            Numbers(8),
            {"batch_size": 6},
            ["multiple of 4", "batch_size 6 for 4 replicas", "use 4 or 8, or 1, 2, 3 or 6 replicas"],
        ),
        (Numbers(8), {"batch_size": 2}, ["multiple of 4", "use 4, or"]),
        (Numbers(8), {"batch_size": 0}, ["not a count", "0"]),
        (Numbers(8), {"batch_size": None}, ["not a count", "None"]),
        (Numbers(8), {"batch_size": 4.0}, ["not a count", "4.0"]),
        (Numbers(8), {"batch_size": True}, ["not a count", "True"]),
        (Numbers(8), {"batch_sampler": BatchSampler(_SAMPLER, 4, False)}, ["batch_sampler=BatchSampler"]),
        (Numbers(8), {"shuffle": True, "sampler": _SAMPLER}, ["shuffle and sampler", "leave out shuffle"]),
        (Numbers(8), {"sampler": RandomSampler(range(8))}, ["RandomSampler", "manual_seed"]),
        (Numbers(8), {"sampler": Halves(Numbers(8), 2, 0)}, ["Halves", "num_replicas=2", "distributed_sampler_cls"]),
        (Numbers(7), {"batch_size": 8, "drop_last": True}, ["leaves no batch", "7 samples"]),
        (Numbers(0), {}, ["dataset is empty"]),
        (TensorDataset(torch.empty(0, 3)), {}, ["dataset is empty"]),
        ("train.txt", {}, ["A path is no dataset", "'train.txt'", "TokenDataset"]),
        (NoLength(), {}, ["NoLength has no length", "IterableDataset"]),
        (Endless(), {"shuffle": True}, ["Endless with shuffle", "leave out shuffle"]),
        (Endless(), {"sampler": _SAMPLER}, ["Endless with sampler"]),
        (Endless(), {"batch_size": 6}, ["multiple of 4"]),
    ],
)
def test_what_does_not_fit_together_is_refused(dataset, loader_args, words):
    with refused(DataError, *words):
        global_batch_loader(dataset, loader_args=loader_args, replica=0, num_replicas=4)


def test_unknown_keys_are_refused():
    for key, words in (("batchsize", "did you mean 'batch_size'"), ("dataset", "dataset")):
        with refused(ConfigError, words, "num_workers"):
            global_batch_loader(Numbers(8), loader_args={key: 4}, replica=0, num_replicas=1)


def test_sampler_classes_that_do_not_fit_are_refused():
    with refused(ConfigError, "NoRank", "num_replicas"):
        global_batch_loader(Numbers(8), loader_args={}, replica=0, num_replicas=1, sampler_cls=NoRank)
    for dataset, loader_args in ((Numbers(8), {"sampler": _SAMPLER}), (Endless(), {})):
        with refused(DataError, "leave out sampler_cls"):
            global_batch_loader(dataset, loader_args=loader_args, replica=0, num_replicas=1, sampler_cls=NoRank)


def test_false_and_none_are_no_decisions():
    for loader_args in ({"shuffle": False}, {"shuffle": None, "sampler": None, "batch_sampler": None}):
        assert len(list(global_batch_loader(Stream(4), loader_args=loader_args, replica=0, num_replicas=2))) == 2
    loader_args = {"shuffle": False, "sampler": _SAMPLER}
    assert len(list(global_batch_loader(Numbers(8), loader_args=loader_args, replica=0, num_replicas=2))) == 4


def test_replicas_that_do_not_exist_are_refused():
    with refused(DataError, "0 to 1", "replica 2 of 2"):
        global_batch_loader(Numbers(8), loader_args=None, replica=2, num_replicas=2)
