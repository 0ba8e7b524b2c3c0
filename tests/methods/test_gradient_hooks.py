"""Hooks on the gradients of parameters do what they do in one process, under methods that replace parameters."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

TENSOR = [("parallel_mode", {"tensor": 2}), "tensor_parallel"]


class Net(nn.Module):
    """Its blocks are such as a tensor axis splits, of sizes that sharding does not divide."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 13), nn.Linear(13, 3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(13, 6), nn.GELU(), nn.Linear(6, 13)) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def built():
    torch.manual_seed(3)
    return Net()


def batches():
    made = torch.Generator().manual_seed(5)
    return [(torch.randn(8, 7, generator=made), torch.randn(8, 3, generator=made)) for _ in range(10)]


def scale(gradient):
    return gradient * 0.25


def halve(parameter):
    parameter.grad.mul_(0.5)


def hook(model):
    """One for good, one until its handle, which is returned, is removed, and one that sees the finished gradient."""
    named = {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}
    named["first.weight"].register_hook(scale)
    named["last.bias"].register_post_accumulate_grad_hook(halve)
    return named["layers.1.0.weight"].register_hook(scale)


def train(model, optim, handle, rows, loss_of):
    for number, (x, y) in enumerate(batches()):
        if number == 5:
            handle.remove()
        optim.zero_grad()
        loss_of(model(x[rows]), y[rows]).backward()
        optim.step()


def hooked_runs(strategy, before):
    alone, model = built(), built()
    start = {name: parameter.detach().clone() for name, parameter in alone.named_parameters()}
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), hook(alone), slice(None), F.mse_loss)
    handle = hook(model) if before else None
    job = mw.accelerate(
        model, torch.optim.SGD, strategy=strategy, optim_args={"lr": 0.1}, sample_batch=batches()[0][0], batch_size=8
    )
    rows = slice(job.replica, None, job.num_replicas)
    train(job.model, job.optim, handle or hook(job.model), rows, F.mse_loss)
    worst = 0.0
    for name, parameter in job.model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        expected = dict(alone.named_parameters())[name.removeprefix("module.")]
        moved = (expected - start[name.removeprefix("module.")]).norm()
        worst = max(worst, float((whole.detach() - expected).norm() / moved))
    return worst


@pytest.mark.parametrize(
    ("strategy", "before"),
    [
        # Every strategy once, and both orders; all of both in the long run.
        pytest.param(strategy, before, marks=[] if before == (row == 1) else pytest.mark.long)
        for row, strategy in enumerate([["zero2"], ["fsdp", "checkpoint"], TENSOR])
        for before in (True, False)
    ],
    ids=str,
)
def test_hooks_on_gradients_stay(ranks, strategy, before):
    assert max(ranks(2).run(hooked_runs, strategy, before)) < 1e-5
