"""Memory of a published run: the most that one of its ranks holds, as its source counts it, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost import Peak, Step, memory, peak
from meshwright.cost.memory import whole_gradients
from meshwright.planner.allocator import CONTEXT_BYTES, FRAGMENTED, FRAGMENTED_BY_LAYERS
from meshwright.planner.published.described import Case

_HALF_BYTES = 2


@dataclass(frozen=True)
class Held:
    """Memory of the rank that holds most.

    Args:
        peak: By class.
        counted_bytes: As the source counts: allocated or reserved.
        needed_bytes: Reserved, with what is lost between tensors and what no tensor can use.
        fits: Whether the device has as much.
    """

    peak: Peak
    counted_bytes: int
    needed_bytes: int
    fits: bool


def held_by(case: Case) -> Held:
    """Predicts the memory of a run."""
    distinct = {id(step): step for step in case.steps}.values()
    return max((_held(case, step) for step in distinct), key=lambda held: held.needed_bytes)


def _held(case: Case, step: Step) -> Held:
    convention, most, extra = case.convention, peak(step), _beside(case, step)
    gathers_layers = convention.live_bytes > 0 and case.zero_stage == 3
    unused = 0.0 if convention.expandable else FRAGMENTED_BY_LAYERS if gathers_layers else FRAGMENTED
    reserved = round((most.reserved_bytes + extra) * (1 + unused))
    counted = reserved if convention.memory == "reserved" else most.allocated_bytes + extra
    needed = reserved + CONTEXT_BYTES
    return Held(most, counted, needed, needed <= case.cluster.device.memory_bytes)


def _beside(case: Case, step: Step) -> int:
    """Bytes of what a source keeps and our methods do not; negative where it keeps less."""
    convention = case.convention
    extra = convention.bucket_bytes
    if convention.live_bytes and case.zero_stage == 3:
        # Two layers at once (the one that computes and the one prefetched) with the gradients of one.
        largest = max(p.numel for block in step.blocks for p in block.parameters if block.name != "outside")
        extra += max(convention.live_bytes, 3 * largest * _HALF_BYTES)
    if convention.offloads:
        extra -= memory(step).optimizer
    if convention.wide_gradients and step.whole_gradients and step.num_micro_batches == 1:
        extra += sum(block.count * size for block, size in whole_gradients(step))
    return extra
