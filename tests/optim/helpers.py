"""Tiny models, plain and sharded, and runs of them that any layout must reproduce."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from meshwright import runtime

WIDTH, BATCH = 7, 8


class Net(nn.Module):
    """Sizes that do not divide, and a one-element bias: empty shards from 2 ranks on."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 13)
        self.second = nn.Linear(13, 5)
        self.last = nn.Linear(5, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def net(dtype=torch.float32, sharded=False, seed=3):
    torch.manual_seed(seed)
    model = Net().to(dtype)
    if sharded and runtime.world_size() > 1:
        mesh = init_device_mesh("cpu", (runtime.world_size(),), mesh_dim_names=("zero",))
        for layer in (model.first, model.second):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def loss_of(model, step):
    """The mean over this rank's part of a batch that is the same for every world size."""
    batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    part = batch[runtime.rank() :: runtime.world_size()].to(model.first.weight.dtype)
    return (model(part).float() - 1).square().mean()


def train(model, optim, steps=12, start=0, scale=1.0):
    for step in range(start, start + steps):
        optim.zero_grad()
        (loss_of(model, step) * scale).backward()
        if scale == 1.0:
            optim.step()
        else:
            optim.step(scale=scale)
    return whole(model)


def give_gradients(model, step):
    """Gradients that depend on the step alone, laid out like the parameters."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            gradient = distribute_tensor(gradient, mesh, placements, src_data_rank=None)  # equal everywhere
        parameter.grad = gradient


def whole(model):
    """All parameters, gathered, as copies."""
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
