"""Seconds of the optimizer's update: bound by the memory's bandwidth, or by the host that launches its kernels."""

from __future__ import annotations

import math

from meshwright.cost.kernels import Machine
from meshwright.cost.memory import average_bytes, element_bytes, keeps_state, shape_on
from meshwright.cost.step import Step

_FP32_BYTES = 4


def accumulated_bytes(step: Step, *, whole: bool) -> int:
    """Of the gradients that micro-batches add up: whole ones, or this rank's shards."""
    axis = None if whole else step.gradients.axis
    return sum(
        count * math.prod(shape_on(step, parameter, axis)) * element_bytes(parameter, step.gradients.itemsize)
        for count, parameter in step.every_parameter()
        if parameter.trainable
    )


def update_s(step: Step, machine: Machine) -> float:
    """Clips (reads gradients), then reads weights, gradients and state and writes weights and state, each once."""
    moved = 0
    for count, parameter in step.every_parameter():
        if not parameter.trainable:
            continue
        numel = math.prod(shape_on(step, parameter, step.optimizer.axis))
        state = sum(
            math.prod(parameter.shape[dim] for dim in each.dims) * each.itemsize
            for each in parameter.states
            if each.dims and keeps_state(step, parameter, each)
        )
        state = state * numel // max(parameter.numel, 1)
        weight = element_bytes(parameter, step.held_itemsize(parameter))
        master = _FP32_BYTES if step.has_master(parameter) else 0
        gradient = element_bytes(parameter, step.gradients.itemsize)
        moved += count * (2 * state + numel * (2 * (weight + master) + 3 * gradient))
        if step.average is not None:  # reads what was updated, reads and writes the average
            moved += count * (numel * (master or weight) + 2 * average_bytes(step, parameter)) // step.average.every
    return moved / (machine.bytes_per_s * machine.efficiency.update)


def launched_s(step: Step, machine: Machine) -> float:
    """The host's time for operators that the optimizer runs for each parameter by itself."""
    if step.on_cpu:
        return 0.0
    each = sum(
        count * parameter.updating.operators
        for count, parameter in step.every_parameter()
        if parameter.trainable and parameter.updating is not None
    )
    return each * machine.constants.operator_s
