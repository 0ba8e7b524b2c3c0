"""Averaged weights on shards: the same average in every layout, its bytes as the twin says, and in checkpoints."""

import pytest
import torch

import meshwright as mw
from meshwright.cost import memory
from meshwright.planner import measured_state
from meshwright.store import CheckpointStore, TrainingState
from tests import tiny
from tests.methods.pair_runs import build

STEPS, BATCH, SGD = 6, 8, {"lr": 0.1, "momentum": 0.9}
EMA = ("ema", {"decay": 0.9, "every": 2})
LAYOUTS = {
    "data": [EMA],
    "fsdp": ["fsdp", EMA],
    "fsdp on the host": ["fsdp", ("offload", {"parameters": 0.5, "optimizer": 0.8}), EMA],
    "half": [("half", "bf16"), ("ema", {"decay": 0.9, "dtype": "bf16"})],
    "tensor": [("parallel_mode", {"tensor": 2}), "tensor_parallel", EMA],
    "pipeline": [("parallel_mode", {"pipeline": 2}), "pipeline_parallel", EMA],
}


def accelerate(strategy):
    return mw.accelerate(
        build("dense"), torch.optim.SGD, tiny.Tokens(), tiny.loss_func, strategy=strategy, optim_args=SGD,
        dataloader_args={"batch_size": BATCH},
    )  # fmt: skip


def whole(model):
    """This rank's weights, each whole and in the model's own order."""
    inner = getattr(model, "module", model)
    names = {name.removeprefix("module.") for name, _ in model.named_parameters()}
    values = {name: value for name, value in inner.state_dict().items() if name in names}
    return {n: (v.full_tensor() if hasattr(v, "full_tensor") else v).float().clone() for n, v in values.items()}


def state_of(result):
    return TrainingState(result.model, result.optim, result.lr_scheduler)


def follow(names, folder=None):
    """Trains layouts; per layout, weights after every step, the average that the model borrows, and both twins."""
    found = {}
    for name in names:
        result = accelerate(LAYOUTS[name])
        seen = []
        for _, batch in zip(range(STEPS), result.dataloader, strict=False):
            result.step(batch)
            seen.append(whole(result.model))
        held = measured_state(result.model, result.optim)
        step = result.plan.steps[result._job.index("pipeline")] if result.plan.steps else result.plan.step
        predicted = memory(step, result._job.coordinate)
        twins = {key: (held[key], getattr(predicted, key)) for key in ("average", "host_average")}
        kept = result.evaluate(batch)
        with result.ema.weights():
            average, loss = whole(result.model), result.evaluate(batch)
        again = result.evaluate(batch)
        found[name] = seen, average, twins, (kept.item(), loss.item(), again.item())
        if folder is not None and name == "fsdp":
            CheckpointStore(folder).save(state_of(result))
    return found


def go_on(folder, name):
    """Loads the checkpoint in another layout; the average, and that of two steps later."""
    result = accelerate(LAYOUTS[name])
    CheckpointStore(folder).load(state_of(result))
    counts = result.ema.num_steps, result.ema.num_updates
    with result.ema.weights():
        average = whole(result.model)
    batch = next(iter(result.dataloader))
    for _ in range(2):
        result.step(batch)
    with result.ema.weights():
        later = whole(result.model)
    return counts, average, later


def averaged(seen, every=2):
    """By hand."""
    average = None
    for update, weights in enumerate(seen[every - 1 :: every]):
        keep = min(0.9**every, update / (9 + update)) if update else 0.0
        average = {
            name: value if average is None else keep * average[name] + (1 - keep) * value
            for name, value in weights.items()
        }
    return average


def worst(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one)


def test_every_layout_averages_the_same_and_a_checkpoint_takes_it_to_another(ranks, tmp_path):
    outcomes = ranks(2).run(follow, list(LAYOUTS), tmp_path)
    for name in LAYOUTS:
        for seen, average, twins, losses in (each[name] for each in outcomes):
            every = 1 if name == "half" else 2
            assert worst(average, averaged(seen, every)) < (2e-2 if name == "half" else 1e-6), name
            assert worst(average, seen[-1]) > 1e-3  # else nothing was averaged
            assert all(held == predicted for held, predicted in twins.values()), (name, twins)
            assert losses[0] == losses[2] != losses[1], name
    fsdp = outcomes[0]["fsdp"]
    assert fsdp[2]["average"][0] > 0 == fsdp[2]["host_average"][0]
    assert all(size > 0 for size, _ in outcomes[0]["fsdp on the host"][2].values())
    for name, (counts, average, later) in (("tensor", ranks(2).run(go_on, tmp_path, "tensor")[0]),
                                           ("pipeline", ranks(2).run(go_on, tmp_path, "pipeline")[1]),
                                           ("fsdp", ranks(1).run(go_on, tmp_path, "fsdp")[0])):  # fmt: skip
        assert counts == (STEPS, STEPS // 2), name
        assert worst(average, fsdp[1]) == 0.0
        assert worst(later, average) > 1e-4


def without_average(folder):
    """A checkpoint without an average begins a new one; one with an average loads where none is kept."""
    plain = accelerate([])
    batch = next(iter(plain.dataloader))
    plain.step(batch)
    CheckpointStore(folder / "plain").save(state_of(plain))
    with_ema = accelerate([EMA])
    with_ema.step(batch)
    CheckpointStore(folder / "ema").save(state_of(with_ema))
    CheckpointStore(folder / "plain").load(state_of(with_ema))
    CheckpointStore(folder / "ema").load(state_of(accelerate([])))
    with pytest.raises(mw.ConfigError, match="No average of the weights is kept"):
        plain.ema  # noqa: B018
    with pytest.raises(mw.StrategyError, match="ema has no optimizer"):
        mw.accelerate(build("dense"), strategy=[EMA])
    return with_ema.ema.num_steps


def test_checkpoints_with_and_without_an_average(ranks, tmp_path):
    assert ranks(1).run(without_average, tmp_path) == [0]
