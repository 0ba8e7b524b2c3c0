"""Snapshots of other ranks become the checkpoint that those would have saved, from whatever hosts are left."""

import contextlib
import dataclasses
import io
import shutil

import pytest

from meshwright import runtime
from meshwright.store import CheckpointStore, HostSnapshots
from tests.faults.vocabulary import corrupt
from tests.store.reshape_runs import BATCH, MORE, ROWS, STOP, Contents, Run, check_equal, family
from tests.store.test_snapshot_layouts import ALL

IN_SHORT = (("pipeline 2 x zero 2", "fsdp 2, half bf16"), ("8-bit, diloco", "8-bit"))


def _snapshots(folder, hosts):
    place = folder / f"host-{runtime.rank() * hosts // runtime.world_size()}"
    place.mkdir(parents=True, exist_ok=True)
    return HostSnapshots(folder / "run", folder=place)


def _whole(folder, row, hosts=1):
    """Takes a snapshot after every step, and saves the last state."""
    run, snapshots = Run(row, seed=3), _snapshots(folder, hosts)
    for _ in range(STOP):
        run.train(1)
        snapshots.take(run.state)
    snapshots.close(remove=False)
    CheckpointStore(folder / "saved").save(run.state)


def _moved(folder, row, trains=True):
    """What is said where the snapshots are looked for; and the losses from there on, and from what was saved."""
    run, snapshots, said = Run(row, seed=9), _snapshots(folder, 1), io.StringIO()
    with contextlib.redirect_stderr(said):
        assert snapshots.load(run.state, checkpoints=folder / "moved") is None
    snapshots.close()
    losses = []
    for name in ("moved", "saved") if trains else ():
        info = CheckpointStore(folder / name).load(run.state)
        assert (info.step, run.state.samples_seen) == (STOP, STOP * BATCH)
        losses.append(run.train(MORE))
    return said.getvalue(), losses


def _check(ranks, folder, source, name, hosts=1):
    ranks(ALL[source].world).run(_whole, folder, ALL[source], hosts)
    for number in range(1, hosts):
        shutil.rmtree(folder / f"host-{number}")
    said, losses = ranks(ALL[name].world).run(_moved, folder, ALL[name])[0]
    assert f"become {folder}/moved/step-{STOP:08d}" in said
    saved, moved = Contents.of(folder / "saved"), Contents.of(folder / "moved")
    check_equal(saved, moved, with_states=True)
    assert moved.record == dataclasses.replace(saved.record, ranks_per_rng_file=None)
    assert losses[0] == losses[1]
    assert not list(folder.glob("host-*/meshwright-snapshots-*"))


@pytest.mark.parametrize(("source", "name"), IN_SHORT)
def test_some_become_the_checkpoint_that_would_have_been_saved(ranks, tmp_path, source, name):
    _check(ranks, tmp_path, source, name)


@pytest.mark.long
@pytest.mark.parametrize("source", [name for name, row in ROWS.items() if row.world > 1])
def test_every_strategy_becomes_the_checkpoint_that_would_have_been_saved(ranks, tmp_path, source):
    alone = next(name for name, row in ROWS.items() if row.world == 1 and family(name) == family(source))
    _check(ranks, tmp_path, source, alone)


def test_half_of_the_ranks_go_on_when_a_host_is_lost(ranks, tmp_path):
    _check(ranks, tmp_path, "data 2 x zero 2", "zero1", hosts=2)


def test_a_state_that_is_not_whole_anywhere_is_told(ranks, tmp_path):
    ranks(2).run(_whole, tmp_path, ROWS["zero1"])
    files = list(tmp_path.glob("host-0/*/rank-*/of-00001-*"))
    for path in files:
        corrupt(path, 4096 + 70, bit=3)
    said, _ = ranks(1).run(_moved, tmp_path, ROWS["one process"], trains=False)[0]
    assert "are not taken: they are of 2 ranks, and there are 1" in said
    assert not (tmp_path / "moved").exists()
