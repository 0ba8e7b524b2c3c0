"""Plans say how far off they may be."""

import dataclasses

import pytest

from meshwright.cost import find_cluster
from meshwright.planner import FamilyWorkload, parse_family
from meshwright.planner.explain.intervals import layout_kind, step_interval
from meshwright.planner.explain.plan_figures import time_entry
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


def test_hardware_without_runs_has_a_wide_interval_and_says_so():
    plan = planned("h100x8")
    device = dataclasses.replace(plan.forecast.cluster.device, name="New-1", efficiency="unheard-of")
    cluster = dataclasses.replace(plan.forecast.cluster, device=device)
    unknown = dataclasses.replace(plan, forecast=dataclasses.replace(plan.forecast, cluster=cluster))
    known = step_interval(unknown)
    assert "none is known on New-1" in str(known)
    assert known.high_s - known.low_s > 0.2 * plan.forecast.time.step_time_s
    assert step_interval(dataclasses.replace(plan, forecast=None)) is None


@pytest.mark.parametrize(
    ("axes", "kind"),
    [((), "data"), ((("zero", 8),), "data"), ((("tensor", 2), ("zero", 4)), "tensor"),
     ((("tensor", 2), ("pipeline", 4)), "pipeline"), ((("expert", 2), ("pipeline", 4)), "expert")],
)  # fmt: skip
def test_kinds_of_layouts(axes, kind):
    assert layout_kind(axes) == kind
