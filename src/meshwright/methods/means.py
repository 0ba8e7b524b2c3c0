"""Means over the ranks of a job."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.methods.job import Job

STEP_AXES = ("data", "zero", "expert")
"""The axes whose ranks take different samples of one step."""

ALL_AXES = ("replica", *STEP_AXES)
"""With the replicas of ``outer``, which train on their own."""


def mean_over(job: Job, value: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
    """The mean of a tensor over the ranks along these axes; collective."""
    mean = value.detach().clone()
    for axis in axes:
        if job.size(axis) > 1:
            dist.all_reduce(mean, group=job.require_mesh().get_group(axis))
            mean /= job.size(axis)
    return mean
