"""What is there twice as forward begins: weights that FSDP2 has gathered, buffers that DDP sends around."""

from __future__ import annotations

import itertools
import math

from meshwright.cost.memory import element_bytes, whole_gradients, whole_weights
from meshwright.cost.step import Step

AVERAGING = ("data", "sequence", "context")
"""The axes over which plain data parallelism averages gradients, that of the name of its traffic first."""

_BUCKET_BYTES = 250 * 2**20  # DDP sends so much at once, and does not wait for it before the next


def copied_out(step: Step) -> list[tuple[int, int]]:
    """The moments of forward at which gathered weights are there twice: flat as they arrived, and in place.

    What is flat is freed at once on a CPU; elsewhere only when the next unit has gathered its own.

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
    arrives = 0 if step.shards_in_memory else 1  # where ranks share memory, weights are flat there
    if not blocks:
        return [((1 + arrives) * outside, 0 if is_freed_at_once(step) else _saved_bytes(step))]
    first = (1 + arrives) * outside + (0 if is_freed_at_once(step) else blocks[0])
    flat = arrives * blocks[0]
    if step.gathered == "model":
        return [(first, 0), (outside + sum(blocks) + flat, _saved_before_the_last_block(step))]
    ahead = 1 if is_freed_at_once(step) else 2
    return [(first, 0), (outside + flat + sum(blocks[:ahead]), _saved_before_the_last_block(step))]


def exchanged_in_memory(step: Step) -> int:
    """A rank's share of the memory through which ranks of one host hand on weights and gradients of shards.

    There is room for three units of gathered weights, which all ranks share, and for one of each rank's gradients.
    """
    if not step.shards_in_memory:
        return 0
    gathered = sorted(
        size for block, size in whole_weights(step) for _ in range(1 if block.name == "outside" else block.count)
    )
    reduced = max((size for _, size in whole_gradients(step)), default=0)
    return sum(gathered[-3:]) // step.size(step.shard_axis) + reduced


def averages_in_buckets(step: Step) -> bool:
    """Whether DDP averages: gradients are parts of its buffers, which last."""
    split = step.size("tensor") * step.size("expert") > 1
    averaged = math.prod(map(step.size, AVERAGING)) > 1
    return step.shard_axis is None and step.stages is None and averaged and not split


def broadcast_bytes(step: Step) -> int:
    """Of the model's buffers, those that lie packed at once while DDP takes them over from its first rank."""
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
    """Whether FSDP2 lets go of what it has gathered as soon as that is copied, as it does where gathers run apart."""
    return step.on_cpu and step.wire is None


def last_gathered_bytes(step: Step) -> int:
    """What is flat yet behind the blocks in forward: the last block's weights; where there is none, the model's."""
    if is_freed_at_once(step):
        return 0
    every = whole_weights(step)
    inside = [size for block, size in every if block.name != "outside"]
    return max(inside) if inside else sum(size for _, size in every)


def _saved_bytes(step: Step) -> int:
    return step.activations.saved_bytes if step.activations is not None else 0


def _saved_before_the_last_block(step: Step) -> int:
    """Of one micro-batch; ranks of a pipeline gather before they hold several."""
    known = step.activations
    if known is None or step.stages is not None:
        return 0
    if not known.transients:  # nor is it known where something is saved
        return known.saved_bytes - min(known.outside_bytes, known.saved_bytes)
    behind = known.transients[-1].place
    return sum(size for kept in known.kept_at for (place,), size in kept if place < behind - 1)
