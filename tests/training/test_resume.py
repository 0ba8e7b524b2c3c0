"""Stop, and go on elsewhere: other ranks, another strategy, the same losses."""

import pytest
import torch

import meshwright as mw
from meshwright.data import GlobalOrder
from meshwright.store import CheckpointStore, TrainingState
from tests import tiny

STOP, MORE, BATCH = 5, 10, 8


def run(name, strategy, optimizer, directory, first, last):
    """Trains steps ``first`` to ``last`` of one run, between two checkpoints."""
    data = tiny.Tokens(50)  # two and a half epochs: the order has to be right across their borders
    order = GlobalOrder(len(data), seed=3)
    optim_func, args = {
        "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        "adamw": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    }[optimizer]
    result = mw.accelerate(
        tiny.build(name, seed=3 if first == 1 else 99), optim_func, data, tiny.loss_func, strategy=strategy,
        optim_args=args, prepare_input=tiny.prepare_for(name), model_input_format=tiny.input_format(name),
        dataloader_args={"batch_size": BATCH, "sampler": order}, max_grad_norm=1.0,
        lr_scheduler_cls=torch.optim.lr_scheduler.StepLR, lr_scheduler_args={"step_size": 4, "gamma": 0.5},
    )  # fmt: skip
    state = TrainingState(result.model, result.optim, result.lr_scheduler, strategy=result.strategy.to_json())
    store = CheckpointStore(directory)
    if first > 1:
        info = store.load(state)
        assert (info.step, state.step, state.samples_seen) == (first - 1, first - 1, (first - 1) * BATCH)
        order.start = state.samples_seen
    losses = []
    for _, batch in zip(range(first, last + 1), result.dataloader, strict=False):
        losses.append(result.step(batch).loss.item())
        state.step += 1
        state.samples_seen += BATCH
    store.save(state)
    return losses


HSDP = ["fsdp", ("parallel_mode", {"zero": 2, "data": 2})]


@pytest.mark.parametrize(
    ("name", "before", "after", "optimizer"),
    [
        pytest.param("plain", (4, ["fsdp"]), (2, []), "sgd", marks=pytest.mark.long),
        pytest.param("plain", (4, ["fsdp"]), (2, []), "adamw", marks=pytest.mark.long),
        ("gpt2", (4, ["fsdp"]), (2, ["zero2", "checkpoint"]), "adamw"),
        pytest.param("llama", (4, HSDP), (1, []), "sgd", marks=pytest.mark.long),
        pytest.param("bert", (2, []), (4, ["fsdp"]), "adamw", marks=pytest.mark.long),
        ("plain", (2, [("half", "bf16")]), (2, ["fsdp"]), "sgd"),
        pytest.param("plain", (2, [("half", "bf16")]), (2, ["fsdp"]), "adamw", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_run_goes_on_elsewhere_as_if_it_had_not_stopped(ranks, tmp_path, name, before, after, optimizer):
    half = "half" in str(before)
    whole = ranks(1).run(run, name, [], optimizer, tmp_path / "whole", 1, STOP + MORE)[0]
    first = ranks(before[0]).run(run, name, before[1], optimizer, tmp_path / "run", 1, STOP)[0]
    then = ranks(after[0]).run(run, name, after[1], optimizer, tmp_path / "run", STOP + 1, STOP + MORE)
    assert first == pytest.approx(whole[:STOP], rel=1e-2 if half else 1e-5)
    assert all(losses == then[0] for losses in then)
    assert then[0] == pytest.approx(whole[STOP:], rel=1e-2 if half else 1e-5)
