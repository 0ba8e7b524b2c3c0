import dataclasses
import itertools
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from meshwright.cost import Calibration, find_cluster, fitted, make_cluster
from meshwright.errors import ConfigError, MeshwrightError, StrategyError
from meshwright.methods.expert.expert_parallel import ExpertParallel
from meshwright.planner.family_workload import FamilyModel, FamilyWorkload
from meshwright.planner.model_shapes import Shape, parse_family
from meshwright.planner.search import choices, default_space, experts_first, search
from meshwright.planner.search.branch_and_bound import Engine
from meshwright.planner.search.search_space import Candidates, divisors_of, offloads, zero_sizes
from meshwright.planner.search.search_state import divided_next, rank_of_plan
from meshwright.planner.strategy_choice import choose, only_configs
from meshwright.strategy import Strategy
from tests.methods import expert_runs

SMALL = Shape("gpt", 8, 1024, 16, 50304, 1024)


def workload(cluster="a100-80x4", batch=16, shape=SMALL, **options):
    return FamilyWorkload(shape, find_cluster(cluster), batch, **options)


def few(subject):
    """A small space, for what does not depend on its size."""
    space = default_space(subject)
    return space.replace(
        sizes={"tensor": space.sizes["tensor"]},
        sharding=choices(None, "fsdp"),
        hybrid=False,
        precision=space.precision[:1],
    )


def quick(subject, **options):
    return search(subject, space=few(subject), **options)


def everything(subject, space, objective="tokens_per_s"):
    """Every candidate of a space, each predicted: what a search must find without looking at all of them."""
    candidates = Candidates(space, subject.world, subject.cluster.devices_per_node, subject.batch_size)
    found = []
    for mesh in candidates.meshes():
        for branch, number in itertools.product(candidates.branches(mesh), candidates.micro_batches(mesh)):
            try:
                plan = subject.plan(branch.strategy(), number)
            except MeshwrightError:
                continue
            if plan.fits:
                found.append(rank_of_plan(plan, objective))
    return sorted(found)


@pytest.mark.parametrize(
    ("limit", "objective"),
    [
        pytest.param(None, "tokens_per_s", marks=pytest.mark.long),
        (4 * 2**30, "tokens_per_s"),
        pytest.param(None, "memory", marks=pytest.mark.long),
    ],
)
def test_a_search_finds_what_looking_at_everything_finds(limit, objective):
    subject = workload(limit_bytes=limit, batch=8)
    space = default_space(subject).replace(
        precision=choices(("amp_native", "bf16")), sharding=choices(None, "zero1", "fsdp"), hybrid=objective == "memory"
    )
    space = space.replace(sizes={axis: space.sizes[axis] for axis in ("tensor", "pipeline")})
    found = search(subject, space=space, top=5, objective=objective, excluded=["offload"])
    best = everything(subject, space, objective)
    assert found.is_complete
    assert found.num_predicted < len(best) / 2
    assert [rank_of_plan(plan, objective)[0] for plan in found.plans] == [rank[0] for rank in best[:5]]
    assert rank_of_plan(found.plans[0], objective)[1] == best[0][1]


def test_a_machine_that_was_measured_bounds_its_own_plans():
    # Bounds of the presets' rates would pass over what is fastest here: 9.5 ms in place of 8.1.
    usual = fitted()
    efficiency = dataclasses.replace(usual.of("A100"), matmul=1.0, attention=1.0)
    constants = dataclasses.replace(usual.constants, in_step=0.2, step_s=1e-5)
    measured = Calibration({"A100": efficiency}, constants)
    subject = FamilyWorkload(Shape("gpt", 8, 1024, 16, 32000, 1024), make_cluster("A100", 8, 4), 32)
    by_cluster = dataclasses.replace(subject, cluster=dataclasses.replace(subject.cluster, calibration=measured))
    excluded = ["checkpoint", "comm", "compile", "context_parallel", "ema", "half", "offload", "sequence_parallel"]
    found = search(by_cluster, top=1, excluded=excluded)
    told = search(dataclasses.replace(subject, calibration=measured), top=1, excluded=excluded)
    assert found.plans[0].forecast.time == told.plans[0].forecast.time
    assert found.num_predicted == told.num_predicted


def test_schedules_that_need_many_micro_batches_are_not_lost():
    subject = workload("a100-80x2", batch=8)
    space = default_space(subject).replace(sharding=choices(None))
    space = space.replace(sizes={"pipeline": (2,)}, axis_methods={"pipeline": choices("pipeline_parallel")})
    for objective in ("tokens_per_s", "memory"):
        found = search(subject, space=space, top=1, objective=objective).plans[0]
        assert found.strategy.get("pipeline_parallel").schedule == "1f1b"


def test_updates_in_host_memory_are_bounded_by_what_they_wait_for():
    # Without that, every micro-batch of every branch that offloads looks as fast as one that does not.
    mixtral = parse_family("mixtral:layers=4,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=32000,experts=8")
    subject = workload("h100x2", batch=8, shape=mixtral, limit_bytes=42 * 2**30)
    space = default_space(subject).replace(offload=offloads())
    space = space.replace(sizes={"tensor": space.sizes["tensor"]}, sharding=choices(None, "fsdp"))
    found = search(subject, space=space, top=3)
    best = everything(subject, space)
    assert [rank_of_plan(plan, "tokens_per_s")[0] for plan in found.plans] == [rank[0] for rank in best[:3]]
    assert found.num_predicted < len(best) / 2


@pytest.mark.long
def test_one_device_too_few_is_told_how_many_would_do():
    shape = parse_family("llama-3-8b")
    subject = FamilyWorkload(shape, find_cluster("h100x1"), 8, limit_bytes=3 * 2**30)
    excluded = ["offload", "comm", "ema", "sequence_parallel"]
    with pytest.raises(StrategyError) as refused:
        search(subject, excluded=excluded)
    enough = int(str(refused.value).partition("take ")[2].partition(" of")[0])
    assert search(subject.on(enough), excluded=excluded, top=1).plans
    with pytest.raises(StrategyError):
        search(subject.on(enough // 2), excluded=excluded, top=1)


def test_the_same_search_finds_the_same_and_says_what_it_passed_over():
    first, again = (search(workload(), top=4, excluded=["compile", "context_parallel"]) for _ in range(2))
    assert [str(plan.strategy) for plan in first.plans] == [str(plan.strategy) for plan in again.plans]
    assert first.refused == again.refused
    reasons = [reason for _, reason in first.refused]
    assert len(reasons) == len(set(reasons)) > 0
    assert all(plan.fits for plan in first.plans)
    assert not any(plan.fits for plan in first.too_large)
    times = [plan.forecast.time.step_time_s for plan in first.plans]
    assert times == pytest.approx(sorted(times), rel=2e-3)


def test_predictions_can_be_few_and_are_told_of():
    most = 40
    with pytest.raises(StrategyError, match="ended before it found"):
        search(workload(), max_predictions=2)
    told = []
    found = search(workload(), max_predictions=most, progress=lambda *numbers: told.append(numbers))
    assert not found.is_complete
    assert found.num_predicted <= most
    assert found.plans
    assert [predicted for predicted, _ in told] == list(range(1, len(told) + 1))


@pytest.mark.parametrize(
    ("included", "excluded"),
    [(["zero1"], ["pipeline_parallel"]), (["checkpoint"], []), (["tensor_parallel"], ["zero1", "zero2", "fsdp"]),
     (["outer"], []), (["fsdp"], ["amp_native"]), (["offload"], []), (["pipeline_parallel", "half"], [])],
)  # fmt: skip
def test_wishes_are_kept(included, excluded):
    found = search(workload("a100-80x16"), included=included, excluded=excluded, top=3, max_predictions=80)
    assert found.plans
    for plan in found.plans:
        assert set(included) <= set(plan.strategy.names)
        assert not set(excluded) & set(plan.strategy.names)


@pytest.mark.parametrize(("cluster", "dtype"), [("v100-32x8", "fp16"), ("a100-80x8", "bf16"), ("cpux2", "bf16")])
def test_included_half_precision_is_what_the_devices_have(cluster, dtype):
    for name in ("amp_native", "half"):
        best = quick(workload(cluster), included=[name], top=1).plans[0]
        assert best.strategy.get(name).dtype == dtype


def test_half_precisions_that_are_included_together_are_half_in_any_order():
    for names in (["half", "amp_native"], ["amp_native", "half"]):
        best = quick(workload(), included=names, top=1).plans[0]
        assert "half" in best.strategy
        assert any("amp_native changes nothing" in notice for notice in best.notices)
    with pytest.raises(StrategyError, match="different precisions"):
        quick(workload(), included=[("half", "fp16"), "amp_native"])


def test_a_number_of_micro_batches_that_is_included_divides_the_batch_or_is_refused_with_it():
    for wish in (("gradient_accumulation", 2), ("pipeline_parallel", {"num_micro_batches": 2})):
        assert quick(workload(), included=[wish], top=1).plans[0].step.num_micro_batches == 2
        with pytest.raises(StrategyError, match=r"16 samples does not divide between .* with 3 micro-batches each"):
            quick(workload(), included=[(wish[0], {"num_micro_batches": 3})])


def test_keys_of_what_is_included_stay_and_the_search_decides_the_others():
    wishes = [
        ("fsdp", {"forward_prefetch": False}), ("pipeline_parallel", {"schedule": "gpipe"}), ("grad_clip", 0.5),
        ("checkpoint", {"no_reentrant": False}), ("half", "fp16"), ("parallel_mode", {"pipeline": 2, "data": 8}),
    ]  # fmt: skip
    best = quick(workload("a100-80x16"), included=wishes, top=1).plans[0].strategy
    for wish in Strategy(wishes[:-1]).methods:
        assert wish.model_dump(exclude_unset=True).items() <= best.get(wish.method_name).model_dump().items()
    assert dict(best.get("parallel_mode").axes)["pipeline"] == 2


def test_only_what_a_search_decides_of_a_strategy_is_chosen_anew():
    given = Strategy([
        "fsdp", ("grad_clip", 0.5), ("ema", {"decay": 0.99}), ("half", "fp16"),
        ("checkpoint", {"every": 4, "no_reentrant": False}), ("parallel_mode", {"data": 4}),
    ])  # fmt: skip
    best = choose(workload(), **only_configs(workload(), given))[0].strategy
    assert set(best.names) == set(given.names)
    assert all(best.get(name) == given.get(name) for name in ("fsdp", "grad_clip", "ema", "half"))
    assert best.get("checkpoint").no_reentrant is False
    assert best.get("checkpoint") != given.get("checkpoint")


def test_fp8_is_used_where_it_is_asked_for_and_the_device_has_it():
    large = FamilyWorkload(Shape("llama", 8, 8192, 64, 32000, 4096), find_cluster("h100x4"), 4, "bf16")
    plain, eight = (quick(large, included=names, top=1).plans[0] for names in ([], ["fp8"]))
    assert "fp8" not in plain.strategy
    assert eight.forecast.time.compute_s < plain.forecast.time.compute_s
    with pytest.raises(StrategyError, match="no 8-bit products"):
        quick(workload(), included=["fp8"], top=1)


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"excluded": ["zero"]}, "did you mean 'zero"),
        ({"included": ["zero1"], "excluded": ["zero1"]}, r"included and excluded.*zero1"),
        ({"included": [{"atorch_wrap_cls": "Block"}]}, "not a method"),
        ({"included": ["zero1", "fsdp"]}, "included methods cannot be together: .*zero1"),
        ({"excluded": ["parallel_mode"]}, "No strategy is left"),
        ({"included": ["expert_parallel"]}, "(?s)No strategy can train this model with expert_parallel.*experts"),
    ],
)
def test_wishes_that_contradict_each_other_are_refused(wishes, message):
    with pytest.raises(StrategyError, match=message):
        search(workload(), **wishes)


def test_objectives_are_known_and_have_what_they_need():
    with pytest.raises(ConfigError, match="did you mean 'memory'"):
        search(workload(), objective="memroy")
    cheap, soon, small = (quick(workload(), objective=name, top=1) for name in ("price", "tokens_per_s", "memory"))
    assert cheap.plans[0].strategy == soon.plans[0].strategy
    assert small.plans[0].needed_bytes < soon.plans[0].needed_bytes
    assert cheap.plans[0].forecast.price_per_step > 0


def test_offloading_is_tried_where_nothing_fits_without():
    found = quick(workload(limit_bytes=600 * 2**20), top=1)
    assert "offload" in found.plans[0].strategy


@pytest.mark.parametrize("objective", ["tokens_per_s", "memory"])
def test_a_search_finds_what_looking_at_everything_finds_that_may_offload(objective):
    subject = workload(limit_bytes=1300 * 2**20, cluster="a100x2", batch=8)
    space = few(subject).replace(recompute=choices(None, "checkpoint"))
    found = search(subject, space=space, top=4, objective=objective)
    best = everything(subject, space.replace(offload=((), *offloads())), objective)
    assert found.is_complete
    assert [rank_of_plan(plan, objective)[0] for plan in found.plans] == [rank[0] for rank in best[:4]]


def test_offloading_is_among_the_plans_where_it_is_faster_than_what_fits_without():
    subject = workload(limit_bytes=1500 * 2**20, cluster="a100x2")
    both, without = (quick(subject, excluded=names, top=3) for names in ((), ("offload",)))
    assert "offload" in both.plans[0].strategy
    assert both.plans[0].forecast.time.step_time_s < without.plans[0].forecast.time.step_time_s
    roomy = quick(workload(cluster="a100x2"), top=3)
    assert not any("offload" in plan.strategy for plan in roomy.plans)


@pytest.mark.parametrize(("cluster", "limit_mib"), [("a100x1", 800), ("a100x2", 480)])
def test_parameters_leave_only_where_fsdp2_brings_them_back(cluster, limit_mib):
    plans = quick(workload(limit_bytes=limit_mib * 2**20, cluster=cluster)).plans
    leaving = [plan for plan in plans if "offload" in plan.strategy and plan.strategy.get("offload").parameters]
    assert leaving
    for plan in leaving:
        assert plan.step.shard_axis is not None
        assert plan.step.size("pipeline") == 1


def test_what_is_offloaded_has_to_fit_into_host_memory():
    subject = workload(limit_bytes=600 * 2**20)
    roomy = quick(subject, top=1).plans[0]
    assert 0 < roomy.host_bytes <= roomy.host_limit_bytes
    small = dataclasses.replace(subject.cluster, host_memory_bytes=roomy.host_bytes // 4)
    with pytest.raises(StrategyError, match=r"(?s)of host memory, on each.*offloaded, it needs .* on disk"):
        quick(dataclasses.replace(subject, cluster=small), top=1)


def test_a_cluster_that_is_too_small_is_told_what_binds_and_how_many_would_do():
    subject = workload(limit_bytes=80 * 2**20, cluster="a100x2")
    with pytest.raises(
        StrategyError, match=r"(?s)No strategy fits.*Expected at most 80.*smallest.*holds.*of .*take \d+ of these"
    ):
        quick(subject, top=1)


def test_what_one_samples_logits_take_is_said_where_they_bind():
    subject = workload("h100x2", 1, Shape("llama", 2, 512, 8, 2**17, 2**19))
    with pytest.raises(
        StrategyError, match=r"logits and what the loss makes of them.*module_replace with loss=True"
    ) as refused:
        quick(subject, top=1, excluded=["module_replace"])
    assert "smaller batch" not in str(refused.value)
    assert quick(subject.of_batch(2), top=1).plans[0].fits


def test_bounds_of_logits_rule_out_nothing_that_fits():
    wide = Shape("llama", 4, 512, 8, 2**17, 2**15)
    for limit, objective in ((20 * 2**30, "tokens_per_s"), (None, "memory")):
        subject = workload("h100x4", 4, wide, limit_bytes=limit)
        space = few(subject).replace(sizes={"tensor": (1, 2, 4), "pipeline": (1, 2)})
        expected = everything(subject, space, objective)
        assert expected
        best = search(subject, space=space, objective=objective, top=1, excluded=["offload"]).plans[0]
        assert rank_of_plan(best, objective)[0] == expected[0][0]


def test_a_batch_that_no_devices_share_is_told_what_batches_fit():
    # A prime number: one sample a micro-batch makes more of them than are simulated, and all at once do not fit.
    with pytest.raises(StrategyError, match="take a global_batch of 100000 or 100004, which fits"):
        quick(workload(batch=100003), top=1)


def test_a_long_pipeline_has_an_outline_that_says_the_same():
    subject = workload("h100x16", 64, Shape("gpt", 30, 1024, 16, 50304, 1024))
    for schedule in ("1f1b", "gpipe", "zbv", ("interleaved", 3)):
        keys = (
            {"schedule": schedule}
            if isinstance(schedule, str)
            else {"schedule": "interleaved", "num_stages_per_rank": 3}
        )
        strategy = Strategy([("parallel_mode", {"pipeline": 8, "data": 2}), ("pipeline_parallel", keys)])
        for number in (16, 32):
            whole, outline = subject.plan(strategy, number), subject.outline(strategy, number)
            assert outline.forecast.time == whole.forecast.time
            assert outline.needed_bytes == whole.needed_bytes
            assert whole.fits <= (not subject.is_too_large(strategy, number))


def test_sizes_to_try():
    assert divisors_of(12) == (1, 2, 3, 4, 6, 12)
    assert zero_sizes(8, 1, 8) == (2, 4, 8)
    assert zero_sizes(512, 2, 8) == (4, 16, 64, 256, 512)


def test_no_more_of_the_states_leaves_the_device_than_has_to():
    # Seven billion parameters take 16 bytes each: with a quarter of Adam's states on the host, 24 blocks fit.
    shape = parse_family("llama-2-7b:layers=24,seq=1024")
    best = search(FamilyWorkload(shape, find_cluster("h100x1"), 1), top=1).plans[0]
    assert best.strategy.get("offload").optimizer == 0.25
    assert best.forecast.time.step_time_s < _with_all_states_away(shape)


def _with_all_states_away(shape):
    methods = ["parallel_mode", ("amp_native", "bf16"), ("offload", "optimizer")]
    return FamilyWorkload(shape, find_cluster("h100x1"), 1).plan(Strategy(methods)).forecast.time.step_time_s


def test_experts_of_a_module_are_divided_next():
    """One size, within a node and one that divides all experts; nothing where something else is asked for."""
    space, cluster = default_space(workload()), find_cluster("h100x64")
    subject = SimpleNamespace(model=expert_runs.Net("stacked"), cluster=cluster, world=64)
    number = ExpertParallel.parts_of(subject.model)
    (after,) = divided_next(space, subject, (), ())
    assert number > 1
    assert after.space.sizes["expert"] == (math.gcd(number, 8),)
    assert None not in after.space.sharding
    assert divided_next(space, subject, ("expert_parallel",), ()) == ()
    assert divided_next(space, subject, (), ("fsdp",)) == ()
    assert divided_next(space, SimpleNamespace(model=torch.nn.Linear(2, 2), cluster=cluster, world=64), (), ()) == ()
    assert divided_next(space, workload(), (), ()) == ()


def test_offloading_comes_before_all_that_can_be_tried_with_experts():
    """A search whose time ends in the whole space has looked at what the host saves, which is soon tried."""
    text = "mixtral:layers=16,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=32000,seq=4096,experts=8"
    subject = FamilyWorkload(parse_family(text), find_cluster("h100x8"), 16)
    space, follow_ups = experts_first(default_space(subject), 8, 8)
    seen, run = [], Engine.run

    def noted(self, before=None):
        seen.append((self.candidates.space.offload != ((),), "context" in self.candidates.space.sizes))
        return run(self, before)

    with mock.patch.object(Engine, "run", noted):
        search(subject, space=space, follow_ups=follow_ups, top=1, max_predictions=10)
    assert (True, False) in seen
    assert seen.index((True, False)) < seen.index((False, True))


def test_experts_are_divided_without_being_asked_for():
    cluster = find_cluster("h100x8")
    text = "mixtral:layers=8,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=32000,seq=2048,experts=8"
    model = FamilyModel("moe", parse_family(text))
    subject = model.subject(cluster, 8, 70 * 2**30)
    space, (usual, after) = experts_first(default_space(subject), 8, 8)
    assert space.sizes == {}
    assert usual.space.sizes["expert"] == (2, 4, 8)
    assert set(usual.space.sizes) == {"tensor", "pipeline", "expert"}
    assert not usual.only_better
    assert after.space.sizes["expert"] == (1, 2, 4, 8)
    assert set(after.space.sizes) >= {"context", "sequence"}
    found = search(subject, space=space, follow_ups=[usual, after], limit_s=30)
    assert dict(found.plans[0].step.axes).get("expert", 1) > 1
    dense = default_space(subject)
    assert experts_first(dense, 7, 8) == (dense, ())  # which no number of these devices divides
