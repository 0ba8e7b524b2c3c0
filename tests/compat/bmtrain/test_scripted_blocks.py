"""Blocks, and lists of them, that call ``torch.jit.script`` functions: from their first calls on, beside torch."""

import pytest
import torch
from torch import nn

import meshwright as bmt
from meshwright import runtime
from meshwright.compat.bmtrain.block import CheckpointBlock
from meshwright.compat.bmtrain.block_list import TransformerBlockList
from meshwright.compat.bmtrain.pipeline_block_list import PipelineTransformerBlockList
from meshwright.runtime.torch_internals.autograd import set_script_profiling
from tests.compat.bmtrain.pipeline_models import stages

DIM, LAYERS, STEPS, PER_RANK = 6, 5, 10, 4


def scripted():
    """A norm and an activation as ModelCenter and CPM-Bee write them, which TorchScript has never run."""
    set_script_profiling(True)

    @torch.jit.script
    def norm(x, weight, eps: float):
        dtype = x.dtype
        variance = x.to(torch.float32).pow(2).mean(dim=-1, keepdim=True)
        return (x * torch.rsqrt(variance + eps)).to(dtype) * weight

    @torch.jit.script
    def act(x):
        return 0.5 * x * (1.0 + torch.tanh(0.79788456 * x * (1.0 + 0.044715 * x * x)))

    return norm, act


class Layer(nn.Module):
    """Calls scripted functions, and ends in one."""

    def __init__(self, norm, act):
        super().__init__()
        self.norm, self.act = norm, act
        self.weight = nn.Parameter(torch.linspace(0.8, 1.2, DIM))
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)

    def forward(self, x):
        return x + self.act(self.down(self.act(self.up(self.norm(x, self.weight, 1e-5)))))


class Model(nn.Module):
    """Calls the norm outside of its blocks as well, once before them and once behind."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(2)
        self.norm, act = scripted()
        made = [Layer(self.norm, act) for _ in range(LAYERS)]
        if kind == "blocks":
            self.layers = nn.Sequential(*map(CheckpointBlock, made))
        elif kind == "list":
            self.layers = TransformerBlockList(made)
        elif kind == "list on two levels":
            self.layers = TransformerBlockList(made, sqrt=True)
        elif kind == "stages":
            self.layers = PipelineTransformerBlockList(made)
        else:
            self.layers = nn.Sequential(*made)

    def forward(self, x):
        ones = torch.ones(DIM)
        return self.norm(self.layers(self.norm(x, ones, 1e-5)), ones, 1e-5)


def batches():
    return torch.randn(STEPS, runtime.world_size() * PER_RANK, DIM, generator=torch.Generator().manual_seed(1))


def loss_of(out):
    return (out * torch.linspace(-1, 1, DIM)).square().mean()


def alone():
    model = Model("plain")
    optim = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for batch in batches():
        optim.zero_grad()
        loss = loss_of(model(batch))
        loss.backward()
        optim.step()
        losses.append(loss.item())
    return losses


def together(kind):
    model = Model(kind)
    optim = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optim)
    losses = []
    for batch in batches():
        manager.zero_grad()
        loss = loss_of(model(batch.chunk(runtime.world_size())[runtime.rank()]))
        manager.backward(loss)
        manager.step()
        losses.append(bmt.sum_loss(loss).item())
    return losses


def trained(kind):
    with stages(2 if kind == "stages" else 1):
        return together(kind), alone()


@pytest.mark.parametrize(
    "kind", ["blocks", pytest.param("list", marks=pytest.mark.long), "list on two levels", "stages"]
)
def test_scripted_functions_in_recomputed_blocks(ranks, kind):
    for losses, expected in ranks(2).run(trained, kind):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert expected[-1] < 0.9 * expected[0]
