"""torch's ``fully_shard`` block by block, with its default settings, in a loop written by hand.

Defaults: weights are gathered and gradients reduced in fp32, blocks are freed after forward, one block is prefetched,
the optimizer and clipping work on DTensors. On GPUs in bf16 both travel in bf16, as whoever trains there has it.
"""

from __future__ import annotations

import torch

# user:
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

# end
from peers.case import Case, Step, loss_func
from peers.device import local_device


def setup(case: Case, variant: str) -> Step:
    # user:
    dist.init_process_group("cpu:gloo,cuda:nccl" if case.device == "cuda" else "gloo")
    device = local_device(case.device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    offload = CPUOffloadPolicy() if case.feature == "offload" else OffloadPolicy()
    kind = torch.bfloat16 if case.precision == "bf16" and case.device == "cuda" else None
    precision = MixedPrecisionPolicy(kind, kind, cast_forward_inputs=False)
    model = case.with_feature(case.build())
    for block in case.blocks(model):
        fully_shard(block, mesh=mesh, offload_policy=offload, mp_policy=precision)
    fully_shard(model, mesh=mesh, offload_policy=offload, mp_policy=precision)
    optim = torch.optim.AdamW(model.parameters(), **case.optim)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optim.zero_grad()
        with case.autocast():
            loss = loss_func(ids, model(ids))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        optim.step()
        return loss.detach()

    # end
    return step
