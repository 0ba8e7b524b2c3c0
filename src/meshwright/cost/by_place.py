"""What a rank holds while one place of its model after the other runs backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from meshwright.cost.activations import Activations, BackwardAt
from meshwright.cost.gathering import averages_in_buckets, last_gathered_bytes
from meshwright.cost.memory import Memory, whole_gradients, whole_weights, whole_weights_bytes
from meshwright.cost.step import Step
from meshwright.cost.transient import Transient


def backward_by_place(step: Step, whole: Memory) -> Iterator[tuple[bool, Memory]]:
    """Yields whether a place lies behind the blocks, and what is held at its own peak.

    Args:
        step: With transients.
        whole: Its memory.
    """
    known = step.activations
    assert known is not None
    behind = step.stages.num_blocks if step.stages is not None else known.transients[-1].place
    single = BackwardAt(0, (1,), (step.num_micro_batches > 1,))
    for now in known.backward_at or (single,):
        held = sum(count * sum(size for _, size in kept) for count, kept in zip(now.held, known.kept_at, strict=True))
        kept = {place: size for (place,), size in known.kept_at[now.stage]}
        buffers, own = _received_bytes(step, now), _of_stage(step, known, now.stage)
        left, returned = sum(each.left for each in own), sum(each.returned for each in own)
        working = {place: size for (place,), size in known.working_at}
        for each in own:
            remains = sum(other.remains for other in own if other.place > each.place)
            later = sum(size for place, size in kept.items() if place > each.place) - buffers - left - remains
            activations = held - later + each.most(with_gradients=not _accumulates(step, now))
            gradients, gathered = _Gradients(step, whole, known, now).at(each)
            at_peak = dataclasses.replace(
                whole,
                gradients=gradients,
                gathered=gathered + _weights(step, each.place, behind),
                activations=activations,
                recomputation=working.get(each.place, 0),
                host_gradients=0 if step.num_micro_batches == 1 else whole.host_gradients,
            )
            yield each.place == behind, at_peak
            if 0 <= each.place < behind and (on_way := _exchanged_bytes(step)):
                weights = _weights(step, each.place, behind)
                yield (
                    False,
                    dataclasses.replace(
                        at_peak,
                        activations=held - later - kept.get(each.place, 0),
                        gathered=weights + on_way + known.transients[-1].gradients,
                        recomputation=0,
                    ),
                )
            if each.forward and not (step.gathered == "model" and step.num_micro_batches > 1):  # gathered before
                most = max(instant.activations for instant in each.forward)
                yield (
                    each.place == behind,
                    dataclasses.replace(
                        at_peak,
                        activations=held - later - left + returned + most,
                        gathered=at_peak.gathered + last_gathered_bytes(step),
                    ),
                )


def _received_bytes(step: Step, now: BackwardAt) -> int:
    """Buffers for what stages receive: torch keeps one for every micro-batch, those that forward saves among them."""
    stages = step.stages
    if stages is None or stages.boundary_bytes is None:
        return 0
    count = 0
    for stage, held in zip(stages.own, now.held, strict=True):
        if stage > 0 and stages.ranks[stage - 1] != stages.here:
            count += step.num_micro_batches - held
        if stage + 1 < len(stages.ranks) and stages.ranks[stage + 1] != stages.here:
            count += step.num_micro_batches
    return count * stages.boundary_bytes


def _of_stage(step: Step, known: Activations, stage: int) -> list[Transient]:
    if step.stages is None:
        return list(known.transients)
    own = step.stages.own[stage]
    return [each for each in known.transients if step.stages.has(own, (each.place,))]


def _accumulates(step: Step, now: BackwardAt) -> bool:
    """Whether gradients are added to others, or copied to where they belong, as soon as they are complete."""
    if step.shard_axis is not None and not step.whole_gradients:
        return False
    return now.accumulated[now.stage] or averages_in_buckets(step)


@dataclasses.dataclass(frozen=True)
class _Gradients:
    """Those of parameters that are there already while a place runs backward."""

    step: Step
    whole: Memory
    known: Activations
    now: BackwardAt

    def at(self, place: Transient) -> tuple[int, int]:
        """As they last, and whole ones on their way to shards."""
        own = _of_stage(self.step, self.known, self.now.stage)
        later = sum(each.gradients for each in own if each.place > place.place)
        if self.step.shard_axis is not None:
            return self._sharded(place, later)
        total = sum(each.gradients for each in self.known.transients)
        if averages_in_buckets(self.step):
            return total * (2 if self.step.num_micro_batches > 1 else 1), 0
        others = sum(
            each.gradients
            for stage, begun in enumerate(self.now.accumulated)
            if begun and stage != self.now.stage
            for each in _of_stage(self.step, self.known, stage)
        )
        return others + (sum(each.gradients for each in own) if self.now.accumulated[self.now.stage] else later), 0

    def _sharded(self, place: Transient, later: int) -> tuple[int, int]:
        every = whole_gradients(self.step)
        if self.step.whole_gradients and self.step.num_micro_batches > 1:
            if any(self.now.accumulated):
                return 0, sum(block.count * size for block, size in every)
            return 0, later
        total = sum(each.gradients for each in self.known.transients)
        behind = self.known.transients[-1]
        waiting = behind.gradients if place.place < behind.place else 0
        if self.step.shards_in_memory:  # where those lie that have been packed
            every = []
        reduced = max((size for block, size in every if block.name != "outside"), default=0)
        on_way = waiting + (reduced if later > waiting else 0)
        if self.step.num_micro_batches > 1:
            before = sum(size for block, size in every if block.name == "outside")  # of the micro-batch before
            return self.whole.gradients, on_way if later > waiting else on_way + before
        return self.whole.gradients * (later - waiting) // max(total, 1), on_way


def _exchanged_bytes(step: Step) -> int:
    """Of a block whose gradients a CPU reduces: all of them packed, what arrives in their place, and the shard.

    The shard alone where ranks share the memory of the others.
    """
    if not step.on_cpu or step.whole_gradients or step.size(step.shard_axis) == 1:
        return 0
    largest = max((size for block, size in whole_gradients(step) if block.name != "outside"), default=0)
    return (0 if step.shards_in_memory else 2 * largest) + largest // step.size(step.shard_axis)


def _largest_block(step: Step) -> int:
    return max((size for block, size in whole_weights(step) if block.name != "outside"), default=0)


def _weights(step: Step, place: int, behind: int) -> int:
    """Whole weights while a place runs backward: its block's, those gathered next, and what is outside the blocks.

    Those that a step gathers once are freed block by block in the last micro-batch alone.
    """
    whole = whole_weights_bytes(step)
    if step.gathered == "nothing" or not whole:
        return 0
    every = whole_weights(step)
    outside = sum(size for block, size in every if block.name == "outside")
    if step.gathered == "model":
        blocks = whole - outside
        return whole if step.num_micro_batches > 1 else outside + blocks * min(place + 1, behind) // max(behind, 1)
    largest = _largest_block(step)
    # What is gathered ahead is flat as yet, in memory that counts already where ranks share it.
    ahead = 1 if step.gathers_ahead and place > 0 and not step.shards_in_memory else 0
    return outside + (largest * (1 + ahead) if 0 <= place < behind else 0)
