"""Weights that are written to between two steps stay written, though the optimizer updates copies of them."""

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.optim import GuardedOptimizer, MasterWeights, local_tensor
from meshwright.store import CheckpointStore, TrainingState
from tests import tiny


def loss_func(inputs, output):
    return (output - inputs[:, :3]).square().mean()


def accelerate(strategy):
    torch.manual_seed(3)
    job = mw.accelerate(
        tiny.Mlp(), torch.optim.AdamW, None, loss_func, strategy=strategy, optim_args={"lr": 1e-4},
        sample_batch=torch.randn(4, 7),
    )  # fmt: skip
    job.step(torch.randn(4, 7))
    return job


@torch.no_grad()
def fill(job, value, *, shards=False):
    for parameter in job.model.parameters():
        (local_tensor(parameter).detach() if shards else parameter).fill_(value)


def farthest(job, value):
    """From a value, of all weights of this rank."""
    shards = [local_tensor(parameter).detach().float() for parameter in job.model.parameters()]
    return max(float((shard - value).abs().max()) for shard in shards if shard.numel())


def changed(strategy, folder):
    job, seen = accelerate(strategy), []
    for shards in (False, True):
        fill(job, 0.5, shards=shards)
        job.step(torch.randn(4, 7))
        seen.append(farthest(job, 0.5))
        fill(job, 0.25)
    store, state = CheckpointStore(folder), TrainingState(job.model, job.optim)
    store.save(state)  # with no step between
    fill(job, 0.75)
    store.load(state)
    seen.append(farthest(job, 0.25))
    job.step(torch.randn(4, 7))
    return max(*seen, farthest(job, 0.25))


@pytest.mark.parametrize(
    "strategy",
    [
        ["parallel_mode", ("half", "bf16")],
        ["parallel_mode", ("half", "fp16")],
        ["fsdp", ("half", "bf16")],
        ["fsdp", ("offload", "optimizer")],
        ["fsdp", ("offload", "all")],
        ["parallel_mode", ("offload", "optimizer")],
        ["parallel_mode", ("half", "bf16"), ("offload", "optimizer")],
    ],
    ids=str,
)
def test_weights_that_are_written_to_stay_so(ranks, tmp_path, strategy):
    assert max(ranks(2).run(changed, strategy, tmp_path)) < 5e-3, "steps of 1e-4, rounded to bf16"


def halved():
    """A model in half precision, after a step from which only its masters know what it was."""
    model = nn.Linear(3, 2).bfloat16()
    masters = MasterWeights(model.parameters())
    optim = GuardedOptimizer(
        masters.optimizer(torch.optim.SGD, [{"params": model.parameters(), "lr": 1e-5}]), master=masters
    )
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optim.step()
    return model, masters, optim


def test_what_was_not_written_to_keeps_its_fp32_bits():
    model, masters, _ = halved()
    fine = masters.of[model.weight].clone()
    with torch.no_grad():
        model.weight[0].fill_(0.5)
        model.bias.data = torch.full_like(model.bias, 0.25)  # another tensor
    masters.take_changes()
    assert torch.equal(masters.of[model.weight][0], torch.full((3,), 0.5))
    assert torch.equal(masters.of[model.weight][1], fine[1])
    assert torch.equal(masters.of[model.bias], torch.full((2,), 0.25))
    assert not torch.equal(fine, fine.bfloat16().float()), "the masters are finer than the weights"


def test_steps_alone_are_no_changes(monkeypatch):
    model, _, optim = halved()
    taken = []
    monkeypatch.setattr("meshwright.optim.mixed_precision.take_over", lambda *pair: taken.append(pair))
    for _ in range(2):
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        optim.step()
        optim.load_state_dict(optim.state_dict())
    assert not taken


def test_loading_a_state_keeps_what_was_written():
    model, _, optim = halved()
    with torch.no_grad():
        model.weight.fill_(0.5)
    optim.load_state_dict(optim.state_dict())
    assert torch.equal(model.weight, torch.full_like(model.weight, 0.5))
