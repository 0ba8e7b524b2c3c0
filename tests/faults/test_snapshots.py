"""``meshwright train`` with snapshots under faults: it ends as it would have, and says what each has cost."""

import json
import os
import random
import shutil

import pytest

from tests.cli.helpers import losses, metrics
from tests.faults.command_runs import events, outputs, prepare, train

OPTIONS = (
    "--set", "run.checkpoint_every=5", "--set", "run.hang_limit_s=3.0", "--set", "model.args.dropout=0.2",
)  # fmt: skip


KINDS = ("kill", "kill later", "kill again", "hang", "stop", "nan", "disk", "error", "corrupt")


def _train(folder, steps, faults=(), nproc=2, restarts=3, *more):
    prepare(folder, faults)
    batch = ("--set", f"run.batch_size={4 * nproc}")
    return train(folder, nproc, "--steps", steps, *batch, *OPTIONS, *more, restarts=restarts)


def _whole(tmp_path, steps, nproc=2, *more):
    folder = tmp_path / "whole"
    folder.mkdir()
    done = _train(folder, steps, (), nproc, 3, *more)
    assert done.returncode == 0, done.stderr
    assert not (folder / "out/failures.jsonl").exists()
    return losses(folder / "out")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_kind_of_failure_costs_a_step_at_most_and_is_told(tmp_path):
    whole = _whole(tmp_path, 24)
    faults = [("kill", 3, 1), ("hang", 7, 0), ("nan", 10, 1), ("disk", 15, 0), ("stop", 17, 1), ("error", 21, 0)]
    done = _train(tmp_path, 24, faults, 2, 9)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "out") == whole
    assert [record["step"] for record in metrics(tmp_path / "out")] == list(range(1, 25))
    told_of = events(tmp_path)
    told = [each["what"] for each in told_of if each["what"] != "went on"]
    assert told == ["killed", "hang", "nan", "disk", "hang", "error"]
    assert [each["ranks"] for each in told_of if each["what"] == "hang"] == [[0], [1]]
    went_on = [each for each in told_of if each["what"] == "went on"]
    assert [each["source"] for each in went_on] == ["a snapshot"] * 5
    assert all(each["lost_steps"] <= 1 for each in went_on)
    assert [each["step"] for each in told_of if each["what"] == "nan"] == [11]
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
    # In the first step after a restart DDP has other buckets than later: more than two ranks add up in another order.
    strategy = ("--strategy", "zero2") if nproc > 2 else ()
    steps, rng = 40, random.Random(nproc + 1000 * request.config.getoption("--seed"))
    whole, struck, number = _whole(tmp_path, steps, nproc, *strategy), 0, 0
    most = request.config.getoption("--kills") // 10
    while struck < most:
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        kinds = rng.choices(KINDS, (4, 3, 2, 1, 1, 2, 1, 1, 2), k=8)
        faults = [(kind, step, rng.randrange(nproc)) for kind, step in zip(kinds, sorted(rng.sample(range(1, 39), 8)),
                                                                            strict=True)]  # fmt: skip
        done = _train(folder, steps, faults, nproc, 20, *strategy)
        assert done.returncode == 0, (faults, done.stderr[-3000:])
        assert losses(folder / "out") == whole, faults
        assert outputs(folder) == outputs(tmp_path / "whole"), faults
        found = [each["kind"] for n, each in enumerate(json.loads((folder / "faults.json").read_text()))
                 if (folder / f"struck-{n}").exists()]  # fmt: skip
        found += ["kill in recovery"] * len(list(folder.glob("in-recovery-*")))
        print(f"{nproc} ranks, run {number}: {', '.join(found)}", flush=True)
        struck, number = struck + len(found), number + 1
