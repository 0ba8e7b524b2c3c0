"""A step whose forward or backward failed: nothing of it may reach the next one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from meshwright.methods.job import Job
from meshwright.nn import abandon_units

_SETTLING = "_meshwright_settling"  # in the __dict__ of a DDP: the hook that will


@contextlib.contextmanager
def abandoned_if_it_fails(job: Job, optim: Optimizer | None) -> Iterator[None]:
    """Around forward and backward of a step: an error leaves the job as a loop may go on with it.

    Nothing waits for another rank here: where only this one has failed, its error is to be seen at once.
    """
    if job.same_layers is not None:
        job.same_layers.forget()
    try:
        yield
    except Exception:
        abandon(job, optim)
        raise


def abandon(job: Job, optim: Optimizer | None) -> None:
    """Frees what a failed forward or backward has gathered and its gradients; all engines are ready for the next one.

    Every rank that goes on calls it, having failed at the same place.
    """
    abandon_units(job.model)
    for module in job.model.modules():
        if isinstance(module, DistributedDataParallel):
            _reset(module)
    if job.pipeline is not None:
        job.pipeline.abandon()
    if job.same_layers is not None:
        job.same_layers.forget()
    job.model.zero_grad()
    if optim is not None:
        optim.zero_grad()  # some gradients may be on the host


def _reset(replicas: DistributedDataParallel) -> None:
    """DDP believes until then that the failed pass still reduces, and refuses the next."""
    replicas.reducer._reset_state()
    if _SETTLING not in replicas.__dict__:
        replicas.__dict__[_SETTLING] = replicas.register_forward_pre_hook(_settle)


def _settle(replicas: nn.Module, args: Any) -> None:
    """Waits until no average of the failed pass is under way: the next pass writes where these read and write."""
    assert isinstance(replicas, DistributedDataParallel)
    if torch.is_grad_enabled():  # all ranks are here
        replicas.__dict__.pop(_SETTLING).remove()
        dist.barrier(replicas.process_group)
