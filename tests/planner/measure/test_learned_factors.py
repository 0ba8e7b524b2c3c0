"""What dry runs teach: found again, of use for other models, and noted where it belongs alone."""

import dataclasses
import json

import pytest
import torch

import meshwright as mw
from meshwright.cost import (
    Calibration,
    Constants,
    Efficiency,
    Learned,
    Link,
    learned_from,
    make_cluster,
    read_cluster,
    write_cluster,
)
from meshwright.errors import ConfigError
from meshwright.planner import FamilyWorkload, Shape, described_cluster
from meshwright.planner.measure import learned_factors as learning
from meshwright.planner.measure.dry_runs import Measured
from meshwright.planner.measure.learned_factors import learned_of, note_runs, runs_of
from meshwright.runtime import Settings, machine_name
from meshwright.strategy import Strategy
from tests import tiny

CPU = torch.device("cpu")
CONSTANTS = Constants(call_s=1e-4, wait_s=1e-3, shard_s=1e-4, step_s=1e-3, shared=1.0, interference=0.0)
CALIBRATION = Calibration({"measured": Efficiency(matmul=0.8, memory=0.9)}, CONSTANTS, machine_name(CPU))
TRUE = Learned(computing=1.3, collectives=1.6, call_s=2e-3)
STRATEGIES = [["parallel_mode", *each] for each in ((), ("zero2",), ("fsdp",), ("fsdp", "checkpoint"))]


def cluster():
    base = make_cluster("CPU", 2, 2)
    device = dataclasses.replace(base.device, efficiency="measured")
    return dataclasses.replace(base, device=device, intra=Link(2e9, 5e-5), calibration=CALIBRATION)


def measured(shape, true=TRUE):
    """Plans as the calibration predicts them, with the seconds of a machine that is ``true`` beside it."""
    subject = FamilyWorkload(shape, cluster(), 4)
    plans = [subject.plan(Strategy(methods)) for methods in STRATEGIES]
    known = true.applied(CALIBRATION)
    there = dataclasses.replace(subject, cluster=dataclasses.replace(cluster(), calibration=known))
    seconds = [there.plan(Strategy(methods)).forecast.time.step_time_s for methods in STRATEGIES]
    return [Measured(plan, (each,), 1) for plan, each in zip(plans, seconds, strict=True)]


SMALL, LARGE = (Shape("gpt", layers, width, 4, 1000, 128) for layers, width in ((2, 64), (6, 512)))


def off(runs, calibration):
    return max(abs(run.predicted_s(calibration) / run.seconds - 1) for run in runs)


@pytest.mark.parametrize(("shape", "other"), [(SMALL, LARGE), (LARGE, SMALL)])
def test_runs_of_one_model_teach_about_another(shape, other):
    runs, others = runs_of(measured(shape)), runs_of(measured(other))
    found = learned_of(runs, CALIBRATION, Learned())
    assert off(runs, found.applied(CALIBRATION)) < 0.05 < off(runs, CALIBRATION)
    assert off(others, found.applied(CALIBRATION)) < 0.7 * off(others, CALIBRATION)
    both = learned_of(others, CALIBRATION, found)
    assert off([*runs, *others], both.applied(CALIBRATION)) < 0.15
    assert both.num_runs == 8
    nothing = learned_of(runs_of(measured(shape, Learned())), CALIBRATION, Learned())
    assert (nothing.computing, nothing.collectives, nothing.call_s) == pytest.approx((1, 1, 0), abs=1e-6)


@pytest.fixture
def now(monkeypatch):
    monkeypatch.setattr(learning, "disturbed", lambda now: 1.0)
    return Settings(0, 3, None, CPU, 2)


def test_what_runs_taught_is_noted_beside_what_was_calibrated(tmp_path, now, monkeypatch):
    file = tmp_path / "here.json"
    file.write_text(write_cluster(cluster(), {"date": "2026-01-01"}))
    before = json.loads(file.read_text())
    told = note_runs(file, measured(LARGE), now)
    assert "noted 4 dry runs in" in told
    after = json.loads(file.read_text())
    learned = after["calibration"].pop("learned")
    assert after == before
    assert learned["num_runs"] == read_cluster(file).calibration.num_runs == 4
    assert read_cluster(file).calibration == learned_from(learned).applied(CALIBRATION)
    assert read_cluster(file, learned=False) == cluster()
    assert "predictions were 0% off, and are 0% off" not in told
    note_runs(file, measured(LARGE), now)
    assert read_cluster(file).calibration.num_runs == 8
    assert [path.name for path in tmp_path.iterdir()] == ["here.json"]
    whole = file.read_text()
    monkeypatch.setattr(learning, "disturbed", lambda now: 3.0)
    assert "computing takes 3.0 times as long" in note_runs(file, measured(LARGE), now)
    assert file.read_text() == whole


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data["calibration"].update(machine="Another, 4 cores"), "it was measured on Another, 4 cores"),
        (lambda data: data["calibration"].pop("machine"), "measured on another machine"),
        (lambda data: data.update(num_devices=4), "it was measured with 4 ranks, and these are 2"),
        (lambda data: data.pop("calibration"), "meshwright calibrate has not written it"),
        (lambda data: data["calibration"].update(learned={"computing": -1}), "learned.computing must be a number"),
    ],
)
def test_nothing_is_noted_where_it_does_not_belong(tmp_path, now, change, words):
    file, data = tmp_path / "there.json", json.loads(write_cluster(cluster()))
    change(data)
    file.write_text(json.dumps(data))
    assert words in note_runs(file, measured(SMALL), now)
    assert json.loads(file.read_text()) == data
    assert "No such file" in note_runs(tmp_path / "absent.json", measured(SMALL), now)
    assert note_runs(file, [], now) == "no dry run to note"


def test_a_described_cluster_is_that_of_the_job_or_says_what_is_not():
    found, told = described_cluster(cluster(), CPU, 2, 2)
    assert (found, told) == (cluster(), ())
    elsewhere = dataclasses.replace(CALIBRATION, machine="Another, 64 cores")
    found, told = described_cluster(dataclasses.replace(cluster(), calibration=elsewhere), CPU, 4, 2)
    assert (found.num_devices, found.devices_per_node) == (4, 2)
    assert "measured on Another, 64 cores" in told[0]
    assert "calibrate --nproc 4" in told[1]
    with pytest.raises(ConfigError, match="other devices than those that train"):
        described_cluster("h100x2", CPU, 2, 2)


def trained(file):
    learning.disturbed = lambda now: 1.0
    arguments = {"optim_func": torch.optim.AdamW, "dataset": tiny.Tokens(), "loss_func": tiny.loss_func}
    arguments |= {"dataloader_args": {"batch_size": 4}}
    given = mw.accelerate(tiny.plain(), strategy="fsdp", cluster=read_cluster(file), **arguments)
    others = ["tensor_parallel", "pipeline_parallel", "checkpoint", "zero1", "zero2", "offload"]
    chosen = mw.accelerate(tiny.plain(), **arguments, excluded=others, cluster=file, time_limit=60.0)
    with pytest.raises(ConfigError, match="cluster is of a wrong kind"):
        mw.accelerate(tiny.plain(), **arguments, cluster=3)
    return [each.plan.forecast.time.step_time_s for each in (given, chosen)], chosen.strategy.names


def test_a_measured_cpu_is_chosen_for_by_seconds_and_learns_from_dry_runs(ranks, tmp_path):
    file = tmp_path / "here.json"
    file.write_text(write_cluster(cluster()))
    (predicted, names), other = ranks(2).run(trained, file)
    assert (predicted, names) == other
    assert all(each > 0 for each in predicted)
    assert read_cluster(file).calibration.num_runs >= 1
    assert read_cluster(file, learned=False) == cluster()
