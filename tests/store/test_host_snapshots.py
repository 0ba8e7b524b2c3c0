"""Snapshots in host memory: the exact state comes back, from the neighbour too, and never a mixture of two."""

import contextlib
import functools
import io
import os
import shutil
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from meshwright import runtime
from meshwright.errors import ConfigError
from meshwright.optim import local_tensor
from meshwright.store import snapshot_files
from meshwright.store.host_snapshots import HostSnapshots
from tests.faults.vocabulary import corrupt
from tests.store import runs


def _memory(folder, hosts):
    """The memory of this rank's host: ranks are dealt out to so many."""
    place = folder / f"host-{runtime.rank() * hosts // runtime.world_size()}"
    place.mkdir(parents=True, exist_ok=True)
    return place


def _snapshots(folder, hosts=1, **options):
    return HostSnapshots(folder / "run", folder=_memory(folder, hosts), **options)


def _run(folder, layout, hosts=1, steps=3, **options):
    """Trains with a snapshot at every step; the losses of three steps that follow."""
    state, snapshots = runs.build(layout, **options), _snapshots(folder, hosts)
    for _ in range(steps):
        runs.train(state, 1)
        snapshots.take(state)
    torch.rand(3)  # the generators of the snapshot are those of the moment
    snapshots.close(remove=False)
    return runs.train(state, 3)


def _go_on(folder, layout, hosts=1, *, at_least=0, **options):
    """Restores a run that began otherwise; what it says, the step, the ranks that took copies, and three losses."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        state, snapshots = runs.build(layout, **{"seed": 1, **options}), _snapshots(folder, hosts)
        info = snapshots.load(state, at_least=at_least)
        snapshots.close(remove=False)
    if info is None:
        return said.getvalue(), None, (), []
    assert (state.step, state.samples_seen) == (info.step, info.step * runs.BATCH)
    return said.getvalue(), info.step, info.copies_of, runs.train(state, 3)


@pytest.mark.parametrize(("layout", "options"), [("plain", {"scaler": True}), ("ddp", {}), ("fsdp", {"master": True})])
def test_the_state_comes_back_to_the_last_bit(ranks, tmp_path, layout, options):
    whole = ranks(2).run(_run, tmp_path, layout, **options)
    back = ranks(2).run(_go_on, tmp_path, layout, **options)
    assert [each[1:3] for each in back] == [(3, ()), (3, ())]
    assert [each[3] for each in back] == whole


def _begun_late(copied, seconds=0.05):
    """Copies beside training that begin when forward and backward are over; notes what each has copied."""

    def make(self, plain=snapshot_files.LateCopies.make):
        time.sleep(seconds)
        copied.append(sorted(self.tensors))
        return plain(self)

    return mock.patch.object(snapshot_files.LateCopies, "make", make)


def _run_beside(folder, layout, steps=6, change=lambda state: None, **options):
    """Train as ``_run`` does, with copies beside training; return what was copied so, and what was told."""
    state, snapshots, copied, said = runs.build(layout, **options), _snapshots(folder, beside=True), [], io.StringIO()
    with contextlib.redirect_stderr(said), _begun_late(copied):
        for _ in range(steps):
            runs.train(state, 1)
            snapshots.take(state)
            change(state)
        losses = runs.train(state, 3)
        snapshots.close(remove=False)
    return losses, copied, said.getvalue()


@pytest.mark.parametrize(
    ("layout", "options"), [("plain", {"scaler": True}), ("ddp", {"optimizer": "fused"}), ("fsdp", {"master": True})]
)
def test_copies_beside_training_are_of_the_step_that_was_done(ranks, tmp_path, layout, options):
    whole = ranks(2).run(_run_beside, tmp_path, layout, **options)
    back = ranks(2).run(_go_on, tmp_path, layout, **options)
    assert [each[1:3] for each in back] == [(6, ()), (6, ())]
    assert [each[3] for each in back] == [losses for losses, _, _ in whole]
    for _, copied, said in whole:
        assert copied[:2] == [[], []]  # compared with the live ones first
        assert said == ""
        assert {"model.module.weight", "optim.state.module.weight.exp_avg", "model.frozen"} <= set(copied[2])
        assert not {name for name in copied[2] if name.startswith("random.") or "offset" in name}


def _shrink(state, since):
    if state.step >= since:
        with torch.no_grad():
            local_tensor(state.model.narrow.weight).mul_(0.5)


def _shrunk(folder, since):
    return _run_beside(folder, "fsdp", change=functools.partial(_shrink, since=since))


def test_weights_that_change_between_updates_are_copied_in_the_step_or_not_at_all(ranks, tmp_path):
    _, copied, said = ranks(2).run(_shrunk, tmp_path, 0)[0]
    assert ranks(2).run(_go_on, tmp_path, "fsdp")[0][1] == 6
    assert (said, "model.narrow.weight" in copied[-1], "model.module.weight" in copied[-1]) == ("", False, True)
    # A change that comes later is seen, and that snapshot is none.
    shutil.rmtree(tmp_path / "host-0")
    _, copied, said = ranks(2).run(_shrunk, tmp_path, 6)[0]
    assert "no snapshot of step 6: model.narrow.weight changed before the next update" in said
    assert "model.narrow.weight" in copied[-1]
    assert ranks(2).run(_go_on, tmp_path, "fsdp")[0][1] == 5
    shutil.rmtree(tmp_path / "host-0")
    _, copied, said = ranks(2).run(_shrunk, tmp_path, 5)[0]
    assert (said.count("\n"), "model.narrow.weight" in copied[-1]) == (1, False)
    assert ranks(2).run(_go_on, tmp_path, "fsdp")[0][1] == 6


def _move(state):
    """Puts weights into other memory or, in every second step, buffers and states into other objects."""
    if state.step % 2:
        for parameter in state.model.parameters():
            if type(parameter.data) is torch.Tensor:
                parameter.data = parameter.data.clone()
        return
    for module in state.model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.clone())
    for states in state.optim.state.values():
        states.update({key: each.clone() for key, each in states.items() if isinstance(each, torch.Tensor)})


@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp"])
def test_tensors_in_other_memory_than_in_the_snapshot_before_are_found_there(ranks, tmp_path, layout):
    whole = ranks(2).run(_run_beside, tmp_path, layout, change=_move)
    back = ranks(2).run(_go_on, tmp_path, layout)
    assert [each[1:3] for each in back] == [(6, ()), (6, ())]
    assert [each[3] for each in back] == [losses for losses, _, _ in whole]


def _another_way_to_update(folder):
    state, snapshots, copied = runs.build("plain"), _snapshots(folder, beside=True), []
    with _begun_late(copied, 0.0):
        for _ in range(6):
            state.model(torch.ones(2, 7)).sum().backward()
            if state.step == 4:
                type(state.optim).step(state.optim)
            else:
                state.optim.step()
            state.step += 1
            snapshots.take(state)
        snapshots.close(remove=False)
    return [bool(each) for each in copied]


def test_without_a_step_to_wait_in_nothing_is_copied_beside_training(ranks, tmp_path):
    assert ranks(1).run(_another_way_to_update, tmp_path)[0] == [False, False, True, True, False, False]


def _files(folder, host=0):
    return sorted((folder / f"host-{host}").glob("meshwright-snapshots-*/rank-*/of-*"))


def _damage(folder, step, pattern):
    """Flips a bit in the files of a step whose path ends as in the pattern."""
    hit = 0
    for path in folder.glob("host-*/meshwright-snapshots-*/" + pattern):
        if _step_of(path) == step:
            corrupt(path, 4096 + 70, bit=3)
            hit += 1
    assert hit


def _step_of(path):
    with contextlib.suppress(snapshot_files.DamagedSnapshot):
        return snapshot_files.read_about(snapshot_files.read_bytes(path))["step"]


def test_a_damaged_snapshot_is_replaced_by_the_neighbours_copy_or_by_an_older_step(ranks, tmp_path):
    whole = ranks(2).run(_run, tmp_path, "fsdp", steps=4)
    _damage(tmp_path, 4, "rank-00001/of-00001-*")
    said, step, copies, losses = ranks(2).run(_go_on, tmp_path, "fsdp")[0]
    assert (step, copies, said) == (4, (1,), "")
    assert losses == whole[0]
    # The copy is damaged too: all ranks take the step before.
    _damage(tmp_path, 4, "rank-00000/of-00001-*")
    said, step, copies, earlier = ranks(2).run(_go_on, tmp_path, "fsdp")[0]
    assert (step, copies) == (3, ())
    assert "step 4 are not whole on every rank" in said
    assert earlier[1:] == losses[:2]
    _damage(tmp_path, 3, "rank-*/of-00000-*")
    said, step, _, _ = ranks(2).run(_go_on, tmp_path, "fsdp")[0]
    assert step is None
    assert "step 3 are not whole" in said


def test_a_lost_host_loses_nothing(ranks, tmp_path):
    whole = ranks(2).run(_run, tmp_path, "fsdp", 2)
    shutil.rmtree(tmp_path / "host-1")
    back = ranks(2).run(_go_on, tmp_path, "fsdp", 2)
    assert [each[1:3] for each in back] == [(3, (1,)), (3, (1,))]
    assert [each[3] for each in back] == whole


def _killed_while_it_writes(folder):
    """Rank 1 ends within the copy of step 3; rank 0 completes its own."""
    state, snapshots = runs.build("fsdp"), _snapshots(folder, neighbour=False)
    for _ in range(3):
        runs.train(state, 1)
        broken = mock.patch.object(snapshot_files.SnapshotFile, "finish", side_effect=OSError("gone"))
        with broken if state.step == 3 and runtime.rank() == 1 else contextlib.nullcontext():
            snapshots.take(state)
            snapshots.wait()
    snapshots.close(remove=False)
    return runs.train(state, 3)


def test_all_ranks_go_back_to_a_step_that_all_have(ranks, tmp_path):
    whole = ranks(2).run(_killed_while_it_writes, tmp_path)
    back = ranks(2).run(_go_on, tmp_path, "fsdp")
    assert [each[1] for each in back] == [2, 2]
    assert back[0][3][1:] == whole[0][:2]  # one step earlier
    # The snapshot of step 3 that rank 0 alone had is no more: it must not meet another attempt's.
    assert {_step_of(path) for path in _files(tmp_path)} - {None} <= {1, 2}


def test_a_snapshot_that_does_not_fit_is_told_and_not_taken(ranks, tmp_path):
    ranks(2).run(_run, tmp_path, "fsdp")
    assert ranks(2).run(_go_on, tmp_path, "fsdp", at_least=4)[0][1] is None
    ranks(2).run(_run, tmp_path, "fsdp")
    said, step, _, _ = ranks(2).run(_go_on, tmp_path, "ddp")[0]
    assert (step, said.count("\n")) == (None, 1)
    assert "another strategy" in said
    ranks(2).run(_run, tmp_path, "fsdp")
    said, step, _, _ = ranks(2).run(_go_on, tmp_path, "fsdp", optimizer="momentum")[0]
    assert (step, said.count("\n")) == (None, 1)
    assert "another model" in said
    ranks(2).run(_run, tmp_path, "plain")
    said, step, _, _ = ranks(1).run(_go_on, tmp_path, "plain")[0]
    assert (step, said.count("\n")) == (None, 1)
    assert "of 2 ranks, and there are 1" in said


def _without_room(folder):
    """The host has no room for the third snapshot."""
    state, snapshots, said = runs.build("fsdp"), _snapshots(folder, beside=True), io.StringIO()
    with contextlib.redirect_stderr(said):
        for _ in range(4):
            runs.train(state, 1)
            full = mock.patch.object(snapshot_files.SnapshotFile, "copy", side_effect=OSError(28, os.strerror(28)))
            with full if state.step >= 3 and runtime.rank() == 1 else contextlib.nullcontext():
                snapshots.take(state)
        snapshots.close(remove=False)
        state, limited = runs.build("fsdp"), HostSnapshots(folder / "other", max_gb=1e-9)
        for _ in range(2):
            runs.train(state, 1)
            limited.take(state)
        limited.close()
    return said.getvalue()


def test_a_full_host_costs_no_step_and_is_told_once(ranks, tmp_path):
    said = ranks(2).run(_without_room, tmp_path)
    assert said[1].count("No space left on device") == 1
    assert said[0].count("max_gb allows") == 1
    assert ranks(2).run(_go_on, tmp_path, "fsdp")[0][1] == 2


def _ends(folder):
    state, snapshots = runs.build("ddp"), HostSnapshots(folder / "run")
    runs.train(state, 1)
    snapshots.take(state)
    place = snapshots._folder
    runtime.synchronize()  # all ranks have written theirs, which are counted before any is removed
    before = len(list(place.glob("rank-*/of-*")))
    runtime.synchronize()
    snapshots.close()
    runtime.synchronize()
    return str(place), before


def test_the_end_of_a_run_leaves_nothing_in_memory(ranks, tmp_path):
    place, before = ranks(2).run(_ends, tmp_path)[0]
    assert before >= 2
    assert not Path(place).exists()


def test_what_is_no_schedule_of_snapshots_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="every of 1 or more"):
        HostSnapshots(tmp_path, every=0)
    with pytest.raises(ConfigError, match="max_gb=-1"):
        HostSnapshots(tmp_path, max_gb=-1)
