"""The end of ``pipeline_parallel``'s ``apply``: what its engine must know of the model as all methods have left it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from meshwright.methods.dtypes import torch_dtype
from meshwright.methods.job import Job
from meshwright.methods.pipeline.engine import PipelineEngine
from meshwright.methods.pipeline.gradients import StageGradients
from meshwright.methods.replicas import GradientAverager
from meshwright.optim import Stages


def finish_pipeline(job: Job, engine: PipelineEngine) -> None:
    """Takes the place of :func:`~meshwright.methods.parallel_mode.replicate` where a pipeline runs."""
    assert job.cut is not None
    line = engine.line
    shared = [
        (job.model.get_parameter(item.name), item.trained_on)
        for item in job.cut.outside
        if len(item.trained_on) > 1 and line.rank in item.trained_on
    ]
    engine.finish(job.model, StageGradients(line, shared, _averager(job)), _compute_dtype(job))
    repeated = frozenset(parameter for parameter, ranks in shared if line.rank != ranks[0])
    job.stages = Stages(line.group, job.device, repeated)
    inner = job.micro_batch

    @contextlib.contextmanager
    def micro_batch(is_last: bool) -> Iterator[None]:
        with inner(is_last), engine.micro_batch(is_last):
            yield

    job.micro_batch = micro_batch


def _averager(job: Job) -> GradientAverager | None:
    trains = any(parameter.requires_grad for parameter in job.model.parameters())
    if job.shard_axis is not None or job.num_averaged == 1 or not trains:
        return None
    group = job.flat_mesh("context", "sequence", "data").get_group()
    return GradientAverager(job.model, group, allow_unused=job.find_unused_parameters, in_backward=False)


def _compute_dtype(job: Job) -> torch.dtype | None:
    return torch_dtype(job.precision.compute) if job.precision is not None and job.shard_axis is not None else None
