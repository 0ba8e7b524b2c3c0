import itertools

import pytest
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from meshwright.data import (
    GlobalOrder,
    InterleavedShards,
    RepeatedStream,
    ShardedSampler,
    ShardedStream,
    global_batch_loader,
)
from meshwright.errors import ConfigError, DataError
from tests.data.helpers import refused

SIZES = st.integers(1, 40)
SEEDS = st.integers(0, 2**40)


def _take(order, count):
    return list(itertools.islice(order, count))


@given(SIZES, SEEDS, st.integers(0, 200), st.booleans())
def test_a_resumed_order_goes_on_where_it_was(size, seed, start, shuffle):
    whole = _take(GlobalOrder(size, seed, shuffle=shuffle), start + 2 * size)
    assert _take(GlobalOrder(size, seed, start=start, shuffle=shuffle), 2 * size) == whole[start:]


@given(SIZES, SEEDS)
def test_every_epoch_is_a_permutation(size, seed):
    samples = _take(GlobalOrder(size, seed), 3 * size)
    for epoch in range(3):
        assert sorted(samples[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_epochs_and_seeds_differ():
    orders = [_take(GlobalOrder(50, seed, start=50 * epoch), 50) for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9


def test_the_order_is_the_same_for_ever():
    # Written down once: a run saved today must find its samples again after any update.
    assert _take(GlobalOrder(8, seed=7), 16) == [6, 3, 4, 0, 2, 7, 5, 1, 1, 3, 2, 7, 4, 5, 0, 6]
    assert all(type(index) is int for index in _take(GlobalOrder(8, seed=7), 16))


def test_without_shuffling_the_order_is_the_datasets():
    assert _take(GlobalOrder(3, seed=1, shuffle=False), 7) == [0, 1, 2, 0, 1, 2, 0]


@given(SIZES, SEEDS, st.integers(0, 100), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3, 4]))
def test_a_run_resumed_on_another_number_of_replicas_sees_the_same_samples(size, seed, steps, before, after):
    batch, count = 12, 3  # 12 divides by all of these

    def batches(replicas, start, number):
        shards = [
            _take(ShardedSampler(GlobalOrder(size, seed, start), replica, replicas), number * batch // replicas)
            for replica in range(replicas)
        ]
        together = [index for round_ in zip(*shards, strict=True) for index in round_]
        return [together[k * batch : (k + 1) * batch] for k in range(number)]

    whole = batches(before, 0, steps % 5 + count)
    assert batches(after, batch * (steps % 5), count) == whole[steps % 5 :]


@given(st.integers(0, 30), st.integers(1, 7))
def test_shards_are_those_of_torch(size, replicas):
    for drop_last in (False, True):
        shards = [list(ShardedSampler(range(size), replica, replicas, drop_last)) for replica in range(replicas)]
        for replica, shard in enumerate(shards):
            if size:
                same = DistributedSampler(range(size), replicas, replica, shuffle=False, drop_last=drop_last)
                assert shard == list(same)
            assert len(shard) == len(ShardedSampler(range(size), replica, replicas, drop_last))
        assert len({len(shard) for shard in shards}) == 1
        together = [index for shard in shards for index in shard]
        assert len(together) - len(set(together)) < replicas or size < replicas
        assert set(together) == set(range(len(together) if drop_last else size))


def test_length_and_epoch_are_those_of_the_sampler():
    with pytest.raises(TypeError, match="GlobalOrder has no length"):
        len(ShardedSampler(GlobalOrder(5, 0), 0, 2))
    inner = DistributedSampler(range(9), num_replicas=1, rank=0, seed=3)
    shards = [ShardedSampler(inner, replica, 2) for replica in range(2)]
    first = [list(shard) for shard in shards]
    shards[0].set_epoch(1)
    assert inner.epoch == 1
    assert [list(shard) for shard in shards] != first
    ShardedSampler(RandomSampler(range(3)), 0, 2).set_epoch(1)  # does not listen, and need not


class Stream(IterableDataset):
    def __init__(self, size):
        self.size, self.epoch = size, 0

    def __iter__(self):
        return iter(range(self.size))

    def __len__(self):
        return self.size

    def set_epoch(self, epoch):
        self.epoch = epoch


@given(st.integers(0, 30), st.integers(1, 7))
def test_streams_are_partitioned_and_the_incomplete_round_is_left_out(size, replicas):
    shards = [list(ShardedStream(Stream(size), replica, replicas)) for replica in range(replicas)]
    assert shards == [list(range(size - size % replicas))[replica::replicas] for replica in range(replicas)]
    assert len(ShardedStream(Stream(size), 0, replicas)) == len(shards[0])


def test_streams_hear_the_epoch():
    stream = Stream(4)
    ShardedStream(stream, 0, 2).set_epoch(5)
    assert stream.epoch == 5


@pytest.mark.parametrize("replica", [-1, 2])
@pytest.mark.parametrize("kind", [ShardedSampler, ShardedStream])
def test_replicas_that_do_not_exist_are_refused(kind, replica):
    with refused(DataError, "0 to 1", f"replica {replica} of 2"):
        kind(Stream(4), replica, 2)
    with refused(DataError, "1 replica or more"):
        kind(Stream(4), 0, 0)


def test_impossible_orders_are_refused():
    with refused(DataError, "no samples"):
        GlobalOrder(0, 0)
    with refused(ConfigError, "seed is negative", "-1"):
        GlobalOrder(4, -1)
    with refused(ConfigError, "start is negative"):
        GlobalOrder(4, 0, start=-4)


class Shard:
    """Items of which it counts those that are read."""

    def __init__(self, number, size):
        self.number, self.size, self.num_read, self.epoch = number, size, 0, 0

    def __len__(self):
        return self.size

    def __iter__(self):
        for index in range(self.size):
            self.num_read += 1
            yield self.number, index, self.epoch

    def set_epoch(self, epoch):
        self.epoch = epoch


def _shards(sizes):
    return InterleavedShards([Shard(number, size) for number, size in enumerate(sizes)])


SHARDS = st.lists(st.integers(0, 6), max_size=5)


@given(SHARDS, st.integers(1, 7))
def test_shards_are_one_stream_whatever_the_number_of_replicas(sizes, replicas):
    whole = list(_shards(sizes))
    assert sorted(whole) == [(number, index, 0) for number, size in enumerate(sizes) for index in range(size)]
    shares = [list(ShardedStream(_shards(sizes), replica, replicas)) for replica in range(replicas)]
    assert shares == [whole[: len(whole) - len(whole) % replicas][replica::replicas] for replica in range(replicas)]


@given(SHARDS.filter(any), st.integers(1, 5), st.integers(0, 40))
def test_an_endless_run_over_shards_is_resumed_anywhere_on_any_number_of_replicas(sizes, replicas, start):
    whole = _take(RepeatedStream(_shards(sizes)), start + 6 * replicas)
    assert [epoch for *_, epoch in whole] == [position // sum(sizes) for position in range(len(whole))]
    shares = [
        _take(ShardedStream(RepeatedStream(_shards(sizes), start), replica, replicas), 6) for replica in range(replicas)
    ]
    assert [item for group in zip(*shares, strict=True) for item in group] == whole[start:]


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_a_replica_reads_its_own_shards_alone(replicas):
    for replica in range(replicas):
        stream = _shards([25] * 4)
        assert len(list(ShardedStream(stream, replica, replicas))) == 100 // replicas
        read = [each.num_read for each in stream.shards]
        assert [number for number in range(4) if read[number]] == [*range(replica % 4, 4, replicas)]
        assert sum(read) <= 25 * max(4 // replicas, 1)


def test_lengths_of_shards_must_be_right():
    with refused(DataError, "2 lengths"):
        InterleavedShards([[1], [2]], [1])
    with refused(DataError, "Shard 1 has ended before its length", "3 items"):
        list(InterleavedShards([[1, 2, 3], [4]], [3, 3]))


def test_a_stream_that_is_divided_already_is_refused():
    stream = Stream(8)
    stream._distributed = object()  # as split_dataset_by_node leaves it
    with refused(DataError, "divided among ranks already", "split_dataset_by_node"):
        global_batch_loader(stream, loader_args=None, replica=0, num_replicas=2)


def test_interleaved_shards_are_read_by_one_worker():
    shards = InterleavedShards([list(range(6)), list(range(6, 10))])
    assert sorted(int(each) for each in DataLoader(shards, batch_size=None, num_workers=1)) == list(range(10))
    with pytest.raises(DataError, match="num_workers of 0 or 1"):
        list(DataLoader(shards, batch_size=None, num_workers=2))
