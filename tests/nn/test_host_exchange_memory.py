"""Memory that ranks of one host share: all of them or none, and no file is left behind."""

import os
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.nn import host_exchange as module
from meshwright.nn.host_exchange import aligned, shared_memory, shared_memory_bytes

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")


def written_and_read():
    before, memory = shared_memory_bytes(), shared_memory(dist.group.WORLD, 3 * 4096)
    memory.part(dist.get_rank() * 10, 1)[0] = dist.get_rank() + 1
    dist.barrier()
    seen = bytes(memory.part(0, 3 * 4096))
    held = shared_memory_bytes() - before
    del memory
    return [seen[rank * 10] for rank in range(dist.get_world_size())], sum(seen), held, shared_memory_bytes() - before


OTHERS = ("meshwright-watch-", "meshwright-snapshots-")  # these stay of runs that were killed


def files():
    """Return the files that stay; those of tests beside these come and go."""
    for _ in range(50):
        found = [name for name in os.listdir("/dev/shm") if name.startswith("meshwright-")]
        if not (stay := [name for name in found if not name.startswith(OTHERS)]):
            return []
        time.sleep(0.1)
    return stay


def test_what_one_writes_all_read(ranks):
    assert ranks(3).run(written_and_read) == [([1, 2, 3], 6, 4096, 0)] * 3
    assert not files()


def on_other_hosts():
    """The last rank looks elsewhere, as one of another host or container would."""
    before = module._FOLDER
    if dist.get_rank() == dist.get_world_size() - 1:
        module._FOLDER = Path("/nowhere")
    try:
        return shared_memory(dist.group.WORLD, 4096)
    finally:
        module._FOLDER = before


def too_much():
    return shared_memory(dist.group.WORLD, 2**60)


def more_than_its_share():
    before, module._SHARE = module._SHARE, 2**50
    try:
        return shared_memory(dist.group.WORLD, 4096)
    finally:
        module._SHARE = before


def said(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught]


def taken_for_an_error():
    """Whether ranks go on together where warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            more_than_its_share()
        except UserWarning:
            failed = True
        else:
            failed = False
    dist.barrier()
    return failed


def without_folder():
    before, module._FOLDER = module._FOLDER, Path("/nowhere")
    try:
        return shared_memory(dist.group.WORLD, 4096)
    finally:
        module._FOLDER = before


@pytest.mark.parametrize("run", [on_other_hosts, too_much, more_than_its_share, without_folder])
def test_without_it_all_ranks_have_none(ranks, run):
    assert ranks(3).run(run) == [None] * 3
    assert not files()


@pytest.mark.parametrize("run", [too_much, more_than_its_share])
def test_where_it_has_no_room_one_rank_says_so(ranks, run):
    (first,), *others = ranks(3).run(said, run)
    assert "MiB free" in first
    assert "What to do" in first
    assert others == [[], []]


def test_ranks_of_several_hosts_are_told_nothing(ranks):
    assert ranks(3).run(said, on_other_hosts) == [[], [], []]


def test_no_rank_waits_for_one_whose_warnings_are_errors(ranks):
    assert ranks(3).run(taken_for_an_error) == [True, False, False]


def test_parts_begin_at_lines_of_the_cache():
    assert [aligned(size) for size in (0, 1, 64, 65)] == [0, 64, 64, 128]
    assert torch.tensor(aligned(1000)) % module.ALIGNMENT == 0
