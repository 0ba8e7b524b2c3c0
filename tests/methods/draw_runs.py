"""A model that draws at random before its blocks, in them and behind them, on the ranks of a pipeline."""

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

MICRO, STEPS = 4, 3


class Noisy(nn.Module):
    """A block with dropout, of which it keeps the masks."""

    def __init__(self, width):
        super().__init__()
        self.linear, self.masks = nn.Linear(width, width), []

    def forward(self, x):
        mask = F.dropout(torch.ones_like(x))
        if torch.is_grad_enabled():
            self.masks.append(tuple(mask.flatten().tolist()))
        return x + self.linear(x) * mask


class Denoiser(nn.Module):
    """Adds noise before its blocks, and is to tell it behind them."""

    def __init__(self, width=6, layers=4):
        super().__init__()
        self.blocks = nn.ModuleList(Noisy(width) for _ in range(layers))
        self.last, self.noises = nn.Linear(width, width), []

    def forward(self, x):
        noise = torch.randn_like(x)
        if torch.is_grad_enabled():
            self.noises.append(tuple(noise.flatten().tolist()))
        x = x + noise
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.last(x), noise)


def draws(schedule, by_hand):
    """All that was drawn before the blocks and in them in three steps, and what comes next."""
    torch.manual_seed(3)
    model = Denoiser()
    strategy = [("parallel_mode", {"pipeline": 2}), ("pipeline_parallel", {"schedule": schedule})]
    job = mw.accelerate(
        model, torch.optim.SGD, None, lambda x, loss: loss + torch.rand(()), strategy=strategy, optim_args={"lr": 0.1},
        num_micro_batches=MICRO, sample_batch=torch.zeros(8, 6),
    )  # fmt: skip
    for _ in range(STEPS):
        batch = torch.rand(8, 6)  # as a collate function might make it
        if by_hand:
            job.loss_func(batch, job.model(batch)).backward()
        else:
            job.step(batch)
    before = torch.get_rng_state()
    job.evaluate(batch)
    assert torch.equal(torch.get_rng_state(), before)
    masks = [mask for block in model.blocks for mask in getattr(block, "masks", ())]
    return model.noises, masks, torch.rand(()).item()
