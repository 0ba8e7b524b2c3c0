"""What a start costs a rank: names read, connections and objects, on few ranks and on more."""

import os
import threading
from collections import Counter
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.runtime import make_group, rendezvous
from meshwright.runtime.torch_internals.c10d import HashStore
from tests import tiny
from tests.store.counting import counting


class ReadNames:
    """A store that notes which names a rank has read."""

    def __init__(self, store):
        self.store, self.names = store, set()

    def get(self, key):
        self.names.add(key)
        return self.store.get(key)

    def check(self, keys):
        self.names.update(keys)
        return self.store.check(keys)

    def __getattr__(self, name):
        return getattr(self.store, name)


@pytest.mark.parametrize("size", [2, 20, 80])
def test_no_rank_reads_more_names_than_its_branches(size):
    shared, read = HashStore(), {}

    def come(rank):
        rendezvous.meet(mock.sentinel.store, rank, size, timedelta(seconds=60))

    def room(prefix, store):  # of this thread
        own = threading.current_thread().name
        return read.setdefault(own, ReadNames(shared))

    with mock.patch.object(rendezvous, "PrefixStore", room):
        threads = [threading.Thread(target=come, args=(rank,), name=str(rank)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    most = max(len(each.names) for each in read.values())
    assert len(read) == size
    assert most <= 16 + 4  # those below it, the attempt, whether it was refused, its own answer, and other sizes


def _open_sockets():
    links = Counter(os.readlink(f"/proc/self/fd/{each}")[:6] for each in os.listdir("/proc/self/fd") if _is_open(each))
    return links["socket"]


def _is_open(descriptor):
    return os.path.islink(f"/proc/self/fd/{descriptor}")


def _connections():
    before = _open_sockets()
    with mock.patch.dict(os.environ, TORCH_GLOO_LAZY_INIT="1"):
        group = make_group(backend="gloo")
    value = torch.ones(1000)
    for _ in range(3):
        dist.all_reduce(value, group=group)
        dist.broadcast(value, 0, group=group)
    return _open_sockets() - before, group.size()


def test_groups_that_connect_on_use_open_what_their_collectives_use(ranks):
    for opened, size in ranks(8).run(_connections):
        assert size == 8
        assert opened <= 5 + 1  # ranks at distances of 1, 2 and 4, on both sides; and where it listens


def _objects(tmp_path):
    model, data = tiny.plain(num_layers=4), torch.zeros(8, tiny.SEQ_LEN, dtype=torch.long)
    gathered = mock.Mock(side_effect=AssertionError("objects of all ranks"))
    with counting(tmp_path) as counts, mock.patch.object(dist, "all_gather_object", gathered):
        job = mw.accelerate(
            model, torch.optim.SGD, None, tiny.loss_func, strategy=["fsdp"], optim_args={"lr": 0.1},
            sample_batch=data, batch_size=mw.world_size(),
        )  # fmt: skip
        job.step(data[:1])
    return counts.received_bytes


def test_objects_that_a_rank_gets_until_the_first_step_do_not_grow_with_the_ranks(ranks, tmp_path):
    few, more = (max(ranks(size).run(_objects, tmp_path)) for size in (2, 4))
    assert few > 0
    assert abs(more - few) < 100  # numbers of ranks have more digits
