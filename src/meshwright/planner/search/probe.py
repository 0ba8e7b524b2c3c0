"""What one rank computes and keeps for a sample, found out once for all that only divides samples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from meshwright.cost import Step, memory, peak
from meshwright.methods import Method
from meshwright.planner.plan import Plan, needed_bytes
from meshwright.planner.search.space import Choice, choices
from meshwright.strategy import MethodConfig

_SHARDING = choices("zero1")[0]


class Kept(NamedTuple):
    """What a rank keeps of a micro-batch from forward to backward, in bytes."""

    inside: int  # by the blocks
    behind: int  # behind the last of them
    loss: int  # beside these, as the loss runs backward

    @property
    def total(self) -> int:
        """All that is there as the loss runs backward."""
        return self.inside + self.behind + self.loss

    def of_samples(self, samples: int, two: Kept | None) -> Kept:
        """Of a micro-batch of more samples than one.

        Args:
            samples: Their number.
            two: What a micro-batch of two keeps: casts of weights, masks and tables it keeps once. None: this as often
                as there are samples, which can be too much.
        """
        if two is None or samples < 1:
            return Kept(*(samples * each for each in self))
        return Kept(*(one + max(both - one, 0) * (samples - 1) for one, both in zip(self, two, strict=True)))


@dataclass(frozen=True)
class Probe:
    """What one rank computes and keeps for a micro-batch of one sample.

    Args:
        step: After the twins of its axes, precision and recomputation.
        kept: From forward to backward.
        slack: By how much more is taken of the limit than tensors need.
        taken: What a step's tensors take of the limit, but for slack, at least.
        again: The same of a micro-batch of so many samples; None where that is not known.
    """

    step: Step
    kept: Kept
    slack: float
    taken: Callable[[Step], int]
    again: Callable[[int], Kept] | None = None

    @functools.cached_property
    def kept_by_two(self) -> Kept | None:
        """Of a micro-batch of two samples."""
        return None if self.again is None else self.again(2)

    @property
    def hosted_bytes(self) -> int:
        """What forward sends to the host, and backward brings back."""
        return self.step.activations.hosted_bytes if self.step.activations is not None else 0

    @functools.cached_property
    def num_blocks(self) -> int:
        """Blocks that a pipeline can deal out."""
        return sum(block.count for block in self.step.blocks if block.name != "outside")


def probe_of(plan: Plan, again: Callable[[int], Kept] | None = None) -> Probe:
    """What a plan says of its rank's work."""
    if plan.taken_bytes is None:
        return Probe(plan.step, kept_of(plan), 1.0, lambda step: needed_bytes(step, memory(step)), again)
    slack = plan.taken_bytes / max(_at_peak(plan.step), 1)
    # Of a real module it is known block by block when gradients are there: parameters alone do not tell.
    known = plan.step.activations
    but_for: tuple[Literal["recomputation"], ...] = ("recomputation",) if known is not None and known.transients else ()
    return Probe(plan.step, kept_of(plan), slack, functools.partial(_at_peak, but_for=but_for), again)


def kept_of(plan: Plan) -> Kept:
    """What a plan says of its micro-batch."""
    known, kept = plan.step.activations, plan.memory.activations or 0
    behind = min(known.outside_bytes, kept) if known is not None else 0
    # Where classes are summed, what only the loss's backward makes is none of them.
    return Kept(kept - behind, behind, known.loss_bytes if known is not None and plan.taken_bytes is not None else 0)


def _at_peak(step: Step, but_for: tuple[Literal["recomputation"], ...] = ()) -> int:
    return peak(step, but_for).reserved_bytes + (memory(step).host_total if step.on_cpu else 0)


def probing(precision: Choice, recompute: Choice, rest: Choice, *, sharded: bool) -> Choice:
    """What a probe has: all but what needs other axes, or a sharding method, or is no matter of one sample.

    What shards gathers weights in the precision that they compute in, where autocast casts them in every layer: that is
    time, and bytes for backward. All that shard do it alike, so that one of them stands for all.
    """
    alone = (each for each in rest if getattr(each, "axis", None) is None and not _lacks(each) and not _no_probes(each))
    return (*(_SHARDING if sharded and precision else ()), *precision, *recompute, *alone)


def _no_probes(method: MethodConfig) -> bool:
    """Whether it is of states alone, or says into how many micro-batches a step is cut, where a probe has its own."""
    return getattr(method, "num_micro_batches", None) is not None or (isinstance(method, Method) and method.of_state)


def _lacks(method: MethodConfig) -> bool:
    """Whether it needs another method beside it."""
    return isinstance(method, Method) and any(need.when(method) for need in method.needs)
