"""Saves that go on while training does: what is written is the state at the call, and a failure reaches every rank."""

import resource
import shutil
import threading
from pathlib import Path

import pytest
import torch

from meshwright.errors import CheckpointError
from meshwright.runtime import processes as background, rank
from meshwright.store import CheckpointStore, checkpoints, checkpoints as place, tensor_files as writer
from tests.store.runs import build, load_and_go_on, same_everywhere, train


def _save_and_train(directory):
    """Saves at steps 2 and 3 in the background, training on at once; the next ten losses."""
    state, store = build("fsdp"), CheckpointStore(directory)
    train(state, 2)
    store.save(state, non_blocking=True)
    train(state, 1)
    path = store.save(state, non_blocking=True)
    losses = train(state, 10)
    assert store.newest() == path
    return same_everywhere(losses)


def _fail_in_the_background(directory):
    """Rank 1 cannot write; the error of each call that follows."""
    state, store = build("fsdp"), CheckpointStore(directory)
    store.save(state)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    told = []
    for later in (lambda: store.save(state), store.wait, background.prepare_to_leave):
        state.step += 1
        if rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        store.save(state, non_blocking=True)
        try:
            later()
        except CheckpointError as error:
            told.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    names = sorted(path.name for path in directory.iterdir())
    store.save(state)
    return same_everywhere((told, names, store.newest()))


def _both(directory):
    return _save_and_train(directory / "run"), _fail_in_the_background(directory / "full")


def test_training_goes_on_while_a_checkpoint_is_written(ranks, tmp_path):
    losses, (told, names, newest) = ranks(2).run(_both, tmp_path)[0]
    assert ranks(1).run(load_and_go_on, tmp_path / "run", "plain")[0] == pytest.approx(losses, rel=1e-5)
    assert len(told) == 3
    assert all("File too large" in error and "(rank 1)" in error for error in told)
    assert names == ["step-00000000"]
    assert newest == tmp_path / "full" / "step-00000003"


def test_one_save_is_under_way_at_a_time(tmp_path, monkeypatch):
    may_go_on, state, store = threading.Event(), build("plain"), CheckpointStore(tmp_path)
    write = checkpoints.save_shards
    monkeypatch.setattr(checkpoints, "save_shards", lambda *given: may_go_on.wait(60) and write(*given))
    before = state.model.narrow.bias.detach().clone()
    first = store.save(state, non_blocking=True)
    assert not first.exists()
    with torch.no_grad():
        state.model.narrow.bias.add_(1)
    threading.Timer(0.2, may_go_on.set).start()
    state.step = 1
    second = store.save(state, non_blocking=True)
    assert first.is_dir(), "the second save has waited for the first"
    store.wait()
    other = build("plain", seed=1)
    store.load(other, first)
    assert torch.equal(other.model.narrow.bias, before)
    store.load(other, second)
    assert torch.equal(other.model.narrow.bias, before + 1)


def test_a_damaged_checkpoint_is_passed_over_and_met_again(tmp_path):
    store, state = CheckpointStore(tmp_path), build("plain")
    for state.step in (1, 2, 3):
        store.save(state)
    shutil.rmtree(tmp_path / "step-00000002" / "tensors")
    record = tmp_path / "step-00000003" / "state.json"
    record.write_bytes(record.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"passed over.*step-00000001: .*step-0000000\d is damaged"):
        info = store.load(state)
    assert (info.path.name, state.step) == ("step-00000001", 1)
    assert "of another size: state.json" in info.damaged[0]
    assert "missing: tensors/shard-00001" in info.damaged[1]
    with pytest.raises(CheckpointError, match=r"step-00000003 is damaged"):
        store.load(state, tmp_path / "step-00000003")
    state.step = 3
    store.save(state)
    assert store.load(state).damaged == ()
    assert (tmp_path / "damaged-step-00000003" / "manifest.json").is_file()
    for step in (1, 3):
        (tmp_path / f"step-{step:08d}" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"Every checkpoint .* is damaged.*state\.json.*state\.json"):
        store.load(state)


def test_a_program_may_change_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    store, may_go_on = CheckpointStore("run"), threading.Event()
    writer.run_later(may_go_on.wait, 60)
    writer.write_later(Path("weights.pt"), {"x": torch.ones(1)})
    monkeypatch.chdir(tmp_path / "elsewhere")
    may_go_on.set()
    assert store.save(build("plain")) == tmp_path / "run" / "step-00000000"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "run", "weights.pt"]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_old_checkpoint_that_was_moved_to_another_disk_stays_there(tmp_path):
    for path in (tmp_path / "disk", tmp_path / "run" / "step-00000002"):
        path.mkdir(parents=True)
        (path / "manifest.json").touch()
    (tmp_path / "run" / "step-00000001").symlink_to(tmp_path / "disk")
    place.delete_old(tmp_path / "run", newest_step=3, keep=1)
    assert not list((tmp_path / "run").iterdir())
    assert (tmp_path / "disk" / "manifest.json").exists()


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_left_for_the_next(tmp_path, monkeypatch):
    running, reader, writing = build("plain"), build("plain", seed=1), CheckpointStore(tmp_path, keep=1)
    writing.save(running)
    load_shards = checkpoints.load_shards

    def overtaken(*given):
        if running.step < 2:
            running.step += 1
            writing.save(running)
        load_shards(*given)

    monkeypatch.setattr(checkpoints, "load_shards", overtaken)
    assert CheckpointStore(tmp_path).load(reader).step == 2
    assert torch.equal(reader.model.narrow.bias, running.model.narrow.bias)


def test_what_failed_in_the_background_does_not_keep_the_next_state_from_the_disk(tmp_path, monkeypatch):
    state, store, write = build("plain"), CheckpointStore(tmp_path), checkpoints.save_shards
    failures = iter([OSError("no room"), None, OSError("no room"), None])

    def save_shards(*given):
        failure = next(failures)
        if failure is not None:
            raise CheckpointError("cannot write") from failure
        write(*given)

    monkeypatch.setattr(checkpoints, "save_shards", save_shards)
    store.save(state, non_blocking=True)
    state.step = 1
    with pytest.warns(UserWarning, match="in the background failed, and this one is written at once: cannot write"):
        path = store.save(state, non_blocking=True)
    assert path.is_dir()
    state.step = 2
    store.save(state, non_blocking=True)
    with pytest.raises(CheckpointError, match="cannot write"):
        store.wait()
    store.save(state)
    assert [each.name for each in sorted(tmp_path.iterdir())] == ["step-00000001", "step-00000002"]
