"""One small task, trained by plain torch in one process and by a Booster on any number of ranks."""

import contextlib
import itertools

import torch
from torch import nn
from torch.utils.data import TensorDataset

import meshwright as mw
from meshwright.compat.colossalai import Booster
from meshwright.optim import AdamOptimizer
from tests import tiny

SAMPLES, BATCH, STEPS = 80, 8, 10
OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1),
    "own": lambda groups: AdamOptimizer(groups, lr=1e-2),
}


def dataset():
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 7, generator=generator)
    return TensorDataset(inputs, torch.stack([inputs.sum(1), inputs[:, 0].sin(), inputs[:, 1] ** 2], 1))


def build(optimizer="adamw", seed=3, context=None):
    """A plain model, built in a context, an optimizer with two groups over it, and a scheduler over that."""
    torch.manual_seed(seed)
    with context or contextlib.nullcontext():
        model = tiny.Mlp()
    biases = [p for name, p in model.named_parameters() if "bias" in name]
    weights = [p for name, p in model.named_parameters() if "bias" not in name]
    optimizer = OPTIMIZERS[optimizer]([{"params": weights}, {"params": biases, "lr": 0.03}])
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)


def plain_run(optimizer="adamw", clip=None, steps=STEPS):
    model, optim, schedule = build(optimizer)
    inputs, targets = dataset().tensors
    losses = []
    for step in range(steps):
        part = slice(step * BATCH % SAMPLES, step * BATCH % SAMPLES + BATCH)
        optim.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[part]), targets[part])
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optim.step()
        schedule.step()
        losses.append(loss.item())
    return losses, whole(model)


def boosted(plugin, optimizer="adamw", seed=3, context=None, **options):
    booster = Booster(plugin=plugin, **options)
    model, optim, schedule = build(optimizer, seed, context)
    loader = plugin.prepare_dataloader(dataset(), BATCH // mw.world_size())
    return booster, *booster.boost(model, optim, nn.MSELoss(), loader, schedule)


def train(booster, model, optim, criterion, loader, schedule, steps=STEPS, accumulate=1, start=0):
    """``steps`` steps from batch ``start`` on, of the loop that ColossalAI's users write; losses of global batches."""
    losses = []
    for inputs, targets in itertools.islice(loader, start, start + steps):
        parts = list(zip(inputs.chunk(accumulate), targets.chunk(accumulate), strict=True))
        total = torch.zeros(())
        for part, target in parts[:-1]:
            with booster.no_sync(model, optim):
                loss = criterion(model(part), target) / accumulate
                booster.backward(loss, optim)
                total += loss.detach()
        loss = criterion(model(parts[-1][0]), parts[-1][1]) / accumulate
        booster.backward(loss, optim)
        optim.step()
        schedule.step()
        optim.zero_grad()
        losses.append(mw.sum_loss(total + loss.detach()).item())
    return losses


def whole(model):
    return torch.cat(
        [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone().flatten() for p in model.parameters()]
    )


def start():
    return whole(build()[0])
