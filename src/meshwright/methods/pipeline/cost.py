"""What one rank of a pipeline holds and sends: the ``cost`` of ``pipeline_parallel``."""

from __future__ import annotations

import dataclasses
import functools
import math

from meshwright.cost import Activations, Block, Buffer, Parameter, Stages, Step, Traffic, local_shape
from meshwright.methods.pipeline.schedules import backward_moments, held_at_most


def stage_cost(schedule: str, step: Step) -> Step:
    """The step of the rank ``step.stages.here``: its blocks, its share of what is kept for backward, what it sends."""
    stages = step.stages
    assert stages is not None
    blocks = [_held(block, stages.here) for block in step.blocks]
    lent = [_as_buffer(p) for block in step.blocks for p in block.parameters if stages.here in p.lent_to]
    step = step.replace(
        stages=dataclasses.replace(stages, schedule=schedule),
        blocks=tuple(block for block in blocks if block is not None),
        buffers=(*(b for b in step.buffers if b.on_rank in (None, stages.here)), *lent),
        activations=_kept(schedule, step, stages) if step.activations is not None else None,
        flops=None if step.flops is None else _share(step, step.flops, stages),
        fp8_flops=_share(step, step.fp8_flops, stages) or 0,
        boundaries=tuple(b for b in step.boundaries if b.on_ranks is None or stages.here in b.on_ranks),
    )
    return step.send(
        Traffic("send", "pipeline", _hidden_bytes(step, stages, forward=True), "forward"),
        Traffic("send", "pipeline", _hidden_bytes(step, stages, forward=False), "backward"),
        Traffic("send", "pipeline", _shared_bytes(step), "backward"),
    )


def _share(step: Step, total: int, stages: Stages) -> int | None:
    """This rank's part of operations, by where those of products lie; None where that is not known."""
    if step.activations is None:
        return None if total else 0
    amounts = step.activations.flops_at
    here = sum(size for stage in stages.own for places, size in amounts if stages.has(stage, places))
    return round(total * here / max(sum(size for _, size in amounts), 1))


def _held(block: Block, rank: int) -> Block | None:
    count = block.on_ranks[rank] if block.on_ranks else block.count
    parameters = tuple(p for p in block.parameters if p.trained_on is None or rank in p.trained_on)
    if not count or not (parameters or block.ops):
        return None
    return dataclasses.replace(block, count=count, parameters=parameters)


def _as_buffer(parameter: Parameter) -> Buffer:
    return Buffer(parameter.numel, parameter.itemsize, parameter.floating)


def _kept(schedule: str, step: Step, stages: Stages) -> Activations:
    """Activations of all micro-batches in flight on this rank."""
    known = step.activations
    assert known is not None
    ranks, micro_batches = max(stages.ranks) + 1, step.num_micro_batches
    if schedule != "gpipe":
        micro_batches = min(micro_batches, 2 * ranks)  # no more are in flight after it, and torch's tables are slow
    held = held_at_most(schedule, ranks, len(stages.ranks) // ranks, micro_batches)[stages.here]
    in_flight = tuple(tuple(dict(moment)[stage] for stage in stages.own) for moment in held)
    backward_at = backward_moments(schedule, ranks, len(stages.ranks) // ranks, micro_batches)[stages.here]
    is_last = stages.here == stages.ranks[-1]
    return dataclasses.replace(
        known.cut(tuple(functools.partial(stages.has, stage) for stage in stages.own), in_flight, backward_at),
        loss_bytes=known.loss_bytes if is_last else 0,
        outside_bytes=known.outside_bytes if is_last else 0,
    )


def _hidden_bytes(step: Step, stages: Stages, *, forward: bool) -> int:
    """Hidden states, or their gradients, to the ranks of the neighbouring stages."""
    sent = 0
    for stage, rank in enumerate(stages.ranks):
        to = stage + 1 if forward else stage - 1
        if rank == stages.here and 0 <= to < len(stages.ranks) and stages.ranks[to] != rank:
            sent += (stages.boundary_bytes or 0) * step.num_micro_batches
    return sent


def _shared_bytes(step: Step) -> int:
    """Gradients of parameters that several ranks train: this rank's shards, to each of the others."""
    return sum(
        _largest_shard(step, p) * p.itemsize * (len(p.trained_on) - 1)
        for _, p in step.every_parameter()
        if p.trainable and p.trained_on is not None
    )


def _largest_shard(step: Step, parameter: Parameter) -> int:
    """Elements of the first rank's part of a parameter, which no other's exceeds."""
    shape = [
        size // step.size("tensor") if dim == parameter.tensor_dim else size for dim, size in enumerate(parameter.shape)
    ]
    return math.prod(local_shape(tuple(shape), step.size(step.shard_axis), 0))
