import errno
import fcntl
import json
import random
import resource
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright import runtime
from meshwright.errors import CheckpointError, ConfigError, LaunchError
from meshwright.store import CheckpointStore, TrainingState, checkpoints as place
from tests.store.runs import build, same_everywhere, train


def _saved(directory, step=0, keep=3):
    state = build("plain")
    state.step = step
    return CheckpointStore(directory, keep).save(state)


def _names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_checkpoint_is_tensors_and_json_only(tmp_path):
    path = _saved(tmp_path, 120)
    files = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert path == tmp_path / "step-00000120"
    assert files == {
        "manifest.json",
        "state.json",
        "rng-00000.safetensors",
        "tensors/shard-00001-model-00001-of-00001.safetensors",
        "tensors/shards.json",
    }
    assert files - set(json.loads((path / "manifest.json").read_text())["files"]) == {"manifest.json"}


def test_everything_that_is_not_a_tensor_comes_back(tmp_path):
    state = build("plain")
    train(state, 3)
    state.extra = {"words": ["a", 1.5, None], "pair": (1, 2), 3: {"inf": float("inf")}}
    CheckpointStore(tmp_path).save(state)
    other = build("plain", seed=1)
    info = CheckpointStore(tmp_path).load(other)
    assert (info.path, info.step, info.samples_seen, info.world_size) == (tmp_path / "step-00000003", 3, 24, 1)
    assert info.strategy == '{"layout": "plain"}'
    assert info.extra == other.extra == state.extra
    assert other.lr_scheduler.state_dict() == state.lr_scheduler.state_dict()
    without_params = [{k: v for k, v in group.items() if k != "params"} for group in state.optim.param_groups]
    assert [{k: v for k, v in group.items() if k != "params"} for group in other.optim.param_groups] == without_params


def test_positions_are_stored_as_plain_numbers_or_refused_before_anything_is_written(tmp_path):
    store = CheckpointStore(tmp_path)
    state = TrainingState(torch.nn.Linear(2, 2), step=np.int64(3), samples_seen=torch.tensor(12))
    store.save(state)
    assert (state.step, state.samples_seen) == (3, 12)
    assert store.load(TrainingState(torch.nn.Linear(2, 2))).samples_seen == 12
    for name, value in {"samples_seen": 64.5, "step": -1, "strategy": None}.items():
        with pytest.raises(CheckpointError, match=f"training state's {name} cannot be stored"):
            store.save(TrainingState(torch.nn.Linear(2, 2), **({"step": 4} | {name: value})))
    assert _names(tmp_path) == ["step-00000003"]


def test_old_checkpoints_go_and_the_newest_is_found(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    assert store.newest() is None
    for step in (1, 2, 30, 4):
        _saved(tmp_path, step, keep=2)
    assert _names(tmp_path) == ["step-00000002", "step-00000004", "step-00000030"]  # 30 is not older than 4
    assert store.newest() == tmp_path / "step-00000030"
    for step in range(31, 35):
        _saved(tmp_path, step, keep=1)
    assert _names(tmp_path) == ["step-00000034"]
    _saved(tmp_path, 35, keep=None)
    assert len(_names(tmp_path)) == 2
    with pytest.raises(ConfigError, match="1 or more"):
        CheckpointStore(tmp_path, keep=0)


def test_what_a_killed_save_leaves_is_never_chosen(tmp_path):
    good = _saved(tmp_path, 1)
    for killed in (".step-00000002.tmp", ".step-00000003.tmp", ".step-00000000.deleted"):
        shutil.copytree(good, tmp_path / killed)
    shutil.copytree(good, tmp_path / "step-00000009", ignore=shutil.ignore_patterns("manifest.json"))
    store = CheckpointStore(tmp_path)
    assert store.newest() == good
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint.*manifest\.json"):
        store.load(build("plain"), tmp_path / "step-00000009")
    (tmp_path / ".step-00000002.tmp" / "remains").write_text("of the killed one")
    assert not (_saved(tmp_path, 2) / "remains").exists()
    assert _names(tmp_path) == [".step-00000003.tmp", "step-00000001", "step-00000002", "step-00000009"]


def test_an_existing_step_is_not_overwritten(tmp_path):
    path = _saved(tmp_path, 5)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(CheckpointError, match="exists already"):
        _saved(tmp_path, 5)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    assert _names(tmp_path) == ["step-00000005"]


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint.*no such directory.*--resume auto"):
        CheckpointStore(tmp_path / "nowhere").load(build("plain"))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"Got notes\.txt"):
        CheckpointStore(tmp_path).load(build("plain"))
    with pytest.raises(CheckpointError, match="no such directory"):
        CheckpointStore(tmp_path).load(build("plain"), tmp_path / "step-00000001")


def _error_of(call):
    try:
        call()
    except (CheckpointError, LaunchError) as error:
        return str(error)
    return None


def _fail_to_save(directory):
    state = build("fsdp")
    store = CheckpointStore(directory)
    store.save(state)
    state.step = 1
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if runtime.rank() == 1:  # as if the disk were full, on one rank only
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    full = _error_of(lambda: store.save(state))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    in_a_file = directory / "step-00000000" / "state.json" / "below"
    unwritable = _error_of(lambda: CheckpointStore(in_a_file).save(state))
    state.step = runtime.rank()
    apart = _error_of(lambda: store.save(state))
    return same_everywhere((full, unwritable, apart, store.newest(), _names(directory)))


def test_a_failed_save_is_an_error_on_every_rank_and_leaves_nothing(ranks, tmp_path):
    full, unwritable, apart, newest, names = ranks(2).run(_fail_to_save, tmp_path)[0]
    assert "Writing tensors into" in full
    assert "File too large" in full
    assert "(rank 1)" in full
    assert "cannot take a checkpoint" in unwritable
    assert "step to save differs between ranks" in apart
    assert newest == tmp_path / "step-00000000"
    assert names == ["step-00000000"]


def test_two_processes_do_not_mix_their_files(tmp_path):
    holds = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print(flush=True); input()"
    path = _saved(tmp_path, 1)
    other = subprocess.Popen(
        [sys.executable, "-c", holds, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    other.stdout.readline()
    shutil.copytree(path, tmp_path / ".step-00000002.tmp")  # what the other is writing
    with pytest.raises(CheckpointError, match=r"Another process is saving a checkpoint into.*nothing was written"):
        _saved(tmp_path, 2)
    assert _names(tmp_path) == [".step-00000002.tmp", "step-00000001"]
    assert (tmp_path / ".step-00000002.tmp" / "manifest.json").exists()
    other.kill()
    other.wait()
    _saved(tmp_path, 2)
    _saved(tmp_path, 3)
    assert _names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_a_file_system_that_is_read_only_or_has_no_locks(tmp_path, monkeypatch):
    path, state = _saved(tmp_path, 1), build("plain")
    with monkeypatch.context() as patched:

        def refuse(*_):
            raise OSError(errno.ENOTSUP, "no locks")

        patched.setattr(fcntl, "flock", refuse)
        state.step = 2
        CheckpointStore(tmp_path).save(state)
    with monkeypatch.context() as patched:

        def mkdir(*_, **__):
            raise OSError(errno.EROFS, "Read-only file system")

        patched.setattr(Path, "mkdir", mkdir)
        state.step = 3
        with pytest.raises(CheckpointError, match=r"cannot take a checkpoint.*Read-only file system.*are untouched"):
            CheckpointStore(tmp_path).save(state, non_blocking=True)
    assert CheckpointStore(tmp_path).load(state, path).step == 1
    assert _names(tmp_path) == ["step-00000001", "step-00000002"]
    state.step = 3
    CheckpointStore(tmp_path).save(state)  # the lock was given back


def _draw():
    return torch.rand(2).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal()


def _generators(directory, save):
    runtime.seed_replica(5, runtime.rank())
    _draw()
    state = TrainingState(torch.nn.Linear(2, 2), step=runtime.world_size())
    path = directory / f"step-{2:08d}"
    if save:
        CheckpointStore(directory).save(state)
        return None, _draw()
    runtime.seed_replica(6, runtime.rank())
    info = CheckpointStore(directory).load(state, path)
    return info.rng_restored, _draw()


def test_generators_go_on_when_the_world_is_the_same(ranks, tmp_path):
    expected = [draw for _, draw in ranks(2).run(_generators, tmp_path, True)]
    restored = ranks(2).run(_generators, tmp_path, False)
    assert restored == [(True, draw) for draw in expected]
    assert expected[0] != expected[1]
    assert ranks(1).run(_generators, tmp_path, False)[0][0] is False


def test_parts_may_be_left_out(tmp_path):
    state = build("plain")
    train(state, 2)
    CheckpointStore(tmp_path).save(state)
    weights_only = TrainingState(build("plain", seed=1).model)
    CheckpointStore(tmp_path).load(weights_only)
    for loaded, saved in zip(weights_only.model.parameters(), state.model.parameters(), strict=True):
        assert torch.equal(loaded, saved)
    CheckpointStore(tmp_path / "weights").save(weights_only)
    with pytest.raises(CheckpointError, match="no optim and no lr_scheduler"):
        CheckpointStore(tmp_path / "weights").load(state)


def test_a_path_may_be_a_string(tmp_path):
    path = _saved(str(tmp_path))
    assert isinstance(path, Path)
    assert CheckpointStore(tmp_path).load(build("plain"), str(path)).path == path


def test_a_run_that_begins_beside_checkpoints_of_another_is_told(tmp_path, monkeypatch):
    state, store = build("plain"), CheckpointStore(tmp_path)
    state.step = 7
    store.save(state)
    monkeypatch.setattr(place, "_own", set())  # as in another process
    state.step = 1
    with pytest.warns(UserWarning, match="checkpoints up to step 7 that this run has not loaded"):
        store.save(state)
    monkeypatch.setattr(place, "_own", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CheckpointStore(tmp_path).load(state)
        state.step = 8
        store.save(state)
        CheckpointStore(tmp_path / "new").save(state)
