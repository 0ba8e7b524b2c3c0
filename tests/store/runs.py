"""Small training runs in every layout, over one global batch; used on the ranks by the tests of the store."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from meshwright import runtime
from meshwright.optim import GuardedOptimizer, MasterWeights
from meshwright.store import CheckpointStore, TrainingState

BATCH = 8


class Net(nn.Module):
    """Uneven shapes, a one-element bias (empty shards), tied weights, a frozen parameter, both kinds of buffer."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(7, 13)  # a name that must not be mistaken for DDP's prefix
        self.norm = nn.LayerNorm(13)
        self.narrow = nn.Linear(13, 1)
        self.down = nn.Linear(13, 7, bias=False)
        self.into = nn.Linear(7, 7, bias=False)
        self.out = nn.Linear(7, 7, bias=False)
        self.out.weight = self.into.weight
        self.frozen = nn.Parameter(torch.rand(7), requires_grad=False)
        self.register_buffer("offset", torch.rand(()))
        self.register_buffer("mask", torch.ones(7), persistent=False)

    def forward(self, x):
        h = torch.tanh(self.norm(self.module(self.into(x))))
        return self.out(self.down(h)) + self.narrow(h) + self.frozen * self.mask + self.offset


def wrap(model, layout):
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout == "fsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (runtime.world_size(),), mesh_dim_names=("zero",)))
    if layout == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "zero")))
    return model


def groups(model, rate):
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [parameter for name, parameter in named if name.endswith("weight")]
    vectors = [parameter for name, parameter in named if not name.endswith("weight")]
    return [{"params": matrices, "lr": rate, "weight_decay": 0.1}, {"params": vectors, "lr": rate / 2}]


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, weight_decay=0.0),
    "fused": lambda params: torch.optim.AdamW(params, weight_decay=0.0, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, momentum=0.9, dampening=0.5),
    "sgd": torch.optim.SGD,
    "adagrad": lambda params: torch.optim.Adagrad(params, lr_decay=0.01, initial_accumulator_value=0.3),
    "rmsprop": lambda params: torch.optim.RMSprop(params, momentum=0.5, centered=True),
    "nadam": torch.optim.NAdam,
    "asgd": lambda params: torch.optim.ASGD(params, t0=2),
}


def build(layout, optimizer="adamw", *, seed=0, dtype=torch.float32, master=False, scaler=False):
    torch.manual_seed(seed)
    model = wrap(Net().to(dtype), layout)
    make, rate = OPTIMIZERS[optimizer], 0.03 * (1 + seed)
    weights = MasterWeights(model.parameters()) if master else None
    optim = weights.optimizer(make, groups(model, rate)) if weights else make(groups(model, rate))
    if weights or scaler:
        scale = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) if scaler else None
        optim = GuardedOptimizer(optim, master=weights, scaler=scale)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optim, milestones=[2, 2, 6 + seed], gamma=0.7)
    return TrainingState(model, optim, scheduler, strategy=f'{{"layout": "{layout}"}}')


def train(state, steps):
    """Trains on: the losses are of the global batch, whatever the layout."""
    dtype = next(state.model.parameters()).dtype
    losses = []
    for _ in range(steps):
        x = torch.randn(BATCH, 7, generator=torch.Generator().manual_seed(state.step)).to(dtype)
        part = x[runtime.rank() :: runtime.world_size()]
        loss = (state.model(part) - part.sin()).float().square().mean()
        scaled = state.optim.scaled(loss) if isinstance(state.optim, GuardedOptimizer) else loss
        scaled.backward()
        state.optim.step()
        state.lr_scheduler.step()
        state.optim.zero_grad()
        losses.append(runtime.sum_loss(loss).item())
        state.step += 1
        state.samples_seen += BATCH
    return losses


def save_and_go_on(directory, layout, **options):
    """Saves at step 3; the next ten losses of the uninterrupted run."""
    state = build(layout, **options)
    train(state, 3)
    CheckpointStore(directory).save(state)
    return train(state, 10)


def load_and_go_on(directory, layout, **options):
    """Loads into a run that began otherwise; its next ten losses."""
    state = build(layout, **{"seed": 1, **options})
    info = CheckpointStore(directory).load(state)
    assert (state.step, state.samples_seen, info.step) == (3, 3 * BATCH, 3)
    return train(state, 10)


def same_everywhere(value):
    """Gathers a value from all ranks; it must be equal."""
    every = [None] * runtime.world_size()
    dist.all_gather_object(every, value)
    assert all(other == value for other in every), every
    return value
