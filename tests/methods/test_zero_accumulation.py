"""Accumulation beside a data axis, where micro-batches use different parameters, trains as one process does."""

import pytest
import torch
from torch import nn

import meshwright as mw

RANKS, MICRO, STEPS = 4, 3, 10
BATCH = torch.randn(STEPS, RANKS * MICRO * 2, 7, generator=torch.Generator().manual_seed(5))


class Block(nn.Module):
    """Two branches of different sizes: of one unit, each micro-batch uses one of them."""

    def __init__(self, other):
        super().__init__()
        self.always = nn.Linear(13, 13)
        self.branches = nn.ModuleList([nn.Linear(13, 13), nn.Sequential(nn.Linear(13, other), nn.Linear(other, 13))])

    def forward(self, x, place):
        return x + torch.tanh(self.always(x)) + torch.tanh(self.branches[place](x))


class Alternating(nn.Module):
    """Runs other heads, branches and blocks in every micro-batch; ``plan`` says which, call by call."""

    def __init__(self, other, plan):
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.layers = nn.ModuleList(Block(other) for _ in range(3))
        self.heads = nn.ModuleList([nn.Linear(13, 3), nn.Linear(13, other), nn.Linear(13, 5)])
        self.__dict__["plan"], self.__dict__["calls"] = plan, 0

    def forward(self, x):
        head, branch, layers = self.plan[self.calls % len(self.plan)]
        self.__dict__["calls"] += torch.is_grad_enabled()
        x = self.first(x)
        for place in layers:
            x = self.layers[place](x, branch)
        return self.heads[head](x)


ALL = (0, 1, 2)
# Heads, branches of a block, and blocks. No one uses the last head; a block may run only in the first micro-batch.
PLANS = {
    "heads": [(0, 0, ALL), (1, 0, ALL), (0, 0, ALL)],
    "branches": [(0, 0, ALL), (0, 1, ALL), (0, 0, ALL), (0, 1, ALL)],
    "blocks": [(0, 0, ALL), (1, 1, (0, 1)), (1, 1, (0, 2))],
    "left_out_at_last": [(0, 0, ALL), (1, 0, (0,)), (1, 1, (0,))],
}


def build(other, plan):
    torch.manual_seed(1)
    return Alternating(other, PLANS[plan])


def loss_func(inputs, output):
    return output.float().square().mean()


def optimizer(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)  # decays what has a gradient, of zeros too


def train(strategy, other, plan):
    job = mw.accelerate(
        build(other, plan), optimizer, None, loss_func, strategy=strategy, batch_size=MICRO * 2,
        num_micro_batches=MICRO, sample_batch=torch.ones(2, 7),
    )  # fmt: skip
    losses = [job.step(batch.chunk(RANKS)[mw.rank()]).loss.item() for batch in BATCH]
    return losses, {name: parameter.full_tensor().detach() for name, parameter in job.model.named_parameters()}


def plain(other, plan):
    model = build(other, plan)
    optim, losses = optimizer(model.parameters()), []
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for batch in BATCH:
        optim.zero_grad()
        parts = [part.chunk(MICRO) for part in batch.chunk(RANKS)]
        total = 0.0
        for index in range(MICRO):  # a micro-batch of all ranks is one call
            loss = loss_func(None, model(torch.cat([part[index] for part in parts]))) / MICRO
            loss.backward()
            total += loss.item()
        optim.step()
        losses.append(total)
    return losses, before, dict(model.named_parameters())


def train_each(cases):
    return [train(*case) for case in cases]


HYBRID = ("parallel_mode", {"data": 2, "zero": 2})


IN_SHORT = (("fsdp", "branches"),)


@pytest.mark.parametrize(
    ("method", "plan"),
    [
        pytest.param(method, plan, marks=() if (method, plan) in IN_SHORT else pytest.mark.long)
        for method in ("fsdp", "zero2")
        for plan in PLANS
    ],
)
def test_micro_batches_that_use_other_parameters_train_as_one_process(ranks, method, plan):
    cases = [([method, HYBRID], other, plan) for other in (3, 11)]
    for every in ranks(RANKS).run(train_each, cases):
        for (losses, weights), (_, other, _) in zip(every, cases, strict=True):
            expected, before, after = plain(other, plan)
            torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
            for name, value in weights.items():
                torch.testing.assert_close(value, after[name], rtol=0, atol=2e-6)
            assert torch.equal(weights["heads.2.weight"], before["heads.2.weight"])
            assert (after["layers.0.always.weight"] - before["layers.0.always.weight"]).abs().max() > 1e-2
