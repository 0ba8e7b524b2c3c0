"""Plans say how far off they may be."""

import dataclasses
import math

import pytest

from meshwright.cost import find_cluster
from meshwright.planner import FamilyWorkload, parse_family
from meshwright.planner.explain import mfu
from meshwright.planner.explain.plan_figures import highest_mfu, layout_kind, published_mfu, step_interval, time_entry
from meshwright.planner.explain.plan_reasons import why
from meshwright.planner.search import Found
from meshwright.strategy import Strategy


def planned(cluster):
    subject = FamilyWorkload(parse_family("llama-3-1b"), find_cluster(cluster), 16)
    return subject.plan(Strategy(["fsdp", ("amp_native", "bf16")]))


def test_a_plan_lies_in_its_interval_and_says_what_that_is_taken_from():
    plan = planned("h100x8")
    known, time = step_interval(plan), plan.forecast.time.step_time_s
    assert known.low_s <= time <= known.high_s
    assert known.num_runs >= 8
    assert f"Expect {known}." in why(Found((plan,))).chosen
    assert time_entry(plan)["interval_s"] == [known.low_s, known.high_s]


def moved(plan, name, efficiency):
    """The plan on another device, as if it were as fast there."""
    device = dataclasses.replace(plan.forecast.cluster.device, name=name, efficiency=efficiency)
    cluster = dataclasses.replace(plan.forecast.cluster, device=device)
    return dataclasses.replace(plan, forecast=dataclasses.replace(plan.forecast, cluster=cluster))


@pytest.mark.parametrize("efficiency", ["unheard-of", "H100"])
def test_hardware_without_runs_has_a_wide_interval_and_says_so(efficiency):
    plan = planned("h100x8")
    known, other = step_interval(plan), step_interval(moved(plan, "New-1", efficiency))
    assert "twice as wide" not in str(known)
    assert "too few are known on New-1, so it is twice as wide" in str(other)
    assert math.log(other.high_s / other.low_s) > 1.9 * math.log(known.high_s / known.low_s)
    assert ("H100" in str(other)) is (efficiency == "H100")
    assert step_interval(dataclasses.replace(plan, forecast=None)) is None


def test_layouts_without_runs_have_a_wide_interval_and_say_so():
    plan = planned("h100x8")
    axes = (("expert", 2), ("zero", 4))
    unknown = dataclasses.replace(plan, step=plan.step.replace(axes=axes))
    assert "too few are known of such layouts, so" in str(step_interval(unknown))
    nowhere = moved(unknown, "New-1", "unheard-of")
    assert "too few are known on New-1 and of such layouts, so" in str(step_interval(nowhere))
    assert math.log(step_interval(unknown).high_s / step_interval(unknown).low_s) > 0.4


@pytest.mark.parametrize(("name", "says"), [("mixtral-8x7b", True), ("llama-3-8b", False), ("gpt2", False)])
def test_models_with_experts_are_of_no_known_kind_whatever_is_divided(name, says):
    subject = FamilyWorkload(parse_family(name), find_cluster("h100x8"), 16)
    plan = subject.plan(Strategy(["fsdp", ("amp_native", "bf16"), "checkpoint"]))
    assert ("too few are known of such layouts" in str(step_interval(plan))) is says


def test_steps_that_were_measured_lie_in_their_intervals():
    # Llamas on one H200 by our own engine: planned over measured seconds (benchmarks/README.md).
    plan = planned("h200x1")
    known, time = step_interval(plan), plan.forecast.time.step_time_s
    assert all(known.low_s < time / (1 + off) < known.high_s for off in (0.066, 0.055, 0.053, 0.042, -0.027))


def test_a_use_of_devices_that_nobody_has_reached_is_not_told_without_a_word():
    plan = planned("h100x8")
    highest, runs = published_mfu(plan)
    assert "published runs of such layouts on H100 devices" in runs
    assert time_entry(plan)["highest_published_mfu"] == highest
    assert mfu(plan) < highest
    assert not any("fastest of" in line for line in why(Found((plan,))).chosen)
    time = plan.forecast.time
    faster = dataclasses.replace(time, step_time_s=time.step_time_s * mfu(plan) / (1.05 * highest))
    unheard = dataclasses.replace(plan, forecast=dataclasses.replace(plan.forecast, time=faster))
    assert any(f"the {100 * highest:.1f} % of the fastest of {runs}" in line for line in why(Found((unheard,))).chosen)


def test_the_highest_use_is_of_the_precision_and_of_enough_runs():
    h100, mi300x = planned("h100x8"), planned("mi300xx8")
    assert highest_mfu(h100, "fp8")[0] < highest_mfu(h100, "half")[0]
    assert highest_mfu(h100, "fp32") is None
    assert highest_mfu(mi300x, "half") is None, "one run is known"
    assert highest_mfu(dataclasses.replace(h100, forecast=None), "half") is None
    assert time_entry(mi300x)["highest_published_mfu"] is None


@pytest.mark.parametrize(
    ("axes", "kind"),
    [((), "data"), ((("zero", 8),), "data"), ((("tensor", 2), ("zero", 4)), "tensor"),
     ((("tensor", 2), ("pipeline", 4)), "pipeline"), ((("expert", 2), ("pipeline", 4)), "expert")],
)  # fmt: skip
def test_kinds_of_layouts(axes, kind):
    assert layout_kind(axes) == kind
