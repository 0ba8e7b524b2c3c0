"""A loop of one's own that stops anywhere goes on as if it had not."""

import subprocess
import sys

import pytest
import torch

import meshwright as mw
from meshwright.errors import ConfigError
from meshwright.planner.plans import plan_table
from meshwright.store import HostSnapshots
from tests.cli.helpers import ROOT, TIMEOUT_S, environment

STEPS, BATCH = 6, 4


class _Stop(Exception):
    pass


def _job(strategy):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(13, 7))
    data = torch.randn(STEPS * BATCH, 7, generator=torch.Generator().manual_seed(1))
    return mw.accelerate(
        model, torch.optim.AdamW, list(data), lambda given, out: (out - given).square().mean(), strategy=strategy,
        dataloader_args={"batch_size": BATCH, "shuffle": False}, optim_args={"lr": 0.05},
    )  # fmt: skip


def _loop(folder, strategy, stops_at=None, every=1):
    """The losses by step, what it has begun with, and the bytes of a snapshot beside those that the plan counts."""
    job, losses = _job(strategy), {}
    try:
        with mw.resilient(job, folder, every=every, checkpoint_every=4) as run:
            for number, batch in enumerate(job.dataloader):
                if number < run.state.step:
                    continue
                losses[number] = float(job.step(batch).loss)
                if number == stops_at:
                    raise _Stop
                run.step_done(BATCH)
    except _Stop:
        pass
    return losses, run.source


@pytest.mark.parametrize("strategy", [["fsdp"], [["parallel_mode", {"data": 2}]]])
def test_a_loop_goes_on(ranks, tmp_path, strategy):
    whole, source = ranks(2).run(_loop, tmp_path / "whole", strategy)[0]
    assert (sorted(whole), source) == (list(range(STEPS)), "the beginning")
    first, _ = ranks(2).run(_loop, tmp_path / "run", strategy, 2)[0]
    then, source = ranks(2).run(_loop, tmp_path / "run", strategy)[0]
    assert source == "the snapshots of step 2"
    assert {**first, **then} == whole
    assert sorted(then) == [2, 3, 4, 5]
    _, source = ranks(2).run(_loop, tmp_path / "run", strategy)[0]
    assert source == "the checkpoint of step 6"  # the end has removed the snapshots
    ranks(2).run(_loop, tmp_path / "disk", strategy, 5, None)
    then, source = ranks(2).run(_loop, tmp_path / "disk", strategy, None, None)[0]
    assert (sorted(then), source) == ([4, 5], "the checkpoint of step 4")
    assert all(whole[step] == loss for step, loss in then.items())


def _sizes(folder, strategy):
    job = _job(strategy)
    job.step(next(iter(job.dataloader)))
    with mw.resilient(job, folder) as run:
        snapshots = HostSnapshots(folder / "sizes")
        snapshots._open()
        _, tensors, _ = snapshots._captured(run.state)
        snapshots.close()
    taken = sum(tensor.nbytes for name, tensor in tensors.items() if not name.startswith("random."))
    plan = mw.Plan(**{**vars(job.plan), "num_snapshots": snapshots.num_copies})
    return (
        taken * snapshots.num_copies,
        plan.snapshot_bytes,
        plan_table(plan).row_count - plan_table(job.plan).row_count,
    )


@pytest.mark.parametrize(
    "strategy", [["fsdp"], ["zero2"], [["parallel_mode", {"data": 2}]], ["fsdp", ["half", "bf16"]]]
)
def test_the_plan_counts_every_byte(ranks, tmp_path, strategy):
    found = ranks(2).run(_sizes, tmp_path, strategy)
    assert max(taken for taken, _, _ in found) == found[0][1]
    assert found[0][2] == 1


def test_what_cannot_go_on_is_refused(ranks, tmp_path):
    assert "checkpoint_every=0" in ranks(1).run(_refused, tmp_path)[0]


def _refused(folder):
    with pytest.raises(ConfigError) as caught:
        mw.resilient(_job(["fsdp"]), folder, checkpoint_every=0)
    return str(caught.value)


LOOP = """
import os, signal, sys

import torch

import meshwright as mw
from tests.training.test_resilient import BATCH, _job

folder, strategy = sys.argv[1], sys.argv[2]
mw.init_distributed(seed=0)
job = _job(strategy)
with mw.resilient(job, folder, checkpoint_every=4) as run:
    for number, batch in enumerate(job.dataloader):
        if number < run.state.step:
            continue
        loss = job.step(batch).loss.item()
        if mw.rank() == 0:
            with open(f"{folder}.losses", "a") as file:
                file.write(f"{number} {loss!r} {run.source}\\n")
        if number == 2 and mw.rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        run.step_done(BATCH)
mw.shutdown_distributed()
"""


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fsdp", "parallel_mode(data=2)"])
def test_torchrun_starts_a_loop_again_and_it_goes_on_to_the_bit(ranks, tmp_path, strategy):
    (tmp_path / "loop.py").write_text(LOOP)
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *words, "loop.py", "run", strategy]
    given = {**environment(), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "going on from the snapshots of step 2" in done.stderr
    lines = [line.split(" ", 2) for line in (tmp_path / "run.losses").read_text().splitlines()]
    assert [int(number) for number, *_ in lines] == [0, 1, 2, 2, 3, 4, 5]  # a step was lost, and taken again
    assert {source for *_, source in lines[3:]} == {"the snapshots of step 2"}
    whole, _ = ranks(2).run(_loop, tmp_path / "whole", strategy)[0]
    assert {int(number): float(loss) for number, loss, _ in lines} == whole
    assert lines[2][1] == lines[3][1]
