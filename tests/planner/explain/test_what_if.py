"""What-ifs are plans under changed circumstances, and obey the laws of the simulated step."""

import dataclasses
import functools

import pytest

from meshwright.cost import make_cluster
from meshwright.planner import FamilyWorkload, PlanRequest, parse_family
from meshwright.planner.explain import what_if
from meshwright.planner.family_workload import FamilyModel
from meshwright.planner.plan_request import named_model
from meshwright.planner.plans import number
from meshwright.planner.search import Found
from meshwright.planner.workload import Workload
from meshwright.strategy import Strategy
from tests.planner.explain.found import found, subject_of

CLUSTER = make_cluster("H100", 8)


def test_more_never_hurts():
    known = {each.change: each for each in what_if(subject_of, found())}
    more, *others = known
    assert more in ("24 devices instead of 16", "32 devices instead of 16")  # whole nodes, the batch spread evenly
    assert {each for each in others if not each.startswith("--include")} == {
        "twice the batch, 128 samples",
        "links between nodes twice as fast",
        "links inside a node twice as fast",
        "twice the memory on every device",
    }
    changes = [abs(each.speed_up - 1) for each in known.values()]
    assert changes == sorted(changes, reverse=True)  # what changes the answer comes first
    for change, each in known.items():
        assert each.plan.fits
        assert each.speed_up > 1 - 1e-9, change
    assert known[more].plan.forecast.cluster.num_devices > 16
    assert known[more].plan.forecast.samples == 64
    assert 1.2 < known[more].speed_up < 2.1


@pytest.mark.parametrize(("devices", "per_node", "wanted"), [(16, 4, 4), (4, 4, 8), (8, 8, 8), (2, 2, 4)])
def test_more_devices_are_more_of_the_same_nodes(devices, per_node, wanted):
    cluster = make_cluster("H100", devices, per_node)
    assert cluster.resized(2 * devices).devices_per_node == wanted
    subject = FamilyWorkload(parse_family("llama-3-1b"), cluster, 4 * devices)
    plan = subject.plan(Strategy(["fsdp", ("amp_native", "bf16")]))
    every = what_if(
        lambda where, samples: dataclasses.replace(subject, cluster=where, batch_size=samples), Found((plan,))
    )
    more = next(each for each in every if "devices instead of" in each.change)
    assert more.plan.forecast.cluster.devices_per_node == wanted


def test_methods_that_are_used_only_by_name_are_asked_for():
    known = {each.change.split()[1]: each for each in what_if(subject_of, found()) if "--include" in each.change}
    assert {"compile", "half"} <= set(known)
    assert "compile" in known["compile"].plan.strategy
    assert "amp_native" not in known["half"].plan.strategy


@pytest.mark.parametrize(("model", "pads"), [("gpt2", True), ("llama-3-1b", False)])
def test_a_vocabulary_that_products_do_not_divide_is_padded(model, pads):
    others = ("compile", "context_parallel", "half", "offload", "pipeline_parallel", "sequence_parallel")
    request = PlanRequest(named_model(model, 1024), CLUSTER, 64, top=2, excluded=others)
    answer = request.found()
    padded = [each for each in request.what_ifs(answer) if "vocabulary" in each.change]
    assert len(padded) == pads
    for each in padded:
        assert each.change == "the vocabulary padded from 50,257 to 50,304 words"
        assert each.speed_up > 1.1
        assert any(p.shape[:1] == (50304,) for block in each.plan.step.blocks for p in block.parameters)


def test_what_ifs_end_when_the_time_is_up():
    assert len(what_if(subject_of, found(), limit_s=1e-9)) == 1


def test_memory_lets_what_was_too_large_in():
    large = found().too_large[0]
    # Were it the only fast one, more memory would make it the answer.
    slow = found().plans[-1]
    known = {each.change: each for each in what_if(subject_of, Found((slow,), (large,)))}
    roomier = known["twice the memory on every device"]
    # With less recomputed, as that fits, too.
    assert roomier.plan.strategy.without("checkpoint") == large.strategy.without("checkpoint")
    assert "best then: data 16" in roomier.outcome


def test_more_memory_recomputes_less_offloads_nothing_and_takes_larger_micro_batches():
    shape, cluster = parse_family("llama-3-8b:seq=2048"), make_cluster("A100-40", 8)
    subject = FamilyWorkload(shape, cluster, 64, limit_bytes=34 * 2**30)

    def of(where, samples):
        limit = round(subject.limit_bytes * where.device.memory_bytes / subject.cluster.device.memory_bytes)
        return dataclasses.replace(subject, cluster=where, batch_size=samples, limit_bytes=limit)

    tight = Strategy(["fsdp", ("amp_native", "bf16"), "checkpoint", ("offload", {"optimizer": 0.5})])
    plan = subject.plan(tight, 4)
    assert plan.fits
    known = {each.change: each for each in what_if(of, Found((plan,)))}
    roomier = known["twice the memory on every device"]
    assert roomier.speed_up > 1.15
    assert roomier.plan.step.offloaded is None
    assert roomier.plan.fits
    assert known["links inside a node twice as fast"].plan.strategy == plan.strategy
    kept = {each.change: each for each in what_if(of, Found((plan,)), "memory")}
    assert kept["twice the memory on every device"].plan.strategy == plan.strategy


def test_the_best_then_is_the_best_by_the_same_objective():
    small = Found(tuple(sorted(found().plans, key=lambda plan: plan.needed_bytes)))
    known = {each.change: each for each in what_if(subject_of, small, "memory")}
    assert known["twice the memory on every device"].outcome == "no difference"
    links = known["links inside a node twice as fast"]
    assert links.plan.needed_bytes == small.plans[0].needed_bytes
    assert links.plan.strategy == small.plans[0].strategy


def test_twice_the_memory_is_twice_the_limit_that_was_given():
    model, cluster = FamilyModel("1b", parse_family("llama-3-1b:seq=2048")), make_cluster("A100-80", 4)
    request = PlanRequest(model, cluster, 16, strategy=["fsdp", ("amp_native", "bf16")])
    limit = int(0.6 * request.found().plans[0].needed_bytes)
    request = dataclasses.replace(request, memory_limit=limit)
    assert not request.found().plans[0].fits
    known = {each.change: each for each in request.what_ifs(request.found())}
    assert known["twice the memory on every device"].plan.limit_bytes == 2 * limit
    assert known["links inside a node twice as fast"].plan is None


def test_without_a_forecast_there_is_nothing_to_ask():
    assert what_if(subject_of, Found((dataclasses.replace(found().plans[0], forecast=None),))) == ()


@functools.cache
def traced_search():
    pytest.importorskip("transformers")
    text = "llama:layers=4,hidden=1024,heads=8,ffn=2816,vocab=8192,seq=1024"
    axes = ("context_parallel", "pipeline_parallel", "sequence_parallel")  # are left out: the search is quicker
    request = PlanRequest(named_model(text), make_cluster("A100-80", 8), 32, top=3, excluded=axes)
    return request, request.found()


def test_what_ifs_of_a_traced_search_begin_with_what_the_trace_says(monkeypatch):
    """Formulas predict both sides of a change; figures are those of the trace, times what the change is worth."""
    request, found = traced_search()
    best = found.plans[0]
    monkeypatch.setattr(Workload, "plan", None)  # no more traces
    known = {each.change: each for each in request.what_ifs(found)}
    rate = number(best.forecast.tokens_per_s)
    changed = [each for each in known.values() if each.plan is not None and each.outcome != "no difference"]
    assert changed
    assert all(f"tokens/s instead of {rate} (" in each.outcome for each in changed)
    assert any(each.change == "without compile" for each in changed)
    for each in changed:
        stated = float(each.outcome.split(" a step")[0].split(", ")[-1].removesuffix(" ms")) / 1000
        samples = each.plan.forecast.samples
        wanted = samples / (best.forecast.samples_per_s * each.speed_up)
        assert stated == pytest.approx(wanted, rel=0.01)


def test_a_plan_that_only_formulas_take_for_the_best_is_no_answer_to_a_change():
    request, found = traced_search()
    turned = dataclasses.replace(found, plans=found.plans[::-1])  # as if traces said so
    assert len(turned.plans) > 1
    worst = turned.plans[0].strategy
    links = [each for each in request.what_ifs(turned) if "links" in each.change]
    assert links
    assert all(each.plan.strategy == worst for each in links)
