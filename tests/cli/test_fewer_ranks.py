"""``--min-nproc``: a rank that fails again and again is left out, and the run goes on with fewer."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.cli.run_failures import FewerRanks, read_failures
from meshwright.cli.train_options import Options, prepare
from meshwright.runtime.launch import HUNG, Failure
from tests.cli.helpers import as_program, losses, meshwright, project, train_as_rank

# Rank 1 is lost for good, where there are three: it ends itself in every attempt.
LOST = """
import os, signal

class Lost:
    def on_step(self, step, result):
        if step >= 4 and os.environ["WORLD_SIZE"] == "3" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """The losses of a run that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    ranks(1).run(train_as_rank, project(folder), "run.batch_size=12", out=folder / "whole")
    return losses(folder / "whole")


@pytest.mark.long
@pytest.mark.parametrize("changes", [["strategy.methods=fsdp"], ["run.snapshot.every=1"]])
def test_a_run_goes_on_without_the_rank_that_is_lost(whole, tmp_path, changes):
    project(tmp_path)
    (tmp_path / "lost.py").write_text(LOST)
    changes = [*changes, "run.batch_size=12", "run.callbacks=['lost:Lost']"]
    words = ("--nproc", 3, "--min-nproc", 1, "--max-restarts", 5, "--out", "out")
    done = meshwright("train", "tiny.toml", *words, *(each for change in changes for each in ("--set", change)),
                      folder=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the run goes on with 2 of 3 ranks, and cuts its batch into 2 micro-batches on each" in done.stderr
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["ranks"], config["run"]["batch_size"], config["run"]["num_micro_batches"]) == (2, 12, 2)
    assert losses(tmp_path / "out") == pytest.approx(whole, rel=1e-5)
    (lost,) = [each for each in read_failures(tmp_path / "out") if each["what"] == "lost"]
    assert (lost["rank"], lost["ranks"]) == (1, 2)


def decider(folder, nproc, *changes, fewest=1):
    with as_program(folder):
        options = Options(folder / "tiny.toml", nproc=nproc, changes=changes, max_restarts=9, min_nproc=fewest)
        (folder / "out").mkdir(exist_ok=True)
        return FewerRanks(options, prepare(options, nproc), nproc, folder / "out")


def killed(rank, status=-9):
    return Failure(0, rank, status, 0.0, False)


def done(folder, step):
    (folder / "out" / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")


def words(attempt):
    return " ".join(attempt.arguments)


def test_a_rank_is_lost_when_it_fails_again_before_a_new_step(tmp_path):
    project(tmp_path)
    again = decider(tmp_path, 4)
    assert again(killed(2)) is None
    assert again(killed(1)) is None  # another one
    done(tmp_path, 3)
    assert again(killed(1)) is None  # the run has come further
    assert again(killed(1, HUNG)) is None  # the rank that told of a hang
    assert again(killed(1)) is None
    found = again(killed(1))
    assert found.nproc == 2  # batches of 4 cannot be divided by 3
    assert "--nproc 2" in words(found)
    assert "--set run.num_micro_batches=2" in words(found)
    assert not found.environment
    done(tmp_path, 5)
    assert again(killed(0)) is None
    found = again(killed(0))
    assert (found.nproc, "--set run.num_micro_batches=4" in words(found)) == (1, True)


@pytest.mark.parametrize(
    ("nproc", "changes", "fewest", "expected"),
    [
        (4, ("strategy.methods='parallel_mode(tensor=2, data=2) + tensor_parallel'",), 1, (2, 2)),
        (4, ("run.num_micro_batches=2", "run.batch_size=24", "strategy.methods=zero2"), 1, (3, 4)),
        (2, ("strategy.methods='fsdp + gradient_accumulation(2)'",), 1, (1, 4)),
        (2, ("strategy.methods='parallel_mode(pipeline=2) + pipeline_parallel'",), 1, None),
        (4, (), 3, None),
    ],
)
def test_as_many_go_on_as_strategy_and_batch_allow(tmp_path, capsys, nproc, changes, fewest, expected):
    project(tmp_path)
    again = decider(tmp_path, nproc, *changes, fewest=fewest)
    found = [again(killed(0)), again(killed(0))][1]
    if expected is None:
        assert found is None
        assert "all start again" in capsys.readouterr().err
        return
    ranks, micro_batches = expected
    assert found.nproc == ranks
    text = words(found)
    assert f"run.num_micro_batches={micro_batches}" in text or f"num_micro_batches={micro_batches})" in text
    Options(Path(tmp_path / "tiny.toml"), strategy=text.partition("--strategy ")[2].partition(" --")[0] or None).read()


def test_the_device_of_a_lost_rank_is_left_out(tmp_path, monkeypatch):
    project(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    again = decider(tmp_path, 4, "run.device=auto")
    assert again(killed(1)) is None
    assert again(killed(1)).environment == {"CUDA_VISIBLE_DEVICES": "4,6,7"}


@pytest.mark.parametrize("given", [["--min-nproc", "3", "--max-restarts", "4"], ["--min-nproc", "1"]])
def test_what_could_never_count_is_refused(tmp_path, given):
    result = CliRunner().invoke(app, ["train", str(project(tmp_path)), "--nproc", "2", *given])
    assert result.exit_code == 1
    assert "at most 2, with --max-restarts 2 or more" in result.stderr
