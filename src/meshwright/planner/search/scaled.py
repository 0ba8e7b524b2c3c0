"""A step of one sample as one of several: what is computed and exchanged grows with the samples, parameters do not."""

from __future__ import annotations

import dataclasses

from meshwright.cost import Op, Step, Traffic


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
