"""What sharding costs: the ``cost`` that zero1, zero2 and fsdp share. Its twin is ``engine``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

from meshwright.cost import (
    Block,
    Parameter,
    Placement,
    Step,
    Traffic,
    element_bytes,
    gather_traffic,
    gathered_bytes,
    gathered_itemsize,
    names_class,
    padded_bytes,
    reduce_traffic,
    reduced_bytes,
)
from meshwright.methods.dtypes import itemsize
from meshwright.methods.zero.config import ZeroMethod
from meshwright.methods.zero.units import KEPT_IN_HALF

_HALF_BYTES = 2

Gathers = Literal["once", "twice", "nearby"]
"""``once``: a step gathers everything once. ``twice``: every micro-batch gathers blocks in forward and in backward.
``nearby``: in backward over a smaller group of ranks, always in whole numbers."""


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
    beside_wider_buffers = step.compute_itemsize == _HALF_BYTES and step.buffers_itemsize is None
    whole = (KEPT_IN_HALF,) if beside_wider_buffers else ()
    step = step.replace(
        blocks=tuple(_marked(config, block, whole) for block in step.blocks),
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


def _marked(config: ZeroMethod, block: Block, whole: tuple[str, ...]) -> Block:
    """The block with scalars, and the parameters of some classes, marked as whole."""
    references = (*config.atorch_ignored_cls, *whole)

    def marked(parameter: Parameter) -> Parameter:
        indivisible = not parameter.shape or not parameter.numel
        ignored = indivisible or any(names_class(reference, parameter.owners) for reference in references)
        return dataclasses.replace(parameter, sharded=parameter.sharded and not ignored)

    return dataclasses.replace(block, parameters=tuple(map(marked, block.parameters)))


def _with_traffic(step: Step, gathers: Gathers, reduce_once: bool) -> Step:
    axis = step.shard_axis or "data"
    micro_batches = step.num_micro_batches
    trained = [(count, p) for count, p in step.every_parameter() if p.sharded and p.trainable]
    gradients = sum(count * reduced_bytes(step, p) for count, p in trained)
    whole = sum(
        count * p.numel * element_bytes(p, step.held_itemsize(p))
        for count, p in step.every_parameter()
        if p.trainable and not p.sharded and p.expert is None
    )
    units = sum(block.count for block in step.blocks)  # each is reduced in one collective
    reduced = 1 if reduce_once else micro_batches
    step = step.send(
        *_gathers(step, axis, gathers),
        *reduce_traffic(step, axis, gradients * reduced, calls=units * reduced, each=not reduce_once),
        *(_reduced_again(step, axis) if reduce_once else ()),
    )
    step = step.send(*_beside(step, axis, trained))
    return step.send(
        Traffic("all_reduce", axis, whole * micro_batches, "backward", calls=micro_batches, per_micro_batch=True)
    )


def _gathers(step: Step, axis: str, gathers: Gathers) -> tuple[Traffic, ...]:
    """Blocks are gathered as often as they run; one that stays whole is freed by each of its backwards all the same."""
    again, each = gathers != "once", gathers == "twice"
    ahead = [(block, block.count * (block.runs * step.num_micro_batches if again else 1)) for block in step.blocks]
    behind = ahead if again else [(block, block.count * (block.runs - 1)) for block in step.blocks]
    inside = [(block, number) for block, number in behind if block.name != "outside"]
    whole = functools.partial(gathered_bytes, step)
    calls = sum(number for _, number in ahead)
    forward = gather_traffic(step, axis, _sharded_bytes(ahead, whole), "forward", calls=calls, each=each)
    calls = sum(number for _, number in behind)
    if gathers == "nearby":
        size = _sharded_bytes(inside, lambda p: padded_bytes(step, p, gathered_itemsize(step, p)))
        return (*forward, Traffic("all_gather", axis, size, "backward", calls=max(calls, 1), per_micro_batch=True))
    return (*forward, *gather_traffic(step, axis, _sharded_bytes(inside, whole), "backward", calls=calls, each=each))


def _reduced_again(step: Step, axis: str) -> tuple[Traffic, ...]:
    """Blocks that run several times: their first backward reduces what micro-batches have accumulated, apart."""
    blocks = [(block, block.count) for block in step.blocks if block.runs > 1 and step.num_micro_batches > 1]
    size = _sharded_bytes(blocks, lambda p: reduced_bytes(step, p) if p.trainable else 0)
    return reduce_traffic(step, axis, size, calls=sum(number for _, number in blocks))


def _sharded_bytes(times: list[tuple[Block, int]], bytes_of: Callable[[Parameter], int]) -> int:
    return sum(number * bytes_of(p) for block, number in times for p in block.parameters if p.sharded)


def _beside(step: Step, axis: str, trained: list[tuple[int, Parameter]]) -> list[Traffic]:
    """Means of the shards of gradients over all other axes at once, where there are several; experts' over data."""

    def shards(of_experts: bool) -> int:
        return sum(
            count * padded_bytes(step, p, element_bytes(p, step.reduce_itemsize)) // step.size(axis)
            for count, p in trained
            if (p.expert is not None) == of_experts
        )

    others = ("data", "sequence", "context", "expert")
    beside = next((each for each in others if each != axis and step.size(each) > 1), axis)
    return [
        Traffic("all_reduce", beside, shards(False) if beside != axis else 0, "backward"),
        Traffic("all_reduce", "data", shards(True) if axis == "zero" else 0, "backward"),
    ]
