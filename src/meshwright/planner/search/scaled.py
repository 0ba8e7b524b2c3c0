"""A step of one sample as one of several, and its parameters alone.

What is computed and exchanged grows with the samples, parameters do not.
"""

from __future__ import annotations

import dataclasses

from meshwright.cost import Block, Op, Parameter, Step, Traffic


def scaled(step: Step, samples: int) -> Step:
    """The same step with a single micro-batch of so many times as many samples.

    Only what blocks wait for is kept of its traffic.
    """
    return step.replace(
        blocks=tuple(dataclasses.replace(b, ops=tuple(_op(op, samples) for op in b.ops)) for b in step.blocks),
        flops=None if step.flops is None else step.flops * samples,
        fp8_flops=step.fp8_flops * samples,
        num_micro_batches=1,
        traffic=tuple(
            _one(each, samples, step.num_micro_batches)
            for each in step.traffic
            if not each.hidden and each.moment != "update"
        ),
    )


def _op(op: Op, samples: int) -> Op:
    if op.kind == "move":
        backward = None if op.backward_bytes is None else op.backward_bytes * samples
        return dataclasses.replace(op, num_bytes=op.num_bytes * samples, backward_bytes=backward)
    if op.kind == "attention" or op.batch > 1:
        return dataclasses.replace(op, batch=op.batch * samples)
    return dataclasses.replace(op, m=op.m * samples)


def _one(traffic: Traffic, samples: int, micro_batches: int) -> Traffic:
    return dataclasses.replace(
        traffic,
        bytes_per_step=traffic.bytes_per_step * samples // micro_batches,
        calls=max(traffic.calls // micro_batches, 1),
    )


def bare_blocks(step: Step, *, merged: bool = True) -> tuple[Block, ...]:
    """The blocks without what they compute; parameters that are treated alike are one where they may be merged.

    What an update holds for a moment is left out: it is not there together with activations, which come on top.
    """
    blocks = (
        dataclasses.replace(
            block, ops=(), parameters=tuple(dataclasses.replace(p, updating=None) for p in block.parameters)
        )
        for block in step.blocks
    )
    return tuple(dataclasses.replace(b, parameters=_merged(b.parameters)) if merged else b for b in blocks)


def _merged(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    alike: dict[Parameter, int] = {}
    for parameter in parameters:
        key = _as_vector(parameter)
        alike[key] = alike.get(key, 0) + parameter.numel
    return tuple(dataclasses.replace(p, shape=(numel,)) if len(p.shape) == 1 else p for p, numel in alike.items())


def _as_vector(parameter: Parameter) -> Parameter:
    """What is left of a parameter when its size is not looked at; states of only some of its dims keep its shape."""
    every = tuple(range(len(parameter.shape)))
    if not parameter.shape or any(state.dims not in (every, ()) for state in parameter.states):
        return parameter
    states = tuple(dataclasses.replace(s, dims=(0,)) if s.dims else s for s in parameter.states)
    return dataclasses.replace(parameter, name="", shape=(1,), states=states, tensor_dim=None, trained_on=None)
