"""Strategies as ATorch's documents write them, through ATorch's door, on fewer ranks."""

import contextlib
import io

import pytest
import torch

import meshwright as mw
from meshwright.compat.atorch import register_replace_pair
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
