"""Laws of what a caller wishes: plans keep it, and no wish finds what a search without it would have missed."""

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import meshwright as mw
from meshwright.cost import find_cluster
from meshwright.errors import MeshwrightError
from meshwright.nn import bf16_on_cpu
from meshwright.planner import FamilyModel, ModuleModel, PlanRequest, parse_family
from meshwright.planner.search import default_space, read_constraints
from meshwright.planner.search.bounds import Bounds
from meshwright.planner.search.constraints import constrained
from meshwright.planner.search.search_space import Candidates
from meshwright.planner.search.search_state import rank_of_plan
from meshwright.planner.workload import token_batch

FAMILIES = (
    "gpt:layers=4,hidden=256,heads=4,vocab=1000,seq=128",
    "llama:layers=4,hidden=1024,heads=16,vocab=32000,seq=512",
)
METHODS = (
    "amp_native", "checkpoint", "comm", "context_parallel", "ema", "fsdp", "grad_clip", "half", "offload",
    "pipeline_parallel", "sequence_parallel", "skip_nonfinite", "tensor_parallel", "zero1", "zero2",
)  # fmt: skip
TIES = 2e-3  # predictions that differ by less than four digits are ties
QUICK = settings(max_examples=3, deadline=None, derandomize=True)
SOME = st.lists(st.sampled_from(METHODS), max_size=3, unique=True)


@st.composite
def asked(draw):
    """A call of ``plan``, and an objective."""
    cluster = draw(st.sampled_from(["h100x1", "a100-40x2", "v100-16x4", "cpu*2"]))
    wishes = draw(SOME)
    share = draw(st.sampled_from([None, 0.002, 0.02, 0.3]))
    memory = find_cluster(cluster).device.memory_bytes
    return {
        "model": draw(st.sampled_from(FAMILIES)),
        "cluster": cluster,
        "global_batch": draw(st.sampled_from([1, 4, 8, 12])),
        "included": wishes,
        "excluded": [name for name in draw(SOME) if name not in wishes],
        "objective": draw(st.sampled_from(["tokens_per_s", "memory"])),
        "memory_limit": None if share is None else round(share * memory),
        "top": draw(st.sampled_from([1, 3])),
    }


def planned(model, cluster, **asked):
    """Plans by the formulas of a family, with which a search finds candidates: what is traced then is only ranked."""
    return PlanRequest(FamilyModel(model, parse_family(model)), find_cluster(cluster), **asked).found().plans


def plans_of(call):
    """The plans; none where there is a reason."""
    try:
        return planned(**call)
    except MeshwrightError:  # anything else is a defect
        return []


def figure(plans, call):
    return rank_of_plan(plans[0], call["objective"])[0] if plans else float("inf")


@QUICK
@given(asked())
def test_plans_keep_what_was_asked_for(call):
    plans = plans_of(call)
    for plan in plans:
        named = set(plan.strategy.names)
        lost = set(call["included"]) - named
        assert lost <= ({"amp_native"} if "half" in named else set())  # which changes nothing beside half
        assert not named & set(call["excluded"])
        assert plan.fits
        assert call["memory_limit"] is None or plan.needed_bytes <= call["memory_limit"]
    ranks = [rank_of_plan(plan, call["objective"]) for plan in plans]
    assert ranks == sorted(ranks)
    assert len(plans) <= call["top"]


@QUICK
@given(asked(), st.sampled_from(METHODS))
def test_no_exclusion_finds_anything_better(call, name):
    if name not in call["included"]:
        less = {**call, "excluded": [*call["excluded"], name]}
        assert figure(plans_of(less), call) >= figure(plans_of(call), call) * (1 - TIES)


@QUICK
@given(asked())
def test_what_the_best_has_and_takes_may_be_asked_for_by_name(call):
    plans = plans_of(call)
    if plans:
        own = [name for name in plans[0].strategy.names if name != "parallel_mode"]
        again = {**call, "included": [*dict.fromkeys([*call["included"], *own])]}
        assert figure(plans_of(again), call) == pytest.approx(figure(plans, call), rel=TIES)
        enough = {**call, "memory_limit": plans[0].needed_bytes}
        assert figure(plans_of(enough), call) == pytest.approx(figure(plans, call), rel=TIES)


def test_how_many_are_asked_for_changes_no_best():
    # A bound that counted what forward gathers beside all that it saves passed over recomputation here.
    excluded = ["pipeline_parallel", "sequence_parallel", "tensor_parallel", "comm", "ema"]  # the best has none of them
    call = {"global_batch": 4, "objective": "memory", "excluded": excluded}
    one, three = (planned("gpt2", "a100x16", top=top, **call)[0] for top in (1, 3))
    assert one.strategy == three.strategy
    assert "checkpoint" in one.strategy


@pytest.mark.long
def test_by_its_name_a_method_is_included_with_any_keys():
    call = {"model": "llama-2-13b", "cluster": "a100-40x2", "global_batch": 32, "top": 1}
    (best,) = planned(**call)
    assert (best.strategy.get("offload").parameters, best.strategy.get("offload").activations) == (1.0, 1.0)
    (again,) = planned(included=["checkpoint", "offload"], **call)
    assert (again.strategy, again.step.num_micro_batches) == (best.strategy, best.step.num_micro_batches)
    (selective,) = planned(included=[("checkpoint", {"policy": "selective"})], **call)
    assert selective.strategy.get("checkpoint").policy == "selective"


def test_what_replaces_modules_is_included_with_the_keys_that_are_tried_or_without_any():
    subject = {"model": "llama:layers=4,hidden=1024,heads=16,vocab=32000,seq=1024", "cluster": "h100x1"}
    call = {**subject, "global_batch": 4, "top": 1}
    (best,) = planned(**call)
    assert best.strategy.get("module_replace").include == ("fused_loss",)
    (again,) = planned(included=["module_replace"], **call)
    assert again.strategy == best.strategy
    (norms,) = planned(included=[("module_replace", {"include": ["norm"]})], **call)
    assert norms.strategy.get("module_replace").include == ("norm",)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Wide(nn.Module):
    """More bytes of weights than of activations: what autocast casts is more than a sample."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(128, 64), nn.Linear(64, 128)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("cluster", "included"),
    [("h100x2", ["ema"]), ("cpu*2", ["amp_native"]), pytest.param("cpu*2", [], marks=pytest.mark.long)],
)
def test_bounds_of_a_module_with_wide_layers_are_not_above_its_plans(cluster, included, monkeypatch):
    # Without such products a CPU treats samples of fewer than 32 rows otherwise, and bounds count from one and two.
    monkeypatch.setattr(bf16_on_cpu, "has_bf16_products", lambda: True)
    where = find_cluster(cluster)
    subject = ModuleModel("wide", Wide(), token_batch(16), seq=16).subject(where, 16, None)
    space = default_space(subject)
    space = space.replace(sizes={"tensor": space.sizes["tensor"]}, recompute=space.recompute[:3], hybrid=False)
    space = constrained(space, (), read_constraints((), included), where.num_devices, where.devices_per_node)
    candidates, bounds, checked = Candidates(space, where.num_devices, 8, 16), Bounds(subject, where), 0
    for mesh in candidates.meshes():
        for branch, parts in itertools.product(candidates.branches(mesh), candidates.micro_batches(mesh)):
            try:
                plan = subject.plan(branch.strategy(), parts)
                bounds.divided(branch)
            except MeshwrightError:
                continue
            samples = 16 // mesh.ranks
            assert bounds.held_bytes(branch, samples // parts, parts) <= plan.needed_bytes * (1 + TIES), plan
            checked += 1
    assert checked > 20


def test_eight_bits_are_planned_for_devices_that_are_not_here():
    asked = {"model": Wide(), "global_batch": 16, "seq": 16}
    (plan,) = mw.plan(cluster="h100x2", strategy=["fsdp", "fp8", ("amp_native", "bf16")], **asked)
    assert "fp8" in plan.strategy
    (plan,) = mw.plan(cluster="a100x2", strategy=["fsdp", "fp8"], **asked)
    assert "fp8" not in plan.strategy
    assert any("A100-80 has no 8-bit" in notice for notice in plan.notices)
    with pytest.raises(mw.StrategyError, match=r"No plan can have fp8.*A100-80 has no 8-bit"):
        mw.plan(cluster="a100x2", included=["fp8"], **asked)
