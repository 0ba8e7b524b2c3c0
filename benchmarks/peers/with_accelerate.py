"""Hugging Face Accelerate, with its default: DistributedDataParallel."""

from __future__ import annotations

import torch

# user:
from accelerate import Accelerator

# end
from peers.case import Case, Step, loss_func


def setup(case: Case, variant: str) -> Step:
    # user:
    accelerator = Accelerator(cpu=case.device == "cpu", mixed_precision="bf16" if case.precision == "bf16" else "no")
    model = case.with_feature(case.build())
    model, optim = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), **case.optim))

    def step(ids: torch.Tensor) -> torch.Tensor:
        optim.zero_grad()
        with accelerator.autocast():
            loss = loss_func(ids, model(ids))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), case.max_norm)
        optim.step()
        return loss.detach()

    # end
    return step
