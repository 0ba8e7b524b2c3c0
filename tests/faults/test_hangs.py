"""Ranks that stand still, or are slow, are named by the others, in time."""

import contextlib
import os
import time

import pytest

from tests.faults.vocabulary import BEFORE_STEP, hang, slow, stop
from tests.faults.world import World

LIMIT_S, GIVE_UP_S = 1.0, 90.0


def watched(rank, size, port, folder, faults, limit_s=LIMIT_S, pauses=False):
    """Steps that meet in a barrier, under a Watch, which may be paused then. Every text is a line of ``told``, after
    the seconds it came."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch.distributed as dist

    import meshwright.runtime as runtime
    from meshwright.runtime.watch import Watch

    def _write(name, text):
        with (folder / name).open("a") as file:
            file.write(f"{time.time()} {text.splitlines()[0]}\n")

    runtime.init_distributed(backend="gloo")
    with Watch(limit_s, lambda text: _write("told", text)) as watch:
        for step in range(1, 400):
            watch.beat()
            for fault in faults:
                if fault.is_due(rank, step, BEFORE_STEP):
                    _write("struck", fault.kind)
                    fault.strike()
            with watch.paused() if pauses else contextlib.nullcontext():
                dist.barrier()


def _first(file, words, until_s):
    """When the first line with these words was written, and the line."""
    while time.monotonic() < until_s:
        for line in file.read_text().splitlines() if file.exists() else ():
            if words in line:
                moment, _, text = line.partition(" ")
                return float(moment), text
        time.sleep(0.02)
    raise AssertionError(f"{words!r} is not in {file}: {file.read_text() if file.exists() else 'no file'}")


@pytest.mark.long  # it holds seconds against a limit: not for a machine that others use
def test_a_rank_at_fault_is_named_in_time(tmp_path):
    faults = {"hang": [hang(rank=1, at_step=5)], "stop": [stop(rank=1, at_step=5)], "slow": slow(1, 0.02, 399)}
    worlds = []
    for kind, given in faults.items():
        (tmp_path / kind).mkdir()
        worlds.append(World(2, watched, tmp_path / kind, given))
    until_s = time.monotonic() + GIVE_UP_S
    try:
        for kind, words in (("hang", "rank 1: not in a collective"), ("stop", "rank 1: no sign of life")):
            told_s, text = _first(tmp_path / kind / "told", words, until_s)
            struck_s, _ = _first(tmp_path / kind / "struck", kind, until_s)
            assert "rank 0: step 5, in barrier" in text
            assert told_s - struck_s < 2 * LIMIT_S
        _first(tmp_path / "slow" / "told", "rank 1 is slow", until_s)
    finally:
        for world in worlds:
            world.end()


@pytest.mark.long  # it holds seconds against a limit: not for a machine that others use
def test_a_rank_that_stops_while_the_others_save_is_named_and_one_that_takes_long_is_not(tmp_path):
    faults = {"stop": [stop(rank=1, at_step=5)], "slow": [hang(rank=1, at_step=5, seconds=4 * LIMIT_S)]}
    worlds = []
    for kind, given in faults.items():
        (tmp_path / kind).mkdir()
        worlds.append(World(2, watched, tmp_path / kind, given, LIMIT_S, True))
    until_s = time.monotonic() + GIVE_UP_S
    try:
        told_s, _ = _first(tmp_path / "stop/told", "rank 1: no sign of life", until_s)
        struck_s, _ = _first(tmp_path / "stop/struck", "stop", until_s)
        assert told_s - struck_s < 4 * LIMIT_S
        _first(tmp_path / "slow/struck", "hang", until_s)
        time.sleep(2 * LIMIT_S)
        assert "no sign of life" not in (
            (tmp_path / "slow/told").read_text() if (tmp_path / "slow/told").exists() else ""
        )
    finally:
        for world in worlds:
            world.end()


@pytest.mark.long  # it holds seconds against a limit, and starts 32 processes
def test_of_32_ranks_the_one_that_hangs_is_named_in_time(tmp_path):
    world = World(32, watched, tmp_path, [hang(rank=21, at_step=5)], 4.0)
    try:
        told_s, text = _first(tmp_path / "told", "rank 21: not in a collective", time.monotonic() + 2 * GIVE_UP_S)
        struck_s, _ = _first(tmp_path / "struck", "hang", time.monotonic() + 1.0)
        assert "rank 21: step 5" in text
        assert told_s - struck_s < 2 * 4.0
        told = (tmp_path / "told").read_text()
        assert told.count("no step has ended") == 1
    finally:
        world.end()
