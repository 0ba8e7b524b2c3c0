"""Peak memory of a simulated step: what is live at each moment, and what the allocator has reserved by then."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from meshwright.cost.activations import Activations, BackwardAt, Transient
from meshwright.cost.rank_memory import (
    Memory,
    exchanged_in_memory,
    held_bytes,
    memory,
    unsharded_gradients,
    whole_gradients,
    whole_weights,
    whole_weights_bytes,
)
from meshwright.cost.step import Block, Step, element_bytes, gathered_itemsize, padded_bytes

AVERAGING = ("data", "sequence", "context")
"""The axes over which plain data parallelism averages gradients, that of the name of its traffic first."""

_BUCKET_BYTES = 250 * 2**20  # DDP sends so much at once, and does not wait for it before the next


def copied_out(step: Step) -> list[tuple[int, int]]:
    """Return the moments of forward at which gathered weights exist twice: flat as they arrived, and in place.

    The flat copy is freed at once on a CPU; elsewhere only when the next unit has gathered its own.

    Returns:
        Bytes of both, and of what is saved by then for backward.
    """
    every = whole_weights(step)
    if not every:
        return []
    outside = sum(size for block, size in every if block.name == "outside")
    blocks = sorted(
        (size for block, size in every if block.name != "outside" for _ in range(block.count)), reverse=True
    )
    # Where ranks share memory, the flat weights lie there and are counted apart.
    arrives = 0 if step.shards_in_memory else 1
    if not blocks:
        return [((1 + arrives) * outside, 0 if is_freed_at_once(step) else _saved_bytes(step))]
    first = (1 + arrives) * outside + (0 if is_freed_at_once(step) else blocks[0])
    flat = arrives * blocks[0]
    if step.gathered == "model":
        return [(first, 0), (outside + sum(blocks) + flat, _saved_before_the_last_block(step))]
    ahead = 1 if is_freed_at_once(step) else 2
    flat += max(_put_together(step, block) for block in step.blocks)
    return [(first, 0), (outside + flat + sum(blocks[:ahead]), _saved_before_the_last_block(step))]


def _put_together(step: Step, block: Block) -> int:
    """Return the bytes of gathered weights that exist once more while their parts, cut inside, are put together."""
    cut = (p for p in block.parameters if p.sharded and p.shard_dim)
    return sum(padded_bytes(step, each, gathered_itemsize(step, each)) for each in cut)


def averages_in_buckets(step: Step) -> bool:
    """Return whether DDP averages, so that gradients are views into its persistent buckets."""
    split = step.size("tensor") * step.size("expert") > 1
    averaged = math.prod(map(step.size, AVERAGING)) > 1
    return step.shard_axis is None and step.stages is None and averaged and not split


def broadcast_bytes(step: Step) -> int:
    """Return the bytes of the model's buffers that are packed at once while DDP broadcasts them from rank 0."""
    if not averages_in_buckets(step) or not any(p.trainable for _, p in step.every_parameter()):
        return 0
    filled, full = 0, []
    for buffer in step.buffers:
        filled += buffer.numel * element_bytes(buffer, step.buffers_itemsize)
        if filled >= _BUCKET_BYTES:
            full.append(filled)
            filled = 0
    return max(sum(pair) for pair in itertools.pairwise([0, *full, filled]))


def is_freed_at_once(step: Step) -> bool:
    """Return whether FSDP2 frees a flat gather as soon as it is copied, as it does without a stream for gathers."""
    return step.on_cpu and step.compression is None


def last_gathered_bytes(step: Step) -> int:
    """Return the bytes still flat behind the blocks in forward: of the last block, or of a model without blocks."""
    if is_freed_at_once(step):
        return 0
    every = whole_weights(step)
    inside = [size for block, size in every if block.name != "outside"]
    return max(inside) if inside else sum(size for _, size in every)


def _saved_bytes(step: Step) -> int:
    return step.activations.saved_bytes if step.activations is not None else 0


def _saved_before_the_last_block(step: Step) -> int:
    """Return the bytes that one micro-batch has saved; 0 in pipelines, which gather before they hold several."""
    known = step.activations
    if known is None or step.stages is not None:
        return 0
    # Without transients the places of saved tensors are unknown, too.
    if not known.transients:
        return known.saved_bytes - min(known.outside_bytes, known.saved_bytes)
    behind = known.transients[-1].place
    return sum(size for kept in known.kept_at for (place,), size in kept if place < behind - 1)


# --- Memory while the places of a model run backward, one after the other.


def backward_by_place(step: Step, whole: Memory) -> Iterator[tuple[bool, Memory]]:
    """Yield whether a place lies behind the blocks, and the memory at its own peak in backward.

    Args:
        step: A step with transients.
        whole: Its memory.
    """
    known = step.activations
    assert known is not None
    in_backward = whole if _has_accumulated(step) else dataclasses.replace(whole, host_gradients=0)
    for now in _moments_of_backward(step, known):
        if step.stages is not None and step.stages.own[0] == 0 < now.after:
            yield from _later_forward(step, known, whole, now)
        in_parts = now.part != "both" and known.splits_backward
        yield from (_backward_in_parts if in_parts else _backward_at_once)(step, known, in_backward, now)


def _backward_at_once(step: Step, known: Activations, whole: Memory, now: BackwardAt) -> Iterator[tuple[bool, Memory]]:
    """Yield the same as :func:`backward_by_place` of a backward in one part."""
    own, found = _of_stage(step, known, now.stage), _Gradients(step, whole, known, now)
    behind = step.stages.num_blocks if step.stages is not None else known.transients[-1].place
    end, left, on_way = own[-1].place, sum(each.left for each in own), _exchanged_bytes(step)
    throughout = _held_bytes(step, known, now) + _received_bytes(step, now) + known.inputs.held
    kept = {place: size for (place,), size in known.kept_at[now.stage]}
    working, taken = ({place: size for (place,), size in sizes} for sizes in (known.working_at, known.taken_at))
    for each in own:
        # What a stage hands on is kept until its backward has run.
        later = sum(size for place, size in kept.items() if each.place < place <= end)
        held = throughout - later - (each.far if each.place < end < behind else 0)
        remains = left + sum(other.remains for other in own if other.place > each.place)
        (gradients, gathered), weights = found.at(each), _weights(step, each.place, behind)
        most = each.most(
            with_gradients=not _accumulates(step, now),
            is_cut=each.place == end < behind,
            is_recomputed=each.place in working,
            is_reentrant=known.to_the_end and each.place in working,
        )
        at_peak = dataclasses.replace(
            whole,
            gradients=gradients,
            gathered=gathered + weights,
            activations=held + remains + most - taken.get(each.place, 0),
            recomputation=working.get(each.place, 0),
            returned=known.returned_at(each.place),
        )
        yield each.place == behind, at_peak
        if on_way and 0 <= each.place < behind:
            gathered = weights + on_way + known.transients[-1].gradients
            saved = held + remains - kept.get(each.place, 0)
            yield False, dataclasses.replace(at_peak, activations=saved, gathered=gathered, recomputation=0)
        if each.forward and not (step.gathered == "model" and _has_accumulated(step)):  # gathered before
            weights = _weights(step, each.place, behind, ahead=False) + last_gathered_bytes(step)
            yield True, _end_of_forward(found, own, each, held, weights)


def _end_of_forward(found: _Gradients, own: Sequence[Transient], place: Transient, held: int, weights: int) -> Memory:
    """Return the memory as forward ends: behind the blocks without the loss, or in hooks behind the last block."""
    gradients, gathered = found.at(own[-1])
    returned, most = sum(each.returned for each in own), max(instant.activations for instant in place.forward)
    return dataclasses.replace(
        found.whole,
        gradients=gradients,
        gathered=gathered + weights,
        activations=held + returned + most,
        recomputation=0,
        returned=found.known.returned_at(len(found.known.blocks)),
    )


def _later_forward(step: Step, known: Activations, whole: Memory, now: BackwardAt) -> Iterator[tuple[bool, Memory]]:
    """Yield the same as :func:`backward_by_place` while a later stage runs forward on the rank of the first.

    What comes before the blocks runs in every stage. The model holds its result, a hidden state, until the stage has
    run, and autograd what it saves.
    """
    assert step.stages is not None
    own, behind = _of_stage(step, known, now.after), step.stages.num_blocks
    before = sum(size for (place,), size in known.kept_at[0] if place < 0) + (step.stages.boundary_bytes or 0)
    before += _held_bytes(step, known, now) + _received_bytes(step, now) + known.inputs.held
    gradients, gathered = _Gradients(step, whole, known, now).at(own[-1])
    for each in own:
        later = sum(size for (place,), size in known.kept_at[now.after] if place > each.place)
        held = dataclasses.replace(
            whole,
            gradients=gradients,
            gathered=gathered + _weights(step, each.place, behind, ahead=False),
            activations=before - later + each.running,
            recomputation=0,
        )
        yield each.place == behind, held


def _moments_of_backward(step: Step, known: Activations) -> Iterator[BackwardAt]:
    """Yield the moments of backward as the engine runs it: in one part where blocks are recomputed."""
    moments = known.at_once().backward_at if known.recomputed else known.backward_at
    for now in moments or (BackwardAt(0, (1,), (step.num_micro_batches > 1,)),):
        if now.part == "both" or not known.splits_backward:
            yield now
        else:
            assert step.stages is not None, "only schedules of a pipeline split backward"
            # The first stage has no gradient of inputs to compute, so that all is done in the second part.
            is_first = step.stages.own[now.stage] == 0
            if not is_first or now.part == "weights":
                yield now._replace(part="both") if is_first else now


def _held_bytes(step: Step, known: Activations, now: BackwardAt) -> int:
    """Return what the micro-batches of all stages of a rank have saved, and the gradients of those that are halfway."""
    held = sum(count * sum(size for _, size in kept) for count, kept in zip(now.held, known.kept_at, strict=True))
    if step.stages is None or not known.splits_backward:
        return held
    for stage, count in enumerate(now.halfway):
        parts = [each.split for each in _of_stage(step, known, stage) if each.split is not None]
        if step.stages.own[stage] > 0 and parts:
            # The gradient that comes from the stage behind lies in a buffer, which is counted apart.
            received = sum(each.received for each in parts[:-1])
            received -= parts[-1].tail if step.stages.own[stage] + 1 < len(step.stages.ranks) else 0
            held += count * (received + sum(each.kept - each.freed for each in parts))
    return held


def _backward_in_parts(step: Step, known: Activations, whole: Memory, now: BackwardAt) -> Iterator[tuple[bool, Memory]]:
    """Yield the same as :func:`backward_by_place` of one of the two parts of a backward."""
    assert step.stages is not None
    own, behind = _of_stage(step, known, now.stage), step.stages.num_blocks
    end, accumulates = own[-1].place, _accumulates(step, now)
    beside = _held_bytes(step, known, now) + _received_bytes(step, now) + known.inputs.held
    beside += sum(each.left for each in own)
    found = _Gradients(step, whole, known, now)
    for each in own:
        if each.split is None:
            continue
        earlier = [other.split for other in own if other.split is not None and other.place < each.place]
        later = [other for other in own if other.split is not None and other.place > each.place]
        if now.part == "inputs":
            instants = each.split.cut if each.place == end < behind else each.split.inputs
            activations = beside + max(instant.activations for instant in instants)
            activations += sum(other.split.kept for other in later if other.split is not None)
            activations += sum(other.split.received for other in later[:-1] if other.split is not None)
            complete = 0
        else:
            activations = beside + sum(other.change for other in earlier)
            activations += max(
                instant.activations + instant.weights + (0 if accumulates else instant.gradients)
                for instant in each.split.weights
            )
            complete = sum(other.gradients for other in own if other.place < each.place)
        gradients, gathered = found.with_complete(each, complete)
        yield (
            each.place == behind,
            dataclasses.replace(
                whole,
                gradients=gradients,
                gathered=gathered + _weights(step, each.place, behind),
                activations=activations,
                recomputation=0,
            ),
        )


def _received_bytes(step: Step, now: BackwardAt) -> int:
    """Return the bytes of what is being received, of received gradients, and of what was sent and is held all the same.

    Forward has saved the hidden states that were received. What one stage of a rank hands on to the next of the same
    rank is no copy, and is counted among what either has saved.
    """
    stages = step.stages
    if stages is None or stages.boundary_bytes is None:
        return 0
    count = now.posted + sum(now.sent)
    for own, stage in enumerate(stages.own):
        if stage > 0 and stages.ranks[stage - 1] == stages.here:
            count -= now.held[own]
        if stage + 1 < len(stages.ranks):
            count += (own == now.stage) + (now.halfway[own] if now.halfway else 0)
    if stages.schedule == "1f1b" and any(now.accumulated):
        # The last gradient that was sent is held until the next, and the last hidden state of the warm-up, too.
        left = max(stages.ranks) - stages.here
        count += (stages.here > 0) + (0 < left < step.num_micro_batches - 1)
    return count * stages.boundary_bytes


def _of_stage(step: Step, known: Activations, stage: int) -> list[Transient]:
    if step.stages is None:
        return list(known.transients)
    own = step.stages.own[stage]
    return [each for each in known.transients if step.stages.has(own, (each.place,))]


def _accumulates(step: Step, now: BackwardAt) -> bool:
    """Return whether gradients are added or copied to their place as soon as they are complete."""
    if step.shard_axis is not None and not step.whole_gradients:
        return False
    return now.accumulated[now.stage] or (averages_in_buckets(step) and step.num_micro_batches == 1)


@dataclasses.dataclass(frozen=True)
class _Gradients:
    """Gradients of parameters that exist while a place runs backward."""

    step: Step
    whole: Memory
    known: Activations
    now: BackwardAt

    def at(self, place: Transient) -> tuple[int, int]:
        """Return the bytes of lasting gradients, and of whole ones on their way to shards."""
        own = _of_stage(self.step, self.known, self.now.stage)
        return self.with_complete(place, sum(each.gradients for each in own if each.place > place.place))

    def with_complete(self, place: Transient, complete: int) -> tuple[int, int]:
        """Return the same where gradients of so many bytes of the running stage are complete."""
        if self.step.shard_axis is not None:
            return self._sharded(place, complete)
        total = sum(each.gradients for each in self.known.transients)
        if averages_in_buckets(self.step):
            # DDP averages in the last micro-batch alone: those before make gradients beside its buckets.
            beside = total if _has_accumulated(self.step) else complete
            return total + (beside if self.step.num_micro_batches > 1 else 0), 0
        if all(self.now.accumulated):
            return self.whole.gradients if self.step.master is None else _in_model(self.step), 0
        return self._begun(complete), 0

    def _begun(self, complete: int) -> int:
        """Return the bytes of whole gradients where not all stages of a rank have accumulated some."""
        begun = [stage for stage, accumulated in enumerate(self.now.accumulated) if accumulated]
        found = sum(each.gradients for stage in begun for each in _of_stage(self.step, self.known, stage))
        return found if self.now.stage in begun else found + complete

    def _sharded(self, place: Transient, later: int) -> tuple[int, int]:
        every = whole_gradients(self.step)
        if self.step.whole_gradients and self.step.num_micro_batches > 1:
            if all(self.now.accumulated):
                return unsharded_gradients(self.step), sum(block.count * size for block, size in every)
            return 0, self._begun(later)
        total = sum(each.gradients for each in self.known.transients)
        behind = self.known.transients[-1]
        waiting = behind.gradients if place.place < behind.place else 0
        if all(block.name == "outside" for block in self.step.blocks):
            waiting = later  # a single unit, which is reduced when all of it is complete
        # Packed gradients lie in shared memory, which is counted apart.
        if self.step.shards_in_memory:
            every = []
        reduced = max((size for block, size in every if block.name != "outside"), default=0)
        on_way = waiting + (reduced if later > waiting else 0)
        if _has_accumulated(self.step):
            before = sum(size for block, size in every if block.name == "outside")  # of the micro-batch before
            return self.whole.gradients, on_way if later > waiting else on_way + before
        return self.whole.gradients * (later - waiting) // max(total, 1), on_way


def _in_model(step: Step) -> int:
    """Return the bytes of gradients of the model's own weights; those of master weights are made at the update."""
    return sum(count * held_bytes(step, p) for count, p in step.every_parameter() if p.trainable)


def _exchanged_bytes(step: Step) -> int:
    """Return the bytes in flight while a CPU reduces a block's gradients: packed, arriving, and the shard.

    Only the shard where ranks share the memory of the others.
    """
    if not step.on_cpu or step.whole_gradients or step.size(step.shard_axis) == 1:
        return 0
    every = whole_gradients(step, by_unit=True)
    largest = max((size for block, size in every if block.name != "outside"), default=0)
    return (0 if step.shards_in_memory else 2 * largest) + largest // step.size(step.shard_axis)


def _largest_block(step: Step) -> int:
    return max((size for block, size in whole_weights(step) if block.name != "outside"), default=0)


def _weights(step: Step, place: int, behind: int, *, ahead: bool = True) -> int:
    """Return the whole weights while a place runs backward: its block's, prefetched ones, and those outside blocks.

    Weights that are gathered once a step are freed block by block in the last micro-batch alone. Without ``ahead``,
    nothing is prefetched.
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
    prefetched = 1 if ahead and step.gathers_ahead and place > 0 and not step.shards_in_memory else 0
    return outside + (largest * (1 + prefetched) if 0 <= place < behind else 0)


# --- The fullest moment of a step.

Moment = Literal["gather", "loss", "recomputation", "reduction", "update"]


@dataclasses.dataclass(frozen=True)
class Peak:
    """The most memory one rank holds in a step.

    Args:
        moment: As forward gathers weights or receives buffers, at the start of backward, in the last block, as the last
            gradients are reduced, or at the update.
        memory: Bytes by class at that moment.
        allocated_bytes: Bytes of tensors.
        reserved_bytes: Bytes of the caching allocator, which keeps what it once took, stream by stream.
    """

    moment: Moment
    memory: Memory
    allocated_bytes: int
    reserved_bytes: int


def peak(step: Step, but_for: Collection[Moment] = ()) -> Peak:
    """Return the fullest moment of a step.

    Args:
        step: The simulated step.
        but_for: Moments to leave out; never the update.
    """
    every = {moment: held for moment, held in moments(step).items() if moment not in but_for}
    moment = max(every, key=lambda each: every[each].total)
    return Peak(moment, every[moment], every[moment].total, _reserved(step, every))


def moments(step: Step) -> dict[Moment, Memory]:
    """Return the memory at each moment that competes for the peak: of the first micro-batch, or of those behind it."""
    if step.smaller is None or step.activations is None:
        return _moments(step)
    at_first = dataclasses.replace(step.activations, backward_at=(BackwardAt(0, (1,), (False,)),))
    first = _moments(step.replace(activations=at_first, smaller=None))
    later = _moments(step.replace(activations=step.smaller, smaller=None))
    return {
        moment: max((every[moment] for every in (later, first) if moment in every), key=lambda each: each.total)
        for moment in {**first, **later}
    }


def _has_accumulated(step: Step) -> bool:
    """Return whether gradients of micro-batches before exist at a step's peak."""
    known = step.activations
    is_first = step.stages is None and known is not None and any(not any(now.accumulated) for now in known.backward_at)
    return step.num_micro_batches > 1 and not is_first


def _moments(step: Step) -> dict[Moment, Memory]:
    """Return the memory at each moment where all micro-batches are of one size.

    Before a unit computes in forward, gathered weights are copied to where they are used (``gather``). At the start of
    backward, all that forward saved is alive, and only accumulated gradients are (``loss``). When the last block runs
    backward, what the loss saved is free (``recomputation``). When the gradients outside the blocks are reduced,
    nothing saved is left (``reduction``). At the ``update`` all gradients exist, and the optimizer's temporaries.
    """
    most, known = memory(step), step.activations
    whole = dataclasses.replace(most, updating=0)
    saved = _saved_bytes(step)
    behind = min(known.outside_bytes, saved) if known is not None else 0
    if known is not None and known.holds_messages and not known.transients:
        saved += max((_received_bytes(step, now) for now in known.backward_at), default=0)
    at_loss = saved + (known.loss_bytes if known is not None else 0)
    weights, (accumulated, of_block, _) = whole_weights_bytes(step), _gradients(step)
    if known is not None and known.passing_bytes and not step.whole_gradients:
        # When a block's own gradients are complete, in the precision of its weights, what passed is free.
        own = min(of_block // 2, _largest_block(step))
        of_block += own - of_block // 2
        whole = dataclasses.replace(whole, recomputation=whole.recomputation - min(own, known.passing_bytes))
    shards_last, lasting = _has_accumulated(step) and not step.whole_gradients, _lasting_gradients(step, whole)

    def at(gradients: int, gathered: int, activations: int, recomputation: int = 0) -> Memory:
        return dataclasses.replace(
            whole, gradients=gradients, gathered=gathered, activations=activations, recomputation=recomputation
        )

    # Gradients outside of blocks are reduced last: those of a micro-batch are there as the next runs forward.
    waiting = _gradients(step)[2] if shards_last and step.shard_axis is not None and step.stages is None else 0
    loss = at(lasting, weights + accumulated + waiting, at_loss)
    recomputed = at(lasting, weights + accumulated + of_block, saved - behind, whole.recomputation)
    if known is not None and known.copied_at:
        loss = dataclasses.replace(loss, returned=known.returned_at(len(known.blocks)))
        if len(known.copied_at) < len(known.blocks):  # when they come back, what other blocks have saved is gone
            recomputed = dataclasses.replace(recomputed, returned=max(whole.returned - (saved - behind), 0))
    if known is not None and known.transients:
        found = sorted(backward_by_place(step, whole), key=lambda each: each[1].total)
        recomputed = next((held for is_behind, held in reversed(found) if not is_behind), found[-1][1])
        loss = next((held for is_behind, held in reversed(found) if is_behind), recomputed)
    # Gradients that accumulate whole are none yet where only the first micro-batch gathers.
    before = (0, 0) if step.gathered == "model" else (lasting, accumulated)
    given = known.inputs.held if known is not None else 0
    copied = [at(before[0], before[1] + size, kept + given) for size, kept in copied_out(step)]
    copied += [at(whole.gradients, size, given) for size in [broadcast_bytes(step)] if size]
    found_at: dict[Moment, Memory] = {
        **({"gather": max(copied, key=lambda each: each.total)} if copied else {}),
        "loss": loss,
        "recomputation": recomputed,
        "reduction": max((at(*each) for each in _reductions(step, most, given)), key=lambda each: each.total),
        "update": _at_update(step, most),
    }
    shared = exchanged_in_memory(step)
    return {moment: dataclasses.replace(held, gathered=held.gathered + shared) for moment, held in found_at.items()}


def _lasting_gradients(step: Step, whole: Memory) -> int:
    """Return the bytes of gradients that are there as backward begins."""
    has_accumulated = _has_accumulated(step)
    if averages_in_buckets(step):  # those of micro-batches before are beside the buckets
        return _in_model(step) * (2 if has_accumulated else 1)
    if step.whole_gradients and has_accumulated:  # shards are made as these are reduced, and take their place
        return unsharded_gradients(step)
    if step.shard_axis is None:
        return _in_model(step) if has_accumulated or step.stages is not None else 0
    return whole.gradients if has_accumulated else 0


def _reductions(step: Step, most: Memory, given: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield bytes of gradients, of what is whole, of activations, and recomputed, as the last gradients are reduced.

    Where parameters are not sharded all are there, while the first block runs backward. Those that have accumulated
    whole are reduced block by block, each when its shard is made: the last block's while the blocks before it have
    saved their tensors, and in a pipeline when backward is over.
    """
    weights, (accumulated, of_block, of_outside) = whole_weights_bytes(step), _gradients(step)
    if step.shard_axis is None:
        is_traced = step.activations is not None and step.activations.transients  # place by place, then
        yield _in_model(step), 0, given, 0 if is_traced else most.recomputation
        return
    yield most.gradients, weights + of_outside, given, 0
    if accumulated:
        on_way = 0 if step.shards_in_memory else 2 * of_block
        shard = of_block // step.size(step.shard_axis)
        kept = _saved_before_the_last_block(step) + given
        yield unsharded_gradients(step) + shard, weights + accumulated + on_way, kept, 0


def _at_update(step: Step, most: Memory) -> Memory:
    """Return the memory at the update: all gradients, the optimizer's temporaries, and the batch.

    With a traced model FSDP2 has freed what it gathered. DDP keeps its buckets beside fp32 gradients of half weights.
    """
    known = step.activations
    is_traced = known is not None and bool(known.transients)
    gathered = 0 if is_traced or step.gathered != "model" else whole_weights_bytes(step)
    buffers = _in_model(step) if step.master is not None and averages_in_buckets(step) else 0
    return dataclasses.replace(
        most,
        gradients=most.gradients + buffers,
        gathered=gathered,
        activations=0,
        recomputation=0,
        returned=0,
        updating=most.updating + (known.inputs.batch if known is not None else 0),
    )


def _gradients(step: Step) -> tuple[int, int, int]:
    """Return bytes of whole gradients: accumulated, of blocks that are computed and reduced, and outside blocks.

    Two blocks at once; one beside accumulated gradients, which exist already.
    """
    each = whole_gradients(step)
    inside = max((size for block, size in each if block.name != "outside"), default=0)
    outside = sum(size for block, size in each if block.name == "outside")
    if step.whole_gradients and _has_accumulated(step):
        return sum(block.count * size for block, size in each), inside, outside
    return 0, 2 * inside, outside


def _reserved(step: Step, every: dict[Moment, Memory]) -> int:
    """Return the bytes that the caching allocator has reserved, which it keeps per stream.

    Gathered weights, and gradients as shards, come from streams of their own. All other memory of computing comes from
    one stream, whose own peak stays reserved.
    """
    whole, weights = every["update"], whole_weights_bytes(step)
    shards = whole.gradients if step.shard_axis is not None else 0

    def computing(each: Memory) -> int:
        kept = (each.activations or 0) + each.recomputation + each.returned + each.updating
        return kept + max(each.gathered - weights, 0) + max(each.gradients - shards, 0)

    lasting = whole.parameters + whole.master + whole.optimizer + whole.buffers + shards
    lasting += whole.outer + whole.average + whole.visiting
    return lasting + weights + max(computing(each) for each in every.values())
