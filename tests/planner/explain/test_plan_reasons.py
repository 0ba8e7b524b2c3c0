"""Reasons name what binds, and agree with the figures that they explain."""

import dataclasses
import math
import re

import pytest

from meshwright.cost import find_cluster, fitted, make_cluster, seconds_of
from meshwright.errors import ConfigError, readable_bytes
from meshwright.planner import FamilyWorkload, parse_family
from meshwright.planner.explain import (
    RunLength,
    links,
    mfu,
    per_gpu,
    price_per_billion_tokens,
    short,
    whole_run,
    why,
)
from meshwright.planner.explain.plan_figures import every_step, plan_entry
from meshwright.planner.explain.plan_reasons import too_large
from meshwright.planner.model_shapes import Shape
from meshwright.planner.plans import time_parts
from meshwright.planner.search import Found
from meshwright.strategy import Strategy
from tests.planner.explain.found import found, subject


def test_the_first_plan_is_explained_by_time_and_memory():
    reasons = why(found())
    best = found().plans[0]
    assert reasons.chosen[0] == f"{short(best)} comes first (120 strategies considered, 6 simulated)."
    assert f"{per_gpu(best):,.0f} tokens/s per device" in reasons.chosen[1]
    assert reasons.chosen[2].startswith("Of the step: ")
    assert "computing" in reasons.chosen[2]
    reserved = readable_bytes(best.forecast.peak.reserved_bytes)
    needed = readable_bytes(best.needed_bytes)
    memory = next(line for line in reasons.chosen if line.startswith("The peak is"))
    assert f"The peak is {reserved}, with the gaps that an allocator leaves {needed} of the" in memory
    assert "activations" in memory


def test_what_offloading_needs_of_the_host_is_said():
    cluster = make_cluster("H100", 1)
    for methods, told in ((["checkpoint"], False), (["checkpoint", ("offload", "optimizer")], True)):
        plan = FamilyWorkload(parse_family("llama-3-1b"), cluster, 1, "bf16").plan(Strategy(methods))
        said = why(Found((plan,))).chosen[-1]
        assert (f"Offloading needs {readable_bytes(plan.memory.host_total)} of host memory per device" in said) is told
    host = dataclasses.replace(cluster, host_memory_bytes=2**30)
    plan = FamilyWorkload(parse_family("llama-3-1b"), host, 1, "bf16").plan(Strategy(methods))
    assert not plan.fits
    assert too_large(plan).startswith("needs more host memory than there is: host ")
    assert plan.summary().endswith(f"{plan.host_text()}, too much")


def test_every_other_plan_says_where_it_loses():
    reasons, best = why(found()), found().plans[0]
    assert len(reasons.others) == len(found().plans) - 1
    for plan, line in zip(found().plans[1:], reasons.others, strict=True):
        slower = plan.forecast.time.step_time_s / best.forecast.time.step_time_s - 1
        assert f"{100 * slower:.1f} % slower" in line
    pipelined = next(line for line in reasons.others if "pipeline 4" in line)
    assert "pipeline bubble" in pipelined
    split = next(line for line in reasons.others if line.startswith("tensor 8"))
    assert re.search(r"layers wait for \(most of it \w+ over tensor in \w+, inside a node\)", split)


def test_what_does_not_fit_says_by_how_much_and_what_cannot_be_says_why():
    reasons = why(found())
    (large,) = found().too_large
    assert readable_bytes(large.needed_bytes - large.limit_bytes) + " too much" in reasons.too_large[0]
    assert "optimizer state" in reasons.too_large[0]
    assert "axis sizes that multiply to 16" in reasons.refused[0]


def test_a_plan_without_a_cluster_is_explained_by_its_memory_alone():
    blind = [dataclasses.replace(plan, forecast=None) for plan in found().plans[:2]]
    reasons = why(Found(tuple(blind)))
    assert len(reasons.chosen) == 2
    assert reasons.others[0].endswith("less memory")


def test_figures_follow_from_the_forecast():
    for plan in found().plans:
        known = plan.forecast
        assert abs(sum(time_parts(known.time).values()) - known.time.step_time_s) < 1e-9
        assert per_gpu(plan) == known.tokens_per_s / 16
        dollars = known.cluster.device.price_per_hour * 16 / 3600 * 1e9 / known.tokens_per_s
        assert abs(price_per_billion_tokens(plan) / dollars - 1) < 1e-12
        # However a step is cut up, the model needs the same arithmetic.
        shape = subject().shape
        needed = shape.model_flops_per_token(causal=True) * per_gpu(plan) / known.cluster.device.half_flops_per_s
        assert abs(mfu(plan) / needed - 1) < 0.01, short(plan)


def test_a_whole_run_takes_as_long_as_its_steps():
    plan = found().plans[0]
    known = plan.forecast
    run = whole_run(plan, RunLength(tokens=1e12))
    assert run.tokens == run.steps * 64 * 2048
    assert run.tokens - 64 * 2048 < 1e12 <= run.tokens
    assert run.seconds == run.steps * known.time.step_time_s
    assert run.device_hours == pytest.approx(16 * run.seconds / 3600)
    assert run.price_usd == pytest.approx(run.device_hours * known.cluster.device.price_per_hour)
    assert run.interval_s[0] < run.seconds < run.interval_s[1]
    assert run == whole_run(plan, RunLength(steps=run.steps))
    assert plan_entry(plan, RunLength(steps=7))["run"]["steps"] == 7
    assert plan_entry(plan)["run"] is None
    assert whole_run(dataclasses.replace(plan, forecast=None), RunLength(steps=7)) is None


def test_the_rate_of_interruptions_is_that_of_the_report():
    # 54 days of 16,384 devices had 419 of them; here 16 devices.
    plan = found().plans[0]
    steps = round(54 * 86_400 / plan.forecast.time.step_time_s)
    assert whole_run(plan, RunLength(steps=steps)).interruptions == pytest.approx(419 * 16 / 16_384, rel=1e-3)
    assert "Llama 3" not in " ".join(why(found(), RunLength(steps=steps)).chosen)
    (line,) = (line for line in why(found(), RunLength(steps=10 * steps)).chosen if "whole run" in line)
    assert "540.0 days" in line
    assert "there would be 4." in line
    assert "whole run" not in " ".join(why(found()).chosen)


@pytest.mark.parametrize(
    "length", [{}, {"tokens": 1.0, "steps": 1}, {"tokens": 0.0}, {"tokens": math.nan}, {"steps": -1}]
)
def test_what_is_no_length_of_a_run_is_refused(length):
    with pytest.raises(ConfigError, match="run"):
        RunLength(**length)


def test_samples_without_tokens_have_no_run_in_tokens():
    plan = found().plans[0]
    bare = dataclasses.replace(plan, forecast=dataclasses.replace(plan.forecast, tokens_per_sample=None))
    assert whole_run(bare, RunLength(steps=7)).tokens is None
    with pytest.raises(ConfigError, match="no number of tokens"):
        whole_run(bare, RunLength(tokens=1e9))


def test_links_are_the_collectives_of_the_slowest_rank():
    plan = next(plan for plan in found().plans if dict(plan.step.axes).get("tensor") == 8)
    known = {(link.kind, link.axis, link.moment): link for link in links(plan)}
    assert not any(link.between_nodes for link in known.values() if link.axis == "tensor")
    assert all(link.between_nodes for link in known.values() if link.axis == "zero")
    step = every_step(plan)[0]
    alone = sum(seconds_of(step, traffic, plan.forecast.cluster, fitted()) for traffic in step.traffic)
    assert abs(sum(link.seconds for link in links(plan)) / alone - 1) < 1e-9


def test_a_link_is_called_after_the_tier_that_it_waits_for():
    # 8 devices of 50 GB/s carry a node's part of a ring as fast as NVLink the whole; 4 of them do not.
    for per_node, inside in ((8, True), (4, False)):
        cluster = make_cluster("H100", 2 * per_node, per_node)
        plan = FamilyWorkload(parse_family("llama-3-8b"), cluster, 48).plan(Strategy(["fsdp"]))
        ring = next(link for link in links(plan) if link.kind == "reduce_scatter")
        assert ring.between_nodes
        assert ring.bound_inside is inside
        assert ("bound by the links inside" in str(ring)) is inside
        assert plan_entry(plan)["traffic"][links(plan).index(ring)]["bound_inside"] is inside


def test_a_plan_that_logits_make_too_large_names_the_loss_without_them():
    workload = FamilyWorkload(Shape("llama", 4, 512, 8, 2**17, 2**13), find_cluster("h100x4"), 16)
    half = ("amp_native", "bf16")
    zbv = ("pipeline_parallel", {"schedule": "zbv"})  # gradients of the head are there too early for it
    for axes, methods, helps in (
        ({"zero": 4}, ["fsdp"], True),
        ({"tensor": 2, "zero": 2}, ["fsdp", "tensor_parallel"], True),
        ({"pipeline": 2, "zero": 2}, ["zero1", zbv], False),
    ):
        plan = workload.plan(Strategy([("parallel_mode", axes), half, *methods]), 1)
        tight = dataclasses.replace(plan, limit_bytes=plan.needed_bytes - 2**30)
        assert ("module_replace(include=['fused_loss'])" in too_large(tight)) == helps
