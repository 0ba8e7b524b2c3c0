import pytest

from meshwright import Strategy, StrategyError
from meshwright.cost import Step
from meshwright.methods import Phase, cost_of, cut_step, in_phase_order, resolve
from meshwright.methods.base import Method
from meshwright.methods.mixed_parallel import MixedParallel
from meshwright.strategy.value import METHOD_CONFIGS


def test_a_strategy_without_a_mesh_is_data_parallel():
    resolved = resolve(Strategy(), 4)
    assert resolved.strategy == Strategy([("parallel_mode", {"data": 4})])
    assert resolved.shard_axis is None


@pytest.mark.parametrize(
    ("mesh", "axis"), [({"data": 4}, "data"), ({"zero": 4}, "zero"), ({"zero": 2, "data": 2}, "zero")]
)
def test_what_is_sharded_over(mesh, axis):
    assert resolve(Strategy([("parallel_mode", mesh), "zero2"]), 4).shard_axis == axis


@pytest.mark.parametrize(("level", "method"), [(1, "zero1"), (2, "zero2"), (3, "fsdp")])
def test_a_zero_axis_alone_means_the_global_zero_level(level, method):
    resolved = resolve(Strategy([("parallel_mode", {"zero": 4})]), 4, level)
    assert method in resolved.strategy
    assert any(method in notice for notice in resolved.notices)


def test_amp_beside_half_of_the_same_precision_is_dropped_and_said():
    resolved = resolve(Strategy([("half", "bf16"), ("amp_native", "bf16")]), 1)
    assert "amp_native" not in resolved.strategy
    assert any("dropped" in notice for notice in resolved.notices)


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ([("half", "bf16"), "amp_native"], "different precisions"),
        (["zero2", "fsdp"], "zero2 and fsdp"),
        ([("parallel_mode", {"tensor": 2, "data": 2})], "tensor_parallel"),
        ([("parallel_mode", {"zero": 3})], "multiply to 4"),
        ([("parallel_mode", ([("data", 2)], [0, 1]))], "multiply to 4"),
    ],
)
def test_what_does_not_go_together(methods, said):
    with pytest.raises(StrategyError, match=said):
        resolve(Strategy(methods), 4)


@pytest.mark.parametrize(
    ("batch", "asked", "run", "said"),
    [
        (16, 4, (2, 4), []),
        (24, 16, (1, 16), ["12 samples do not divide into 16 micro-batches of one size: a step runs 16 of 1, 4 of"]),
        (10, 4, (1, 6), ["5 samples do not divide into 4 micro-batches of one size: a step runs 6 of 1, 1 of them"]),
        (12, 4, (1, 6), ["6 samples do not divide into 4 micro-batches of one size: a step runs 6 of 1"]),
    ],
)
def test_micro_batches_of_a_pipeline_are_of_one_size(batch, asked, run, said):
    mesh = [("parallel_mode", {"data": 2, "pipeline": 2}), "pipeline_parallel"]
    cut = cut_step(resolve(Strategy(mesh), 4), asked, batch)
    assert (cut.asked, cut.samples, cut.micro_batches) == (asked, *run)
    assert [any(text in notice for notice in cut.notices) for text in said] == [True] * len(cut.notices)
    by_method = resolve(Strategy([*mesh, ("gradient_accumulation", asked)]), 4)
    step = Step(blocks=(), axes=by_method.axes, num_micro_batches=cut.micro_batches)
    assert cost_of(Strategy([("gradient_accumulation", asked)]), step).num_micro_batches == cut.micro_batches
    assert cut_step(by_method, None, batch) == cut


def test_micro_batches_without_a_pipeline_differ_by_a_sample():
    cut = cut_step(resolve(Strategy(), 2), 4, 12)
    assert (cut.samples, cut.micro_batches, cut.local, cut.notices) == (2, 4, 6, ())


def test_phases_decide_the_order_whatever_is_listed():
    names = [m.method_name for m in in_phase_order(Strategy(["fsdp", "amp_native", "checkpoint", "parallel_mode"]))]
    assert names == ["parallel_mode", "checkpoint", "amp_native", "fsdp"]


def test_every_method_has_both_twins_a_phase_and_a_summary():
    for config in METHOD_CONFIGS.values():
        if issubclass(config, MixedParallel):
            continue  # stands for methods
        assert issubclass(config, Method)
        assert isinstance(config.phase, Phase)
        assert config.summary
        assert not config.__abstractmethods__


@pytest.mark.parametrize("name", ["mixed_parallel", "ds_3d_parallel", "deepspeed_3d_parallel"])
def test_one_name_stands_for_the_methods_of_all_axes(name):
    mesh = ([("tensor", 2), ("pipeline", 2), ("data", 2)], None)
    inside = resolve(Strategy([(name, {"parallel_mode": mesh, "pipe_config": {"chunks": 4}})]), 8)
    assert set(inside.strategy.names) == {"parallel_mode", "tensor_parallel", "pipeline_parallel"}
    assert inside.strategy.get("pipeline_parallel").num_micro_batches == 4
    beside = resolve(Strategy([("parallel_mode", ([("pipeline", 2), ("zero", 2)], None)), name, "fsdp"]), 4)
    assert set(beside.strategy.names) == {"parallel_mode", "pipeline_parallel", "fsdp"}
    for strategy in ([name], [("parallel_mode", mesh), (name, {"parallel_mode": mesh})]):
        with pytest.raises(StrategyError, match=f"{name} needs one mesh"):
            resolve(Strategy(strategy), 8)


SEED = [("tensor", 2), ("pipeline", 2), ("data", 2)]
CONFIG_CLASS = {"base_seed": 1234, "tie_first": True, "tpinfo": None, "custom_patcher": None, "batch_fn": None}


@pytest.mark.parametrize(
    ("written", "world", "axes", "methods"),
    [
        (["parallel_mode"], 16, {"data": 16}, set()),
        ([("parallel_mode", ([("data", 8)], None))], 16, {"data": 16}, set()),
        ([("parallel_mode", ("tensor", 8)), "tensor_parallel"], 8, {"tensor": 8}, {"tensor_parallel"}),
        ([("parallel_mode", [("pipeline", 4)]), "pipeline_parallel"], 4, {"pipeline": 4}, {"pipeline_parallel"}),
        ([("parallel_mode", (SEED, None)), "mixed_parallel"], 16, {"tensor": 2, "pipeline": 2, "data": 4}, None),
        ([("parallel_mode", (SEED, None)), "mixed_parallel"], 4, {"tensor": 2, "pipeline": 2, "data": 1}, None),
        (
            [("parallel_mode", [("tensor", 8), ("pipeline", 2), ("data", 2)]), "mixed_parallel"],
            32, {"tensor": 8, "pipeline": 2, "data": 2}, None,
        ),
        ([("mixed_parallel", {"parallel_mode": (SEED[::-1], None)})], 8, dict(SEED[::-1]), None),
        ([("parallel_mode", (SEED, None)), "ds_3d_parallel"], 8, dict(SEED), None),
        ([("parallel_mode", (SEED, None)), ("deepspeed_3d_parallel", CONFIG_CLASS)], 8, dict(SEED), None),
    ],
)  # fmt: skip
def test_what_the_seed_writes(written, world, axes, methods):
    resolved = resolve(Strategy(written), world)
    assert resolved.axes == tuple(axes.items())
    expected = {"tensor_parallel", "pipeline_parallel"} if methods is None else methods
    assert set(resolved.strategy.names) - {"parallel_mode"} == expected
    inert = [notice for notice in resolved.notices if "changes nothing" in notice]
    assert len(inert) == (2 if "deepspeed_3d_parallel" in str(written) else 0)
