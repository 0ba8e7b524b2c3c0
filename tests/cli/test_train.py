"""Whole runs of the program: its own ranks, a launcher's, resumed and failing."""

import contextlib
import io
import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from typer.testing import CliRunner

from meshwright import Strategy
from meshwright.cli import app, train_loop as training
from meshwright.cli.train_options import Options, parse_config
from tests.cli.helpers import losses, meshwright, metrics, project
from tests.pool import RemoteFailure

KEYS = ["step", "loss", "lr", "grad_norm", "tokens_per_s", "step_time_s", "peak_memory_bytes"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of six steps on two ranks: (its folder, what it printed)."""
    folder = tmp_path_factory.mktemp("run")
    result = meshwright("train", project(folder), "--nproc", 2, "--out", "first", folder=folder)
    assert result.returncode == 0, result.stderr
    return folder, result.stdout


def _stopped_after_step_3(folder, name):
    """A copy of the run as it would be, had it been killed between its two checkpoints."""
    shutil.copytree(folder / "first", folder / name)
    shutil.rmtree(folder / name / "checkpoints" / "step-00000006")
    return folder / name


def test_a_run_writes_and_shows_everything(run):
    folder, shown = run
    out = folder / "first"
    records = metrics(out)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert all(list(record)[: len(KEYS)] == KEYS for record in records)
    assert records[-1]["loss"] < records[0]["loss"]
    assert [record["lr"] for record in records[:3]] == pytest.approx([0.005, 0.01, 0.01])
    assert all(record["mfu"] > 0 for record in records)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
    assert Strategy(out / "strategy.json").names == ("parallel_mode",)
    config = json.loads((out / "config.json").read_text())
    assert config.pop("file") == str(folder / "tiny.toml")
    assert config.pop("ranks") == 2
    assert config.pop("launch").startswith("meshwright-")
    assert config.pop("peak_flops_per_s") > 0
    config["optimizer"]["betas"] = None
    assert parse_config(config, "config.json").run.steps == 6
    for words in ("Plan: ", "predicted", "measured", "step 6/6", "nats per byte", "--resume --steps 12 --nproc 2"):
        assert words in shown


def test_an_existing_run_is_refused(run, monkeypatch):
    folder, _ = run
    monkeypatch.chdir(folder)
    before = (folder / "first" / "metrics.jsonl").read_bytes()
    result = CliRunner().invoke(app, ["train", "tiny.toml", "--nproc", "2", "--out", "first"])
    assert result.exit_code == 1
    assert "contains a run already; nothing was overwritten" in result.stderr
    assert (folder / "first" / "metrics.jsonl").read_bytes() == before


@pytest.mark.long
def test_of_two_runs_that_start_together_one_trains(tmp_path):
    file = project(tmp_path)

    def start(_):
        return meshwright("train", file, "--nproc", 1, "--out", "same", folder=tmp_path)

    with ThreadPoolExecutor(2) as both:
        ended = sorted(both.map(start, range(2)), key=lambda each: each.returncode)
    assert [each.returncode for each in ended] == [0, 1], [each.stderr for each in ended]
    found = ("Another run is writing into same", "same contains a run already")
    assert any(words in ended[1].stderr for words in found), ended[1].stderr
    assert [record["step"] for record in metrics(tmp_path / "same")] == [1, 2, 3, 4, 5, 6]


def _resumes(file, out, launch=None):
    """What a rank of the program does. Ranks of a pool live on afterwards, and forget what the file imported."""
    path, said = list(sys.path), io.StringIO()
    launched = mock.patch.dict(os.environ, {"TORCHELASTIC_RUN_ID": launch} if launch else {})
    try:
        with mock.patch.object(training, "shutdown_distributed"), contextlib.redirect_stderr(said), launched:
            training.train(Options(file, out=out, resume=launch is None))
    finally:
        sys.path[:] = path
        sys.modules.pop("tiny", None)
    return said.getvalue()


def _check_resumed(out, said, expected):
    assert "resuming after step 3" in said
    assert [record["step"] for record in metrics(out)] == [1, 2, 3, 4, 5, 6]
    assert losses(out) == pytest.approx(expected, rel=1e-5)
    assert (out / "checkpoints" / "step-00000006").is_dir()


@pytest.mark.parametrize("world", [2, 1])
def test_resumed_ranks_repeat_the_uninterrupted_run(run, ranks, world):
    folder, _ = run
    out = _stopped_after_step_3(folder, f"ranks-{world}")
    launch = None
    if world == 1:  # as when a launcher goes on with fewer: nobody says --resume, and its agent counts no failure
        launch = json.loads((out / "config.json").read_text())["launch"]
        with pytest.raises(RemoteFailure, match="contains a run already; nothing was overwritten"):
            ranks(1).run(_resumes, folder / "tiny.toml", out, "another")
    said = ranks(world).run(_resumes, folder / "tiny.toml", out, launch)
    _check_resumed(out, said[0], losses(folder / "first"))
    changed = "the strategy has changed from parallel_mode(data=2) to parallel_mode(data=1), planned anew for one rank"
    assert (changed in said[0]) == (world == 1), said[0]


@pytest.mark.long
@pytest.mark.parametrize("nproc", [2, 1])
def test_a_resumed_run_repeats_the_uninterrupted_one(run, nproc):
    folder, _ = run
    out = _stopped_after_step_3(folder, f"resumed-{nproc}")
    result = meshwright("train", "tiny.toml", "--nproc", nproc, "--out", out, "--resume", folder=folder)
    assert result.returncode == 0, result.stderr
    _check_resumed(out, result.stderr, losses(folder / "first"))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("model.source=tiny:fails_on_rank_1", "OSError: the weights are not on this machine"),
        pytest.param("model.args.fails_at_step=3", "RuntimeError: a bad day at step 3", marks=pytest.mark.long),
    ],
)
def test_a_failing_rank_ends_the_others(tmp_path, change, word):
    result = meshwright("train", project(tmp_path), "--nproc", 2, "--out", "out", "--set", change, folder=tmp_path)
    assert result.returncode != 0
    # From the failure on: how long starting takes is the machine's affair.
    assert time.time() - float((tmp_path / "failed_at").read_text()) < 15
    assert result.stderr.count(word) == 1
    assert "rank 1" in result.stderr


@pytest.mark.long  # the ranks that the program starts itself are torchrun's too
def test_under_torchrun_it_joins(tmp_path):
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    project(tmp_path)
    launcher = (*torchrun, sys.executable)
    result = meshwright("train", "tiny.toml", "--steps", 2, folder=tmp_path, launcher=launcher)
    assert result.returncode == 0, result.stdout + result.stderr
    (out,) = (tmp_path / "runs").iterdir()
    assert json.loads((out / "config.json").read_text())["ranks"] == 2
    assert [record["step"] for record in metrics(out)] == [1, 2]
