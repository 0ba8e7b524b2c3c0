"""Within the error of predictions the simpler plan comes first, and one plan stands for each family."""

import contextlib
import itertools
import math
from types import SimpleNamespace

import pytest
from torch import nn

from meshwright.cost import find_cluster
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.methods import Compile
from meshwright.planner import FamilyWorkload, PlanRequest, parse_family
from meshwright.planner.family_workload import FamilyModel
from meshwright.planner.plans import usable_bytes
from meshwright.planner.search import default_space, read_constraints, search
from meshwright.planner.search.constraints import constrained
from meshwright.planner.search.search_space import (
    LONE_SHARDS,
    MODEL_ERROR,
    MOST,
    Candidates,
    family_of,
    methods_surcharge,
    offloads,
    surcharge,
    trained_share,
)
from meshwright.planner.search.search_state import rank_of_plan
from meshwright.planner.search.within_time import TimeLimit
from meshwright.strategy import Strategy
from tests.planner.search.test_search import workload


def request(model="llama-3-1b:seq=2048", cluster="a100-40x8", batch=32, **options):
    return PlanRequest(FamilyModel(model, parse_family(model)), find_cluster(cluster), batch, **options)


def test_surcharges_of_methods_that_published_runs_use_stay_within_the_error():
    common = Strategy([("tensor_parallel", {"sequence": True}), "pipeline_parallel", "context_parallel", "fsdp"])
    assert 0 < methods_surcharge(common.methods) <= MODEL_ERROR + 1e-12
    assert methods_surcharge(Strategy(["fsdp", "checkpoint"]).methods) == 0
    every = Strategy([*common.methods, ("offload", {"activations": 1.0})])
    assert methods_surcharge(every.methods) <= MOST


def test_a_fuller_device_counts_a_little():
    subject = workload()
    whole, half = (subject.plan(Strategy(["fsdp"]), parts) for parts in (1, 4))
    assert whole.needed_bytes > half.needed_bytes
    assert surcharge(whole) > surcharge(half) > 0


def test_the_best_of_each_family_is_what_looking_at_everything_finds():
    subject = workload(batch=8)
    space = default_space(subject).replace(hybrid=False)
    sizes = {axis: space.sizes[axis] for axis in ("tensor", "pipeline")}
    space = space.replace(sizes=sizes, precision=space.precision[:1], recompute=space.recompute[:2])
    found = search(subject, space=space, top=10, reach=1.2, excluded=["offload"])
    best = {}
    candidates = Candidates(space, subject.world, subject.cluster.devices_per_node, subject.batch_size)
    for mesh in candidates.meshes():
        for branch, number in itertools.product(candidates.branches(mesh), candidates.micro_batches(mesh)):
            with contextlib.suppress(MeshwrightError):
                plan = subject.plan(branch.strategy(), number)
                figure = rank_of_plan(plan, "tokens_per_s")[0]
                if plan.fits:
                    best[branch.family] = min(figure, best.get(branch.family, math.inf))
    within = sorted(figure for figure in best.values() if figure <= 1.2 * min(best.values()))
    assert [rank_of_plan(plan, "tokens_per_s")[0] for plan in found.plans] == within[:10]
    families = [family_of(plan.step.axes, plan.strategy.methods) for plan in found.plans]
    assert len(set(families)) == len(families) > 1


def test_a_single_rank_is_sharded_where_memory_is_short_and_that_is_worth_it():
    # Autocast keeps all weights that it has cast; FSDP2 has those of two blocks.
    found = request("llama-3-3b:seq=2048", "a100-80x1", 16, top=4).found()
    shards = [plan.step.shard_axis is not None for plan in found.plans]
    assert shards == [False, True]  # a little faster, and not expected
    assert all(plan.step.offloaded is None for plan in found.plans)
    simple, sharded = found.plans
    assert surcharge(sharded) - surcharge(simple) == pytest.approx(LONE_SHARDS, abs=0.01)
    roomy = request("llama-3-1b:seq=2048", "h200x1", 4, top=4).found()
    assert [plan.step.shard_axis for plan in roomy.plans] == [None]


def test_states_of_adapters_stay_where_they_are():
    (every,) = {len(offloads(8)), len(offloads(8, trained=0.5))}
    few = [choice[0] for choice in offloads(8, trained=0.01)]
    assert 0 < len(few) < every
    assert all(method.parameters or method.activations for method in few)
    module = nn.Sequential(nn.Linear(30, 30, bias=False), nn.Linear(30, 10, bias=False))
    assert trained_share(SimpleNamespace(model=module)) == 1.0
    module[0].requires_grad_(False)
    assert trained_share(SimpleNamespace(model=module)) == 0.25


def test_a_search_leaves_headroom_and_what_is_given_is_taken_as_it_is():
    usable = usable_bytes(find_cluster("a100-40x8").device)
    few = {"top": 1, "excluded": ["compile", "context_parallel", "pipeline_parallel", "tensor_parallel"]}
    found = request(**few).found()
    assert found.plans[0].limit_bytes == round(0.94 * usable)
    assert request(**few, headroom=0.0).found().plans[0].limit_bytes == usable
    assert request(strategy=["fsdp"]).found().plans[0].limit_bytes == usable
    assert request(**few, memory_limit="30 GiB").found().plans[0].limit_bytes == 30 * 2**30
    for options in ({"headroom": 1.0}, {"headroom": -0.1}, {"limit_s": 0}):
        with pytest.raises(ConfigError, match=r"headroom|limit_s"):
            request(**options)


def test_blocks_are_compiled_where_that_is_worth_it_and_nobody_decided_otherwise():
    axes = ["context_parallel", "pipeline_parallel", "sequence_parallel"]  # of no plan here is any
    best = request(top=1, excluded=axes).found().plans[0]
    assert "compile" in best.strategy
    eager = request(top=1, excluded=["compile", *axes]).found().plans[0]
    assert "compile" not in eager.strategy
    assert rank_of_plan(best, "tokens_per_s")[0] < rank_of_plan(eager, "tokens_per_s")[0]
    # Wide layers spend their time in products, and a GPT's other kernels are few.
    wide = {
        "model": "gpt:layers=8,hidden=8192,heads=64,vocab=50304,seq=2048",
        "cluster": "a100-80x8",
        "batch": 64,
        "excluded": axes[1:],
    }
    large = request(**wide, top=3).found().plans
    assert not any("compile" in each.strategy for each in large)
    fused = request(**wide, top=1, included=["compile"]).found().plans[0]
    assert "compile" in fused.strategy
    gain = large[0].forecast.time.step_time_s / fused.forecast.time.step_time_s
    assert 1 < gain < 1 + Compile.parse(None).surcharge


def test_schedules_that_split_backward_run_it_in_parts():
    subject = workload()
    space = default_space(subject)
    candidates = Candidates(space, subject.world, subject.cluster.devices_per_node, subject.batch_size)
    every = [branch for mesh in itertools.islice(candidates.meshes(), 40) for branch in candidates.branches(mesh)]
    fills = {branch.schedule is not None and branch.schedule.splits_backward for branch in every}
    assert fills == {True, False}
    for branch in every:
        split = branch.schedule is not None and branch.schedule.splits_backward
        assert any(isinstance(each, Compile) for each in branch.methods) is not split
    asked = constrained(space, [], read_constraints([], ["compile"]), subject.world, 8)
    assert len(asked.kernels) == 1


def test_when_the_time_is_up_the_best_so_far_counts_or_an_error_says_so():
    in_time = request(limit_s=1e-9, top=3).found()  # formulas take none
    assert in_time.out_of_time
    assert in_time.plans[0].fits
    least = request(strategy=["fsdp", "checkpoint", "amp_native"], num_micro_batches=4).found().plans[0]
    assert in_time.plans[0].forecast.time.step_time_s <= least.forecast.time.step_time_s
    seen = []
    subject = FamilyWorkload(parse_family("llama-3-8b"), find_cluster("h100x64"), 256)

    class Short(TimeLimit):
        @property
        def is_over(self):
            return len(seen) >= 3

    from meshwright.planner.search import find

    before, find.TimeLimit = find.TimeLimit, Short
    try:
        found = search(subject, progress=lambda *numbers: seen.append(numbers), limit_s=1e9)
    finally:
        find.TimeLimit = before
    assert found.plans
    assert found.out_of_time
    assert not found.is_complete
    found = search(subject, limit_s=1e9, enough_s=1e-9)  # it looks until there is a plan
    assert found.plans
    assert found.out_of_time
