"""What ``fp8`` costs: histories and weights in 8 bits beside the parameters, and gathers of one byte per element."""

from __future__ import annotations

import dataclasses

from meshwright.cost import Buffer, Parameter, Step, Traffic
from meshwright.nn.fp8 import Fp8Options

_BITS = 4  # bytes of an fp32 number, kept as an int32
_AMAX = 3  # of a layer's input, weight and output gradient


def delayed_cost(step: Step, options: Fp8Options, *, reduce_amax: bool) -> Step:
    """Twin of delayed scaling: buffers of every layer, and one all-reduce of all largest values per step."""
    numbers = _AMAX * options.recipe.amax_history_len + 2 * _AMAX + 1  # history, scale, this step's, number of updates
    buffers: list[Buffer] = []
    total = 0
    for count, parameter in step.every_parameter():
        for _ in range(count * parameter.num_fp8):
            total += 1
            buffers.append(Buffer(numbers, _BITS, floating=False))
            if options.keep_weight:
                buffers.append(Buffer(parameter.numel, 1, floating=False))
    step = step.replace(buffers=(*step.buffers, *buffers))
    axis = next((axis for axis in ("data", "zero", "sequence", "tensor") if step.size(axis) > 1), None)
    if not reduce_amax or axis is None:
        return step
    return step.send(Traffic("all_reduce", axis, total * _AMAX * _BITS, "update"))


def gather_cost(step: Step) -> Step:
    """Twin of FSDP2's gathering in 8 bits, and of the all-reduce of all weights' scales after the step."""

    def changed(parameter: Parameter) -> Parameter:
        return dataclasses.replace(parameter, gather_itemsize=1) if parameter.num_fp8 else parameter

    total = sum(count for count, parameter in step.every_parameter() if parameter.num_fp8)
    blocks = [dataclasses.replace(block, parameters=tuple(map(changed, block.parameters))) for block in step.blocks]
    return step.replace(blocks=tuple(blocks)).send(
        Traffic("all_reduce", step.shard_axis or "data", total * _BITS, "update")
    )
