"""Profiles of steps: phases by the clock and in the trace, the summary beside the plan, and steps left as they are."""

import gzip
import json
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.inspect import layer_norms
from meshwright.planner.plan_request import plan
from meshwright.runtime import rank
from meshwright.training import step_profile
from tests import tiny


def _job(strategy, num_micro_batches=1):
    torch.manual_seed(3)
    return mw.accelerate(
        tiny.plain(num_layers=4), torch.optim.AdamW, tiny.Tokens(), tiny.loss_func, strategy=strategy,
        dataloader_args={"batch_size": 8}, num_micro_batches=num_micro_batches,
    )  # fmt: skip


def profiled(folder, strategy, num_micro_batches):
    """Ten steps without and with a profile: both losses, the phases of a traced step, the summary."""
    losses = []
    for is_profiled in (False, True):
        job = _job(strategy, num_micro_batches)
        batches = iter(job.dataloader)
        if not is_profiled:
            losses.append([float(job.step(next(batches)).loss) for _ in range(8)])
            continue
        with job.profile(folder, steps=(4, 5)) as profile:
            with pytest.raises(mw.ConfigError, match="profiled already"), job.profile(folder):
                pass
            losses.append([float(job.step(next(batches)).loss) for _ in range(8)])
    events = json.loads(gzip.decompress(Path(f"{folder}/trace-rank{rank()}.json.gz").read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if str(event.get("name")).startswith("meshwright.")]
    assert job.dataloader.waiting.__name__ == "nullcontext"
    return losses, names, profile.summary


@pytest.mark.parametrize(
    ("strategy", "micro_batches", "phases"),
    [
        (["fsdp"], 2, {"data": 2, "forward": 4, "backward": 4, "optimizer": 2}),
        ([("parallel_mode", {"pipeline": 2}), "pipeline_parallel"], 2,
         {"data": 2, "forward and backward": 2, "optimizer": 2}),
    ],
)  # fmt: skip
def test_phases_are_named_and_summed_up_and_steps_stay_the_same(ranks, tmp_path, strategy, micro_batches, phases):
    for number, (losses, names, summary) in enumerate(ranks(2).run(profiled, str(tmp_path), strategy, micro_batches)):
        assert losses[0] == losses[1]
        counted = {name.removeprefix("meshwright."): names.count(name) for name in names}
        assert {name: counted[name] for name in phases} == phases
        assert [name for name in names if "step" in name] == ["meshwright.step 4", "meshwright.step 5"]
        assert bool(summary) == (number == 0)
    text = (tmp_path / "summary.txt").read_text()
    assert all(words in text for words in ("optimizer", "steps 4 to 5", "while traced", "peak memory of a rank"))
    assert max(map(len, text.splitlines())) <= 80


def phases_of_a_run(folder):
    job = _job(["parallel_mode"])
    with job.profile(folder, steps=(4, 6), trace=False) as profile:
        for batch in job.dataloader:
            job.step(batch)
    return profile._measured()


def test_phases_add_up_to_the_step(ranks, tmp_path):
    (measured,) = ranks(1).run(phases_of_a_run, str(tmp_path))
    assert sum(measured[name] for name in ("data", "forward", "backward", "optimizer")) <= measured["step"]
    assert measured["forward"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["summary.txt"]


def fails_within(folder):
    job = _job([])
    batch = next(iter(job.dataloader))
    with pytest.raises(KeyError), job.profile(folder, steps=(1, 9), memory=True):  # noqa: PT012
        job.step(batch)
        raise KeyError
    assert job._profile is None
    with pytest.raises(mw.ConfigError, match="steps to profile"), job.profile(folder, steps=(3, 2)):
        pass


def test_a_block_that_fails_leaves_a_trace_alone(ranks, tmp_path):
    ranks(1).run(fails_within, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace-rank0.json.gz"]


@pytest.mark.parametrize("strategy", [["fsdp"], ["fsdp", ("gradient_accumulation", {"num_micro_batches": 2})]])
def test_predicted_phases_are_those_of_the_forecast(strategy):
    found = plan("gpt:layers=4,hidden=256,heads=4,vocab=1000", "h100x8", global_batch=16, seq=128, strategy=strategy)[0]
    phases = step_profile.predicted_phases(found)
    parts = sum(phases[name] for name in ("forward", "backward", "optimizer", "rest"))
    assert parts == pytest.approx(phases["step"], rel=1e-6)
    assert min(phases["forward"], phases["backward"]) > 0


def test_overlapping_spans_count_once():
    assert step_profile._covered([(0, 2), (1, 3), (5, 6)]) == 4


def norms_of_layers(strategy):
    job = _job(strategy)
    for _, batch in zip(range(2), job.dataloader, strict=False):
        job.step(batch)
    return layer_norms(job.model)


@pytest.mark.parametrize(
    "strategy",
    [["fsdp"], [("parallel_mode", {"tensor": 2}), "tensor_parallel"], pytest.param(["zero2"], marks=pytest.mark.long)],
    ids=str,
)
def test_norms_of_layers_are_those_of_one_process(ranks, strategy):
    (alone,) = ranks(1).run(norms_of_layers, [])
    for found in ranks(2).run(norms_of_layers, strategy):
        assert found.keys() == alone.keys()
        for name, both in alone.items():
            assert found[name] == pytest.approx(both, rel=1e-5), name
