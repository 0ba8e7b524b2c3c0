"""A loop of one's own that stops anywhere goes on as if it had not."""

import pytest
import torch

import meshwright as mw
from meshwright.errors import ConfigError
from meshwright.planner.plans import plan_table
from meshwright.store import HostSnapshots

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
        tensors, _ = snapshots._captured(run.state)
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
