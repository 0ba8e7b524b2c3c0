"""Lightning Fabric: its DDP, and its ModelParallelStrategy with ``fully_shard`` block by block (``fsdp2``).

Its FSDPStrategy is torch's first FSDP and refuses to run on CPUs.
"""

from __future__ import annotations

import os

import torch

# user:
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

# end
from peers.case import Case, Step, loss_func


def setup(case: Case, variant: str) -> Step:
    world = int(os.environ["WORLD_SIZE"])

    # user:
    def shard(model: torch.nn.Module, device_mesh: torch.distributed.DeviceMesh) -> torch.nn.Module:
        mesh = device_mesh["data_parallel"]
        for block in case.blocks(model):
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    sharded = ModelParallelStrategy(shard, data_parallel_size=world, tensor_parallel_size=1)
    fabric = Fabric(
        accelerator=case.device,
        devices=world,
        strategy="ddp" if variant == "ddp" else sharded,
        precision="bf16-mixed" if case.precision == "bf16" else "32-true",
    )
    fabric.launch()
    model = fabric.setup_module(case.with_feature(case.build()))
    optim = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), **case.optim))

    def step(ids: torch.Tensor) -> torch.Tensor:
        optim.zero_grad()
        with fabric.autocast():
            loss = loss_func(ids, model(ids))
        fabric.backward(loss)
        fabric.clip_gradients(model, optim, max_norm=case.max_norm)
        optim.step()
        return loss.detach()

    # end
    return step
