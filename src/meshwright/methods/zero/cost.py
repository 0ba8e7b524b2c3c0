"""What sharding costs: the ``cost`` that zero1, zero2 and fsdp share. Its twin is ``engine``."""

from __future__ import annotations

import dataclasses
from typing import Literal

from meshwright.cost import (
    Block,
    CollectiveKind,
    Moment,
    Parameter,
    Placement,
    Step,
    Traffic,
    element_bytes,
    gathered_itemsize,
    names_class,
    padded_bytes,
)
from meshwright.methods.dtypes import itemsize
from meshwright.methods.zero.config import ZeroMethod

Gathers = Literal["once", "twice"]
"""``once``: a step gathers everything once. ``twice``: every micro-batch gathers blocks in forward and in backward."""


def shard_cost(config: ZeroMethod, step: Step, *, gathers: Gathers, reduce_once: bool) -> Step:
    """Twin of :func:`meshwright.methods.zero.engine.shard`.

    Args:
        config: The method's keys.
        step: The step; its ``shard_axis`` is what is sharded over.
        gathers: How often blocks are gathered.
        reduce_once: Whether gradients are reduced once per step instead of once per micro-batch.
    """
    if step.stages is not None:
        gathers, reduce_once = "once", True
    step = _with_precision(config, step)
    step = step.replace(
        blocks=tuple(_marked(config, block) for block in step.blocks),
        parameters=Placement(step.shard_axis, step.parameters.itemsize),
        gradients=Placement(step.shard_axis, step.gradients.itemsize),
        optimizer=Placement(step.shard_axis, step.optimizer.itemsize),
        master=Placement(step.shard_axis) if step.master is not None else None,
        gathered="model" if gathers == "once" else "unit",
        whole_gradients=reduce_once,
    )
    return _with_traffic(step, gathers, reduce_once)


def _with_precision(config: ZeroMethod, step: Step) -> Step:
    asked = config.mixed_precision
    if asked is None:
        return step
    param = itemsize(asked.param_dtype) if asked.param_dtype else step.compute_itemsize
    # FSDP2 reduces in the gathered precision unless told otherwise.
    reduce = itemsize(asked.reduce_dtype) if asked.reduce_dtype else step.reduce_itemsize or param
    return step.replace(compute_itemsize=param, reduce_itemsize=reduce)


def _marked(config: ZeroMethod, block: Block) -> Block:
    """The block with the parameters of ignored classes marked as whole."""

    def marked(parameter: Parameter) -> Parameter:
        ignored = any(names_class(reference, parameter.owners) for reference in config.atorch_ignored_cls)
        return dataclasses.replace(parameter, sharded=parameter.sharded and not ignored)

    return dataclasses.replace(block, parameters=tuple(map(marked, block.parameters)))


def _with_traffic(step: Step, gathers: Gathers, reduce_once: bool) -> Step:
    axis = step.shard_axis or "data"
    micro_batches = step.num_micro_batches
    sharded = [(count, p, name) for name, count, p in _parameters(step) if p.sharded]
    weights = sum(count * padded_bytes(step, p, gathered_itemsize(step, p)) for count, p, _ in sharded)
    inside = sum(
        count * padded_bytes(step, p, gathered_itemsize(step, p)) for count, p, name in sharded if name != "outside"
    )
    reduced = [
        (count * padded_bytes(step, p, element_bytes(p, step.reduce_itemsize)), p.expert is not None)
        for count, p, _ in sharded
        if p.trainable
    ]
    gradients = sum(size for size, _ in reduced)
    experts = sum(size for size, of_expert in reduced if of_expert)
    whole = sum(
        c * p.numel * p.itemsize for _, c, p in _parameters(step) if p.trainable and not p.sharded and p.expert is None
    )
    # Over all axes beside the sharding one at once, where there are several; experts only over data.
    others = ("data", "sequence", "context", "expert")
    beside = next((each for each in others if each != axis and step.size(each) > 1), axis)
    beside_experts = "data" if axis == "zero" else axis
    units = sum(block.count for block in step.blocks)  # each is gathered, and reduced, in one collective
    gathered, reduced_times = 1 if gathers == "once" else micro_batches, 1 if reduce_once else micro_batches
    again = micro_batches if gathers == "twice" else 0
    gathers_each, reduces_each = gathers == "twice", not reduce_once

    def sent(kind: CollectiveKind, size: int, moment: Moment, times: int, *, calls: int, each: bool) -> Traffic:
        return Traffic(kind, axis, size * times, moment, calls=max(calls * times, 1), per_micro_batch=each)

    return step.send(
        sent("all_gather", weights, "forward", gathered, calls=units, each=gathers_each),
        sent("all_gather", inside, "backward", again, calls=units, each=True),
        sent("reduce_scatter", gradients, "backward", reduced_times, calls=units, each=reduces_each),
        Traffic("all_reduce", beside, (gradients - experts) // step.size(axis) if beside != axis else 0, "backward"),
        Traffic("all_reduce", "data", experts // step.size(axis) if beside_experts != axis else 0, "backward"),
        sent("all_reduce", whole, "backward", micro_batches, calls=1, each=True),
    )


def _parameters(step: Step) -> list[tuple[str, int, Parameter]]:
    return [(block.name, block.count, parameter) for block in step.blocks for parameter in block.parameters]
