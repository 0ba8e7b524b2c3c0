"""Memory of a published run: the most that one of its ranks holds, as its source counts it, and whether it fits."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from meshwright.cost import Peak, Stages, Step, memory, peak
from meshwright.cost.memory import shape_on, whole_gradients
from meshwright.planner.allocator import CONTEXT_BYTES, FRAGMENTED, FRAGMENTED_BY_LAYERS
from meshwright.planner.published.described import Case

_HALF_BYTES = 2


@dataclass(frozen=True)
class Held:
    """Memory of the rank that holds most.

    Args:
        peak: By class.
        counted_bytes: As the source counts: allocated or reserved, of this rank or of the first.
        needed_bytes: Reserved, with what is lost between tensors and what no tensor can use.
        fits: Whether the device has as much.
    """

    peak: Peak
    counted_bytes: int
    needed_bytes: int
    fits: bool


def held_by(case: Case) -> Held:
    """Predicts the memory of a run: whether its fullest rank fits, and what the rank holds that the source reports."""
    distinct = {id(step): step for step in case.steps}.values()
    every = [_held(case, step) for step in distinct]
    most = max(every, key=lambda held: held.needed_bytes)
    return dataclasses.replace(most, counted_bytes=every[0].counted_bytes) if case.convention.first_rank else most


def _held(case: Case, step: Step) -> Held:
    convention, most, extra = case.convention, peak(step), _beside(case, step)
    gathers_layers = convention.live_bytes > 0 and case.zero_stage == 3
    # Segments that grow are an option of CUDA's drivers: on AMD's devices torch passes over it.
    expandable = convention.expandable and case.cluster.device.efficiency != "MI300X"
    unused = 0.0 if expandable else FRAGMENTED_BY_LAYERS if gathers_layers else FRAGMENTED
    reserved = round((most.reserved_bytes + extra) * (1 + unused))
    counted = reserved if convention.memory == "reserved" else most.allocated_bytes + extra
    needed = reserved + CONTEXT_BYTES
    return Held(most, counted, needed, needed <= case.cluster.device.memory_bytes)


def _beside(case: Case, step: Step) -> int:
    """Bytes of what a source keeps and our methods do not; negative where it keeps less."""
    convention = case.convention
    extra = convention.bucket_bytes
    replicas = math.prod(size for axis, size in step.axes if axis in ("zero", "data"))
    if convention.live_bytes and case.zero_stage == 3:
        # Two layers at once (the one that computes and the one prefetched) with the gradients of one.
        largest = max(p.numel for block in step.blocks for p in block.parameters if block.name != "outside")
        extra += max(convention.live_bytes, 3 * largest * _HALF_BYTES)
    if convention.offloads:
        extra -= memory(step).optimizer
    if convention.ddp_buckets and case.zero_stage < 2 and replicas > 1:
        numel = sum(count * math.prod(shape_on(step, p, None)) for count, p in step.every_parameter() if p.trainable)
        extra += _HALF_BYTES * numel
    if convention.keeps_stages and step.stages is not None:
        extra += _stage_buffers(case, step, step.stages)
    if convention.wide_gradients and step.whole_gradients and step.num_micro_batches == 1:
        extra += sum(block.count * size for block, size in whole_gradients(step))
    return extra


def _stage_buffers(case: Case, step: Step, stages: Stages) -> int:
    """Of torch's ``PipelineStage``: received inputs and gradients of all micro-batches, outputs of those in flight."""
    last, ranks, every = len(stages.ranks) - 1, max(stages.ranks) + 1, step.num_micro_batches
    in_flight = min(every, ranks - stages.here) if len(stages.own) == 1 else every
    kept = sum((stage > 0) * every + (stage < last) * (every + in_flight) for stage in stages.own)
    tokens = case.run.tokens // step.size("sequence")
    logits = every * tokens * (case.shape.vocab // step.size("tensor")) * case.run.itemsize
    return kept * (stages.boundary_bytes or 0) + (logits if last in stages.own else 0)
