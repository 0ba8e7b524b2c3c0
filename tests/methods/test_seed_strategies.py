"""Strategies as ATorch's documents write them, through ATorch's door, on fewer ranks."""

import pytest

import meshwright as mw
from tests import tiny
from tests.methods import pipeline_runs as runs
from tests.methods.test_parity import BATCH, OPTIMIZERS

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
