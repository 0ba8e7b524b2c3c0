"""torch's DistributedDataParallel, with its default settings, in a loop written by hand."""

from __future__ import annotations

import torch

# user:
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# end
from peers.case import Case, Step, loss_func
from peers.device import local_device


def setup(case: Case, variant: str) -> Step:
    # user:
    dist.init_process_group()
    device = local_device(case.device)
    model = DistributedDataParallel(case.with_feature(case.build().to(device)))
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
