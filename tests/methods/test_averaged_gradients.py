"""Replicas whose gradients nobody has averaged do not step apart without a word."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshwright as mw


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.last = nn.Linear(7, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.encoder(x).tanh())


def accelerated(strategy):
    torch.manual_seed(0)
    return mw.accelerate(
        Model(), torch.optim.SGD, None, lambda x, out: out.square().mean(), strategy=strategy, optim_args={"lr": 0.1},
        sample_batch=torch.ones(4, 7),
    )  # fmt: skip


def batch(like):
    generator = torch.Generator().manual_seed(mw.rank())
    return torch.randn(4, 7, generator=generator).to(next(like.parameters()).dtype)


def _told(strategy):
    job = accelerated(strategy)
    x = batch(job.model)
    for _ in range(2):
        before = [parameter.detach().clone() for parameter in job.model.parameters()]
        job.optim.zero_grad()
        job.model.encoder(x).float().square().mean().backward()
        with pytest.raises(mw.ModelError, match="gradients of their own") as caught:
            job.optim.step()
        assert caught.value.agreed
        assert all(map(torch.equal, before, job.model.parameters()))
        job.step(x)  # goes on
    job.optim.zero_grad()
    with job.no_sync():  # and nothing after it
        job.model(x).float().square().mean().backward()
    with pytest.raises(mw.ModelError, match="gradients of their own"):
        job.optim.step()


@pytest.mark.parametrize("strategy", [["parallel_mode"], ["parallel_mode", ("half", "bf16")]], ids=str)
def test_a_part_that_runs_alone_is_told_before_weights_change(ranks, strategy):
    ranks(2).run(_told, strategy)


def _allowed():
    job = accelerated(["parallel_mode"])
    x = batch(job.model)
    job.optim.zero_grad()
    job.model.encoder(x).square().mean().backward()
    for parameter in job.model.encoder.parameters():
        dist.all_reduce(parameter.grad)
    job.optim.step()
    job.optim.zero_grad()
    job.optim.step()  # by nothing
    (job.model(x).square().mean() + job.model.encoder(x).square().mean()).backward()
    job.optim.step()
    with torch.no_grad():
        job.model.encoder(x)
    weights = torch.cat([parameter.detach().flatten() for parameter in job.model.parameters()])
    other = weights.clone()
    dist.broadcast(other, src=0)
    assert torch.equal(weights, other)


def test_gradients_that_are_equal_are_stepped_by(ranks):
    ranks(2).run(_allowed)
