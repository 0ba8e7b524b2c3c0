"""``meshwright train`` with snapshots under faults: it ends as it would have, and says what each has cost."""

import json
import os
import random
import shutil

import pytest

from tests.cli.helpers import losses, meshwright, metrics, project

# What strikes: one line of JSON per fault, taken once each by whoever removes its mark first.
FAULTS = """
import json, os, resource, signal, time
from pathlib import Path

import torch

RANK = int(os.environ["RANK"])


class Faults:
    def __init__(self, job):
        self.job, self.limit = job, resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_step(self, step, result):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limit)
        for number, fault in enumerate(json.loads(Path("faults.json").read_text())):
            mark = Path(f"struck-{number}")
            if (fault["step"], fault["rank"]) == (step, RANK) and not mark.exists():
                mark.touch()
                self.strike(fault["kind"])

    def strike(self, kind):
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "hang":
            time.sleep(1e6)
        elif kind == "nan":
            def spoil(module, given, output):
                handle.remove()
                return output * float("nan")
            handle = self.job.model.register_forward_hook(spoil)
        elif kind == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, self.limit[1]))
        elif kind == "corrupt":
            token = Path("out/.snapshots").read_text()
            for path in Path("/dev/shm", f"meshwright-snapshots-{token}").glob(f"rank-{RANK:05d}/of-{RANK:05d}-*"):
                with path.open("r+b") as file:
                    file.seek(4096 + 100)
                    byte = file.read(1)
                    file.seek(4096 + 100)
                    file.write(bytes([byte[0] ^ 4]))
        else:
            raise RuntimeError("a bad day")
"""
OPTIONS = (
    "--set", "run.snapshot.every=1", "--set", "run.callbacks=['faulty:Faults']", "--set", "run.checkpoint_every=5",
    "--set", "run.hang_limit_s=3.0", "--set", "model.args.dropout=0.2",
)  # fmt: skip


def _train(folder, steps, faults=(), nproc=2, restarts=3, *more):
    project(folder)
    (folder / "faulty.py").write_text(FAULTS)
    (folder / "faults.json").write_text(
        json.dumps([dict(zip(("kind", "step", "rank"), each, strict=True)) for each in faults])
    )
    return meshwright(
        "train", "tiny.toml", "--nproc", nproc, "--out", "out", "--steps", steps, "--max-restarts", restarts,
        "--set", f"run.batch_size={4 * nproc}", *OPTIONS, *more, folder=folder,
    )  # fmt: skip


def _whole(tmp_path, steps, nproc=2):
    folder = tmp_path / "whole"
    folder.mkdir()
    done = _train(folder, steps, nproc=nproc)
    assert done.returncode == 0, done.stderr
    assert not (folder / "out/failures.jsonl").exists()
    return losses(folder / "out")


def _as_reported(whole, nproc):
    """Each rank's own loss is equal to the bit; gloo adds up more than two in any order, which moves the last one."""
    return whole if nproc == 2 else pytest.approx(whole, rel=2**-22)


def _events(folder):
    return [json.loads(line) for line in (folder / "out/failures.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_kind_of_failure_costs_a_step_at_most_and_is_told(tmp_path):
    whole = _whole(tmp_path, 24)
    faults = [("kill", 3, 1), ("hang", 7, 0), ("nan", 10, 1), ("disk", 15, 0), ("stop", 17, 1), ("error", 21, 0)]
    done = _train(tmp_path, 24, faults, 2, 9)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "out") == whole
    assert [record["step"] for record in metrics(tmp_path / "out")] == list(range(1, 25))
    events = _events(tmp_path)
    told = [each["what"] for each in events if each["what"] != "went on"]
    assert told == ["killed", "hang", "nan", "disk", "hang", "error"]
    assert [each["ranks"] for each in events if each["what"] == "hang"] == [[0], [1]]
    went_on = [each for each in events if each["what"] == "went on"]
    assert [each["source"] for each in went_on] == ["a snapshot"] * 5
    assert all(each["lost_steps"] <= 1 for each in went_on)
    assert [each["step"] for each in events if each["what"] == "nan"] == [11]
    assert "no checkpoint of step 15; the run goes on" in done.stderr
    assert not [name for name in os.listdir("/dev/shm") if (tmp_path / "out/.snapshots").read_text() in name]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_step_that_is_never_finite_ends_the_run(tmp_path):
    faults = [("nan", 3, 1), ("nan", 3, 0)]  # the second one strikes when the step is taken again
    done = _train(tmp_path, 6, faults, 2, 3)
    assert done.returncode == 0, done.stderr  # on two ranks at once: one accident
    shutil.rmtree(tmp_path / "out")
    always = (
        "--set",
        "optimizer.lr=1e30",
        "--set",
        "optimizer.max_grad_norm=1e30",
        "--set",
        "optimizer.warmup_steps=0",
    )
    done = _train(tmp_path, 6, (), 2, 3, *always)
    assert done.returncode == 1
    assert "is not finite, twice" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("nproc", [2, 4])
def test_random_failures_leave_the_curve_as_it_is(tmp_path, request, nproc):
    steps, rng = 40, random.Random(nproc)
    whole, struck, number = _whole(tmp_path, steps, nproc), 0, 0
    most = request.config.getoption("--kills") // 10
    while struck < most:
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        kinds = rng.choices(("kill", "hang", "stop", "nan", "disk", "error", "corrupt"), (6, 1, 1, 2, 1, 1, 2), k=8)
        faults = [(kind, step, rng.randrange(nproc)) for kind, step in zip(kinds, sorted(rng.sample(range(1, 39), 8)),
                                                                            strict=True)]  # fmt: skip
        done = _train(folder, steps, faults, nproc, 20)
        assert done.returncode == 0, (faults, done.stderr[-3000:])
        assert losses(folder / "out") == _as_reported(whole, nproc), faults
        struck, number = struck + len(list(folder.glob("struck-*"))), number + 1
