"""Peak memory of a simulated step: what lives at each of its moments, and what an allocator has reserved by then."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from meshwright.cost.by_place import backward_by_place
from meshwright.cost.gathering import averages_in_buckets, broadcast_bytes, copied_out, exchanged_in_memory
from meshwright.cost.memory import Memory, held_bytes, memory, whole_gradients, whole_weights_bytes
from meshwright.cost.step import Step

Moment = Literal["gather", "loss", "recomputation", "reduction", "update"]


@dataclass(frozen=True)
class Peak:
    """The most one rank holds.

    Args:
        moment: When: as forward gathers or receives weights and buffers, as the loss runs backward, as the last block
            does, as the last gradients are reduced, or at the update.
        memory: By class, at that moment.
        allocated_bytes: Of tensors.
        reserved_bytes: Of the caching allocator, which keeps what it once took, stream by stream.
    """

    moment: Moment
    memory: Memory
    allocated_bytes: int
    reserved_bytes: int


def peak(step: Step, but_for: Collection[Moment] = ()) -> Peak:
    """The moment at which a rank holds most, and how much.

    Args:
        step: What it computes.
        but_for: Moments that are not looked at; never the update.
    """
    every = {moment: held for moment, held in moments(step).items() if moment not in but_for}
    moment = max(every, key=lambda each: every[each].total)
    return Peak(moment, every[moment], every[moment].total, _reserved(every, whole_weights_bytes(step)))


def moments(step: Step) -> dict[Moment, Memory]:
    """What a rank holds at each moment that competes for the peak.

    Before a part of the model computes in forward, what was gathered is copied to where it is used. As the loss runs
    backward everything that forward saved is alive, and no gradient but those that accumulate. When
    the last block does (recomputed or not) what the loss kept is free. When the gradients outside the blocks are
    reduced, nothing saved is left; at the update, all gradients are there, and what the optimizer holds for a moment.
    """
    most, known = memory(step), step.activations
    whole = dataclasses.replace(most, updating=0)
    saved = known.saved_bytes if known is not None else 0
    behind = min(known.outside_bytes, saved) if known is not None else 0
    at_loss = saved + (known.loss_bytes if known is not None else 0)
    weights, (accumulated, of_block, of_outside) = whole_weights_bytes(step), _gradients(step)
    # Shards of gradients that accumulate whole are made as these are reduced, and take their place.
    shards_last = step.num_micro_batches > 1 and not step.whole_gradients
    lasting = whole.gradients if shards_last or step.shard_axis is None else 0

    def at(gradients: int, gathered: int, activations: int, recomputation: int = 0) -> Memory:
        return dataclasses.replace(
            whole, gradients=gradients, gathered=gathered, activations=activations, recomputation=recomputation
        )

    loss = at(lasting, weights + accumulated, at_loss)
    recomputed = at(lasting, weights + accumulated + of_block, saved - behind, whole.recomputation)
    if known is not None and known.transients:
        found = sorted(backward_by_place(step, whole), key=lambda each: each[1].total)
        recomputed = next((held for is_behind, held in reversed(found) if not is_behind), found[-1][1])
        loss = next((held for is_behind, held in reversed(found) if is_behind), recomputed)
    # Gradients that accumulate whole are none yet where only the first micro-batch gathers.
    before = (0, 0) if step.gathered == "model" else (lasting, accumulated)
    copied = [at(before[0], before[1] + size, kept) for size, kept in copied_out(step)]
    copied += [at(whole.gradients, size, 0) for size in [broadcast_bytes(step)] if size]
    found_at: dict[Moment, Memory] = {
        **({"gather": max(copied, key=lambda each: each.total)} if copied else {}),
        "loss": loss,
        "recomputation": recomputed,
        "reduction": at(whole.gradients, weights + accumulated + of_outside, 0),
        "update": _at_update(step, most),
    }
    shared = exchanged_in_memory(step)
    return {moment: dataclasses.replace(held, gathered=held.gathered + shared) for moment, held in found_at.items()}


def _at_update(step: Step, most: Memory) -> Memory:
    """All gradients, and what the optimizer holds for a moment.

    Of real modules FSDP2 has freed what it gathered, and DDP keeps its buffers beside fp32 gradients of half weights.
    """
    known = step.activations
    real = known is not None and bool(known.transients)
    gathered = 0 if real or step.gathered != "model" else whole_weights_bytes(step)
    beside = real and step.master is not None and averages_in_buckets(step)
    buffers = sum(count * held_bytes(step, p) for count, p in step.every_parameter() if p.trainable) if beside else 0
    return dataclasses.replace(
        most, gradients=most.gradients + buffers, gathered=gathered, activations=0, recomputation=0, returned=0
    )


def _gradients(step: Step) -> tuple[int, int, int]:
    """Whole gradients that accumulate, those of blocks that are computed and reduced, and of what is outside.

    Two blocks at once; beside gradients that accumulate, which are there already, one.
    """
    each = whole_gradients(step)
    accumulates = step.whole_gradients and step.num_micro_batches > 1
    inside = max((size for block, size in each if block.name != "outside"), default=0)
    outside = sum(size for block, size in each if block.name == "outside")
    if accumulates:
        return sum(block.count * size for block, size in each), inside, outside
    return 0, 2 * inside, outside


def _reserved(every: dict[Moment, Memory], weights: int) -> int:
    """The allocator keeps blocks per stream: gathered weights, and gradients as shards, come from streams of their own.

    What computes allocates on one stream; what it holds there at its own peak stays reserved.
    """

    def computing(each: Memory) -> int:
        twice = max(each.gradients - whole.gradients, 0)  # in DDP's buffers, too
        kept = (each.activations or 0) + each.recomputation + each.returned + each.updating
        return kept + max(each.gathered - weights, 0) + twice

    whole = every["update"]
    lasting = whole.parameters + whole.master + whole.optimizer + whole.buffers + whole.gradients
    lasting += whole.outer + whole.average
    return lasting + weights + max(computing(each) for each in every.values())
