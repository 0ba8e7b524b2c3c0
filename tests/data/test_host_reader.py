"""One rank of a host reads a stream for the others: the same batches as when each reads it whole, and every failure."""

import collections
import contextlib
import itertools
import multiprocessing
import os
import time
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import meshwright as mw
from meshwright.data import InterleavedShards, RepeatedStream, global_batch_loader, host_reader
from meshwright.data.host_reader import pack, unpack
from meshwright.errors import DataError
from meshwright.runtime import rank, world_size
from tests.data.helpers import refused

Point = collections.namedtuple("Point", "x name")


class Samples(IterableDataset):
    """Counts how often it is read, and follows the epoch."""

    def __init__(self, size, fails_at=None, batch_of=torch.tensor):
        self.size, self.fails_at, self.batch_of = size, fails_at, batch_of
        self.epoch = self.reads = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for number in range(self.size):
            if number == self.fails_at:
                raise ValueError(f"sample {number} is broken")
            self.reads += 1
            yield self.batch_of(100 * self.epoch + number)


def _loader(stream, replica, num_replicas, batch_size, hosts=None, **options):
    """Return the loader of one rank; ``hosts`` are the sizes of pretended ones."""
    options = {"batch_size": batch_size, **options}
    made = global_batch_loader(stream, loader_args=options, replica=replica, num_replicas=num_replicas)
    with _on(hosts):
        made.read_once_per_host()
    return made


@contextlib.contextmanager
def _on(hosts):
    if hosts is None:
        yield
        return
    host = next(n for n in range(len(hosts)) if rank() < sum(hosts[: n + 1]))
    with _as_on_host(rank() - sum(hosts[:host]), hosts[host]):
        yield


@contextlib.contextmanager
def _as_on_host(local_rank, size):
    known = mock.Mock(local_world_size=size)
    told = mock.patch.dict(os.environ, LOCAL_RANK=str(local_rank))
    with mock.patch.object(host_reader, "settings", return_value=known), told:
        yield


def test_a_batch_comes_back_as_it_was():
    batch = {
        "ids": torch.arange(12).view(3, 4),
        "half": torch.randn(2, 3).to(torch.bfloat16).t(),
        "flags": [torch.tensor([True, False]), torch.zeros(0, 3), torch.tensor(2.5)],
        "array": np.arange(5.0),
        "point": Point(torch.ones(1, dtype=torch.complex64), "a name"),
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
    }
    memory = pack(batch)
    found, again = unpack(memory), unpack(memory)
    os.close(memory)
    x, name = found["point"]
    assert (type(found["point"]), name) == (Point, "a name")
    found["point"], batch["point"] = x, batch["point"].x
    torch.testing.assert_close(found, batch, rtol=0, atol=0)
    assert found["half"].dtype == torch.bfloat16
    found["ids"].zero_()
    assert torch.equal(again["ids"], batch["ids"])
    assert found["ids"].data_ptr() % 64 == 0


def _shared(size, hosts):
    """Walk three epochs, the second not to its end; return the batches, and how many samples this rank has read."""
    stream, world = Samples(size), sum(hosts)
    loader = _loader(stream, rank(), world, 2 * world, hosts)
    walks = [[batch.tolist() for batch in loader]]
    walks.append([batch.tolist() for _, batch in zip(range(2), loader, strict=False)])
    walks.append([batch.tolist() for batch in loader])
    return walks, stream.reads, loader.epoch


@pytest.mark.parametrize("hosts", [(2,), (4,), (2, 2), (3, 1), (1, 3)])
def test_every_rank_gets_its_share_and_one_of_a_host_reads(ranks, hosts):
    size, world = 27, sum(hosts)
    shares = ranks(world).run(_shared, size, hosts)
    first = [sum(hosts[:n]) for n in range(len(hosts))]
    for number, (walks, reads, epoch) in enumerate(shares):
        own = list(range(size - size % world))[number::world]
        batches = [own[start : start + 2] for start in range(0, len(own), 2)]
        later = [[100 + each for each in batch] for batch in batches]
        assert walks == [batches, later[:2], later]
        assert epoch == 2
        assert (reads > 0) == (number in first)


def _of_two_replicas():
    stream = Samples(8)
    return [batch.tolist() for batch in _loader(stream, rank() // 2, 2, 4)], stream.reads


def test_ranks_of_one_replica_get_the_same(ranks):
    shares = ranks(4).run(_of_two_replicas)
    assert [batches for batches, _ in shares] == [[[0, 2], [4, 6]]] * 2 + [[[1, 3], [5, 7]]] * 2
    assert [reads for _, reads in shares] == [8, 0, 0, 0]


def _resumed(start, steps, batch_size):
    stream = RepeatedStream(Samples(7), start)
    walk = iter(_loader(stream, rank(), world_size(), batch_size))
    return [next(walk).tolist() for _ in range(steps)], stream.source.reads > 0


def test_an_endless_run_is_resumed_exactly_on_other_numbers_of_ranks(ranks):
    whole = [100 * (k // 7) + k % 7 for k in range(36)]

    def steps(number, start, steps):
        shares = ranks(number).run(_resumed, start, steps, 4)
        assert [reads for _, reads in shares] == [True] + [False] * (number - 1)
        return [np.stack([share[step] for share, _ in shares], 1).ravel().tolist() for step in range(steps)]

    assert list(itertools.chain(*steps(4, 0, 4), *steps(2, 16, 5))) == whole


def _fails(hosts):
    loader = _loader(Samples(20, fails_at=9), rank(), sum(hosts), 2 * sum(hosts), hosts)
    seen, began = [], time.monotonic()
    try:
        for batch in loader:
            seen.append(batch.tolist())
    except ValueError as error:
        return len(seen), str(error), getattr(error, "__notes__", []), time.monotonic() - began


@pytest.mark.parametrize("hosts", [(2,), (2, 2)])
def test_a_reader_that_fails_is_told_on_every_rank(ranks, hosts):
    for number, (seen, text, notes, duration_s) in enumerate(ranks(sum(hosts)).run(_fails, hosts)):
        assert (seen, text) == (9 // (2 * sum(hosts)), "sample 9 is broken")
        first = number - number % hosts[0]
        told = [f"(raised on rank {first}, which reads the stream for its host)"]
        assert notes == ([] if number == first else told)
        assert duration_s < 60


def _leaves(leaver):
    loader = _loader(Samples(400), rank(), 2, 4)
    walk = iter(loader)
    next(walk)
    if rank() == leaver:
        walk.close()
        del walk, loader
        return
    with refused(DataError, "walks the dataloader no more", f"rank {leaver}"):
        collections.deque(walk, maxlen=0)


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_leaves_is_missed(ranks, leaver):
    ranks(2).run(_leaves, leaver)


def _walks_alone(alone):
    loader = _loader(Samples(40), rank(), 2, 4)
    if rank() == alone:
        next(iter(loader))
    if alone == 0:
        return [batch.tolist() for batch in loader]
    with refused(DataError, "do not walk the dataloader alike") if rank() == 1 else contextlib.nullcontext():
        return [batch.tolist() for batch in loader]


def test_the_reader_may_look_at_a_batch_alone_and_others_are_told_that_they_may_not(ranks):
    shares = ranks(2).run(_walks_alone, 0)
    assert [list(itertools.chain(*batches)) for batches in shares] == [list(range(0, 40, 2)), list(range(1, 40, 2))]
    ranks(2).run(_walks_alone, 1)


def _silent():
    loader = _loader(Samples(4), rank(), 2, 2)
    if rank() == 1:
        loader._host._line._connection.settimeout(0.2)
        with refused(DataError, "Rank 0 sent no batch", "walks the dataloader alike"):
            next(iter(loader))
    torch.distributed.barrier()  # the reader lives, with its loader


def test_a_reader_that_does_not_come_is_named_at_the_limit(ranks):
    ranks(2).run(_silent)


class Local:
    """Cannot be pickled."""

    def __init__(self, number):
        self.number, self.lock = number, contextlib.ExitStack()
        self.function = lambda: number


def _unpicklable():
    stream = Samples(9, batch_of=Local)
    loader = _loader(stream, rank(), 2, 4, collate_fn=list)
    walks = [[[each.number for each in batch] for batch in loader] for _ in range(2)]
    return walks, stream.reads


def test_what_cannot_be_passed_on_is_read_by_every_rank(ranks):
    own = [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    for number, (walks, reads) in enumerate(ranks(2).run(_unpicklable)):
        assert walks == [own[number], [[100 + each for each in batch] for batch in own[number]]]
        assert reads == 18


def _not_shared():
    shards = InterleavedShards([[1, 2, 3], [4, 5, 6]])
    loaders = [_loader(shards, rank(), 2, 2), _loader(RepeatedStream(shards), rank(), 2, 2)]
    loaders.append(_loader(Samples(4), rank(), 2, 2, hosts=(1, 1)))
    with mock.patch.object(host_reader, "_called", return_value=None):
        loaders.append(_loader(Samples(4), rank(), 2, 2))
    # As a launcher has it that deals ranks out to hosts in turns.
    with _as_on_host(local_rank=0, size=2):
        loaders.append(_loader(Samples(4), rank(), 2, 2))
    assert [loader._host for loader in loaders] == [None] * 5
    return [each.tolist() for each in loaders[3]]


def test_ranks_that_cannot_or_need_not_share_read_alone(ranks):
    assert ranks(2).run(_not_shared) == [[[0], [2]], [[1], [3]]]


def _with_a_worker(stays):
    stream = Samples(10)
    loader = _loader(stream, rank(), 2, 4, num_workers=1, persistent_workers=stays)
    # The pool's ranks are daemons, which else may have no children.
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):
        assert len(list(loader)) == 3
        return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("stays", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_readers_worker_reads(ranks, stays):
    assert ranks(2).run(_with_a_worker, stays) == [[[100, 102], [104, 106], [108]], [[101, 103], [105, 107], [109]]]


def _pair(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(6, generator=generator), torch.randn(3, generator=generator)


class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.net(x), y)


def _trained(strategy):
    torch.manual_seed(3)
    stream = RepeatedStream(Samples(13, batch_of=_pair))
    job = mw.accelerate(
        Task(), torch.optim.SGD, stream, strategy=strategy, optim_args={"lr": 0.1, "momentum": 0.9},
        dataloader_args={"batch_size": 8}, model_input_format="unpack_sequence",
        sample_batch=tuple(each[None] for each in _pair(0)),
    )  # fmt: skip
    batches = iter(job.dataloader)
    losses = [float(job.step(next(batches)).loss) for _ in range(10)]
    return losses, stream.source.reads > 0


def test_ten_steps_from_one_reader_are_those_of_one_process(ranks):
    ((alone, _),) = ranks(1).run(_trained, [])
    for strategy in (["fsdp"], [("parallel_mode", {"zero": 2, "data": 2}), "fsdp"]):
        for number, (losses, reads) in enumerate(ranks(4).run(_trained, strategy)):
            assert losses == pytest.approx(alone, rel=1e-5)
            assert reads == (number == 0)
