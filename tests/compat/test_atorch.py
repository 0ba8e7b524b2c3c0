"""Strategies as ATorch's documents write them, through ATorch's door, on fewer ranks."""

import contextlib
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffload

import meshwright as mw
from meshwright.atorch.auto.accelerate import auto_accelerate
from meshwright.atorch.auto.strategy import Strategy
from meshwright.compat import atorch
from meshwright.compat.atorch import register_replace_pair
from meshwright.errors import LaunchError, StrategyError
from tests import tiny
from tests.methods import pipeline_runs as runs
from tests.methods.test_parity import BATCH, OPTIMIZERS, reference

AXES = [("tensor", 2), ("pipeline", 2), ("data", 2)]
ENGINE = {"nstages": 4, "chunks": 4, "pipe_schedule": "Interleaved1F1B", "use_c10d": True, "dynamic_shape": True}
FOUR = {
    "3-D, data adjusted": [("parallel_mode", (AXES, None)), "mixed_parallel"],
    "another order": [("parallel_mode", ([("data", 2), ("pipeline", 2)], None)), "pipeline_parallel"],
    "a list": [("parallel_mode", [("tensor", 2), ("data", 2)]), "tensor_parallel"],
    "the engine's keys": [("mixed_parallel", {"parallel_mode": (AXES, None), "pipe_config": ENGINE})],
    "DeepSpeed's": [("parallel_mode", (AXES[::2] + AXES[1:2], None)), ("deepspeed_3d_parallel", {"base_seed": 1234})],
}
EIGHT = {"3-D": FOUR["3-D, data adjusted"], "DeepSpeed's": [("parallel_mode", (AXES, None)), "ds_3d_parallel"]}

RECOMMENDED = {"forward_prefetch": True, "limit_all_gathers": True, "sync_module_states": True}
FP8 = {"include": None, "exclude": None, "margin": 0, "interval": 1, "fp8_format": "HYBRID", "amax_history_len": 1024,
       "amax_compute_algo": "max", "reduce_amax": True}  # fmt: skip
ONE = {
    "parallel_mode": ["parallel_mode", ("amp_native", "bf16")],
    "amp_native": ["amp_native"],
    "amp_native, bf16": [("amp_native", {"dtype": torch.bfloat16, "skip_if_nonfinite": True})],
    "half": ["half"],
    "half, bf16": [("half", "bf16")],
    "fp8": [("fp8", FP8), "half"],
    "fp8, include": [("fp8", {"include": ("layers",)}), "fsdp", ("checkpoint", ("GPT2Block",))],
    "fp8, exclude": [("fp8", {"exclude": ("lm_head",)}), "amp_native"],
    "module_replace": ["module_replace"],
    "zero1": ["zero1"],
    "zero1, DeepSpeed's": [("zero1", {"use_ds_zero", True})],
    "zero2": ["zero2"],
    "zero2, fairscale's": [("zero2", {"not_use_fsdp", True})],
    "zero2, DeepSpeed's": [("zero2", {"use_ds_zero", True})],
    "fsdp": [("fsdp", {**RECOMMENDED, "atorch_wrap_cls": ("GPT2Block",), "use_orig_params": True})],
    "fsdp, LoRA": [("fsdp", {**RECOMMENDED, "fsdp_wrap_params_outmost": True})],
    "checkpoint": [("checkpoint", ("GPT2Attention", "GPT2MLP"))],
    "checkpoint, reentrant": [
        ("checkpoint", {"wrap_class": ("GPT2Attention", "GPT2MLP"), "no_reentrant": False}),
        ("parallel_mode", ([("data", 8)], None)),
    ],
}
"""Every method of the document that has no axis of its own, with every config that stands there."""


class FasterNorm(torch.nn.LayerNorm):
    """A user's optimised module."""


def steps_of_each(strategies):
    """Two steps of each, on a transformers model: losses, what is printed, and whether the user's module is there."""
    own = {torch.float32, torch.float16, torch.bfloat16}
    register_replace_pair("my_optimized_module", supported_dtypes=own, pair_cls=(torch.nn.LayerNorm, FasterNorm))
    every = {}
    for name, written in strategies.items():
        optim_class, args = OPTIMIZERS["sgd"]
        with contextlib.redirect_stderr(io.StringIO()) as said:
            status, result, _ = mw.auto_accelerate(
                tiny.build("gpt2"), optim_class, tiny.Tokens(), tiny.loss_func, tiny.prepare_for("gpt2"),
                "unpack_dict", args, dataloader_args={"batch_size": BATCH}, load_strategy=written,
            )  # fmt: skip
        assert status, (name, said.getvalue())
        batches = iter(result.dataloader)
        losses = [result.step(next(batches)).loss.item() for _ in range(2)]
        replaced = any(isinstance(module, FasterNorm) for module in result.model.modules())
        every[name] = losses, said.getvalue(), replaced
    return every


SHORT = ("amp_native", "fp8, include", "module_replace", "fsdp", "checkpoint, reentrant")


@pytest.mark.parametrize("names", [SHORT, pytest.param([*ONE], marks=pytest.mark.long)], ids=["some", "all"])
def test_methods_of_the_document_as_it_writes_them(ranks, names):
    first, second = ranks(2).run(steps_of_each, {name: ONE[name] for name in names})
    expected = reference("gpt2", "sgd")[0][:2]
    for name, (losses, said, replaced) in first.items():
        assert losses == second[name][0], name
        assert losses == pytest.approx(
            expected, rel=1e-2 if "half" in str(ONE[name]) or "amp" in str(ONE[name]) else 1e-5
        )
        assert said.count("fp8 is ignored: a CPU has no 8-bit") == name.startswith("fp8"), said
        assert replaced == (name == "module_replace")


def test_a_slip_of_the_document_is_told():
    """It has ``paralle_mode`` in an example."""
    with pytest.raises(mw.StrategyError, match="did you mean 'parallel_mode'"):
        mw.Strategy(["paralle_mode", ("amp_native", "bf16")])


@pytest.mark.parametrize(
    ("method", "instead"),
    [
        ("fsdp2", "name fsdp"), ("native_dynamo", "name compile"), ("auto_ddp", "leave it out"),
        (("zero1", {"use_ds_zero": True, "clip_grad": 1.0}), "grad_clip"),
        (("zero2", {"static_loss_scale": 1.0}), "amp_native and half find"),
        (("sequence_parallel", {"sp_size": 2}), "size of the axis sequence"),
        ("data", "leave it out"), ("tensor", "name tensor_parallel"), ("zero", "name zero1"), ("replica", "outer"),
        ("gradient_accumulation", "write .*num_micro_batches"),
    ],
)  # fmt: skip
def test_what_is_named_otherwise_here_is_told(method, instead):
    with pytest.raises(mw.StrategyError, match=rf"What to do: .*{instead}"):
        mw.Strategy([method])


OFF = [
    ("zero1", {"cpu_offload": False}), ("zero2", {"cpu_offload": None, "static_loss_scale": 0, "clip_grad": 0.0}),
    ("fsdp", {"cpu_offload": CPUOffload(offload_params=False), "use_local_sgd": False, "ignored_modules": []}),
    ("fsdp", {"sharding_strategy": None, "auto_wrap_policy": None, "param_init_fn": None, "device_id": None}),
    ("checkpoint", {"use_te_impl": False, "max_checkpoint_module_num": None, "selective_offload": None}),
    ("fp8", {"use_te": True, "precision_switchable": False, "override_linear_precision": (False, False, False)}),
    ("sequence_parallel", {"sp_size": 1, "module": None, "batch_sp_processing_fn": None}),
    ("tensor_parallel", {"use_fake_mode": False, "replacement_map": None, "tp_ranks": None}),
    ("pipeline_parallel", {"shard_planner": None, "insert_before_modules": []}),
    ("ds_3d_parallel", {"tpinfo": None, "ds_config": {}}),
]  # fmt: skip


@pytest.mark.parametrize("method", OFF)
def test_keys_of_other_engines_that_ask_for_nothing_are_taken(method):
    assert mw.Strategy([method]) == mw.Strategy([method[0]])


@pytest.mark.parametrize(
    "method",
    [
        ("zero1", {"cpu_offload": True}), ("zero2", {"static_loss_scale": 128}), ("fsdp", {"device_id": 0}),
        ("fsdp", {"cpu_offload": CPUOffload(offload_params=True)}), ("fp8", {"use_te": False}),
        ("checkpoint", {"use_te_impl": True}), ("checkpoint", {"max_checkpoint_module_num": 3}),
        ("fp8", {"override_linear_precision": (False, True, False)}), ("tensor_parallel", {"shard_planner": "mip"}),
    ],
)  # fmt: skip
def test_keys_of_other_engines_that_ask_for_something_are_refused(method):
    with pytest.raises(StrategyError, match=rf"{next(iter(method[1]))}.* configures another engine"):
        mw.Strategy([method])


def test_a_strategy_of_the_seed():
    strategy = Strategy()
    strategy.add_opt("zero2")
    strategy.add_opt(("parallel_mode", ([("pipe", 2), ("data", 4)], [0, 2, 1, 3, 4, 5, 6, 7]), False))
    assert strategy.opt_names() == ["zero2", "parallel_mode"]
    assert strategy.get_parallel_mode() == (True, ([("pipeline", 2), ("data", 4)], [0, 2, 1, 3, 4, 5, 6, 7]))
    assert Strategy(["amp_native"]).get_parallel_mode() == (False, None)
    assert Strategy(["parallel_mode"]).get_parallel_mode() == (True, None)
    assert strategy == mw.Strategy(strategy) == pickle.loads(pickle.dumps(strategy))
    assert isinstance(pickle.loads(pickle.dumps(strategy)), Strategy)
    with pytest.raises(StrategyError, match="listed twice"):
        strategy.add_opt("zero2")
    assert len(strategy) == 2


def train_as_the_seed_does(strategy, mode):
    """Ten steps of the seed's own loop on one batch, with groups made beforehand; what the groups say, and losses."""
    assert atorch.init_distributed("gloo", set_cuda_device_using_local_rank=True)
    if mode is not None:
        atorch.create_parallel_group(mode)
    status, result, best = auto_accelerate(
        runs.build("plain"), torch.optim.AdamW, tiny.Tokens(), tiny.loss_func, atorch.data_to_device,
        optim_args={"lr": 1e-2},
        dataloader_args={"batch_size": BATCH}, load_strategy=Strategy(strategy), expand_sample_batch=True,
    )  # fmt: skip
    assert status
    place = atorch.get_data_partition_rank_and_size(), (result.replica, result.num_replicas)
    groups = {name: atorch.parallel_group_and_ranks(name)[1] for name, _ in best.get_parallel_mode()[1][0]}
    losses, device, batch = [], torch.device("cpu"), next(iter(result.dataloader))
    for _ in range(10):
        result.optim.zero_grad()
        inputs = result.prepare_input(batch, device)
        loss = result.loss_func(inputs, result.model(inputs))
        loss.backward()
        atorch.clip_grad_norm(result.model, 1.0)
        result.optim.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / atorch.world_size())
    atorch.destroy_parallel_group()
    return best.opt_names(), place, groups, losses


LOOPS = {
    1: ([("parallel_mode", ([("data", 1)], None)), "zero2"], {"data": [0]}),
    2: (["parallel_mode", ("zero2", {"use_ds_zero": True, "cpu_offload": False})], {"data": [0, 1]}),
    4: ([("parallel_mode", ([("zero", 2), ("data", 2)], None)), "fsdp"], {"zero": [0, 1], "data": [0, 2]}),
}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_seeds_loop_trains_as_one_process_does(ranks, size):
    strategy, groups = LOOPS[size]
    results = ranks(size).run(train_as_the_seed_does, strategy, None if size == 2 else strategy[0][1])
    alone = ranks(1).run(train_as_the_seed_does, *LOOPS[1][:1], None)[0][3]
    assert alone[-1] < alone[0] - 0.1
    for number, (names, place, _, losses) in enumerate(results):
        assert losses == pytest.approx(alone, rel=1e-5)
        assert place == ((number, size),) * 2
        assert set(names) == {each if isinstance(each, str) else each[0] for each in strategy}
    assert results[0][2] == groups


def named_groups():
    """What the functions say of groups of several shapes, and sums over them."""
    said = []
    for config in (
        ([("model", 4)], None),
        ([("pipe", 2), ("data", 2)], None),
        ([("tensor", 2), ("data", 2)], [0, 2, 1, 3]),
        ([("expert", 2)], None, True),
    ):
        atorch.create_parallel_group(config)
        for name, size in config[0]:
            group, ranks = atorch.parallel_group_and_ranks(name)
            own = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(own, group=group)
            assert own == sum(ranks)
            assert atorch.parallel_group_size(name) == len(ranks) == size
            assert ranks[atorch.parallel_rank(name)] == atorch.rank()
            said.append(ranks)
        with pytest.raises(LaunchError, match="of these names already"):
            atorch.create_parallel_group(config)
        atorch.destroy_parallel_group()
        assert atorch.parallel_group("data") is atorch.parallel_rank("data") is None
    for config in (([("data", 3)], None), ([("data", 8)], None, True)):
        with pytest.raises(LaunchError, match="do not multiply"):
            atorch.create_parallel_group(config)
    for bad in (([], None), ([("a", 2), ("a", 2)], None), ([("a", 4)], [0, 1, 2, 2]), ([("a", 0)], None), 3, None):
        with pytest.raises(StrategyError, match="does not describe groups"):
            atorch.create_parallel_group(bad)
    return said


def test_named_groups_are_the_seeds(ranks):
    assert ranks(4).run(named_groups) == [
        [[0, 1, 2, 3], [0, 1], [0, 2], [0, 2], [0, 1], [0, 1]],
        [[0, 1, 2, 3], [0, 1], [1, 3], [1, 3], [0, 1], [0, 1]],
        [[0, 1, 2, 3], [2, 3], [0, 2], [0, 2], [2, 3], [2, 3]],
        [[0, 1, 2, 3], [2, 3], [1, 3], [1, 3], [2, 3], [2, 3]],
    ]


def join_and_leave():
    """Whether groups are gone after the world is."""
    atorch.init_distributed("gloo")
    atorch.create_parallel_group(([("data", atorch.world_size())], None))
    atorch.reset_distributed()
    return dist.is_initialized(), atorch.parallel_group("data"), atorch.local_rank(), atorch.world_size()


def test_reset_distributed_leaves_the_world(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert join_and_leave() == (False, None, 0, 1)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"backend": "gloo", "coworker_num_per_node": 1}, "num_workers"), ({"backend": "accl"}, 'pass "gloo"'),
        pytest.param({}, 'pass "gloo"', marks=pytest.mark.skipif(torch.cuda.is_available(), reason="nccl works")),
    ],
)  # fmt: skip
def test_worlds_of_the_seed_that_are_not_here(arguments, what):
    with pytest.raises(LaunchError, match=what):
        atorch.init_distributed(**arguments)


def test_arguments_of_the_seeds_engine(capsys):
    assert atorch.auto_accelerate(torch.nn.Linear(2, 2), load_strategy=[], meta_init_offload_name="x")[0] is False
    assert "leave it out" in capsys.readouterr().err


def accelerated(strategies):
    """Two steps of each: losses, and the sizes of the axes."""
    every = {}
    for name, written in strategies.items():
        optim_class, args = OPTIMIZERS["sgd"]
        status, result, _ = mw.auto_accelerate(
            runs.build("plain"), optim_class, tiny.Tokens(), tiny.loss_func, optim_args=args,
            dataloader_args={"batch_size": BATCH}, load_strategy=written,
        )  # fmt: skip
        assert status, name
        losses = [result.step(batch).loss.item() for _, batch in zip(range(2), result.dataloader, strict=False)]
        every[name] = losses, dict(result.plan.step.axes)
    return every


def check(results, sizes):
    losses = runs.reference("plain")[0][:2]
    for result in results:
        for name, (own, axes) in result.items():
            assert own == pytest.approx(losses, rel=1e-5), name
            assert axes == sizes[name]


def test_one_axis_as_the_seed_writes_it(ranks):
    one = {"one axis": [("parallel_mode", ("pipeline", 2)), "pipeline_parallel"]}
    check(ranks(2).run(accelerated, one), {"one axis": {"pipeline": 2}})


@pytest.mark.long
def test_strategies_of_the_seed_on_four_ranks(ranks):
    three = {"tensor": 2, "pipeline": 2, "data": 1}
    sizes = {**dict.fromkeys(FOUR, three), "another order": {"data": 2, "pipeline": 2}, "a list": dict(AXES[::2])}
    check(ranks(4).run(accelerated, FOUR), sizes)


@pytest.mark.long
def test_strategies_of_the_seed_on_eight_ranks(ranks):
    check(ranks(8).run(accelerated, EIGHT), {name: dict(AXES) for name in EIGHT})
