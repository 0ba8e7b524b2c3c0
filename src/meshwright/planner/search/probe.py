"""What one rank computes and keeps for a sample, found out once for all that only divides samples."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from meshwright.cost import Step, memory, peak
from meshwright.methods import Method
from meshwright.planner.plan import Plan
from meshwright.planner.search.space import Choice, choices
from meshwright.strategy import MethodConfig

_SHARDING = choices("zero1")[0]


@dataclass(frozen=True)
class Probe:
    """What one rank computes and keeps for a micro-batch of one sample.

    Args:
        step: After the twins of its axes, precision and recomputation.
        kept_bytes: From forward to backward.
        slack: By how much more is taken of the limit than tensors need.
    """

    step: Step
    kept_bytes: int
    slack: float

    @property
    def kept_inside_bytes(self) -> int:
        """Of ``kept_bytes``, what does not lie behind the last block."""
        known = self.step.activations
        return max(self.kept_bytes - (known.outside_bytes if known is not None else 0), 0)

    @property
    def behind_bytes(self) -> int:
        """What whoever has the loss holds behind the last block as it runs backward: logits and their gradient."""
        known = self.step.activations
        return min(known.outside_bytes, self.kept_bytes) + known.loss_bytes if known is not None else 0

    @property
    def hosted_bytes(self) -> int:
        """What forward sends to the host, and backward brings back."""
        return self.step.activations.hosted_bytes if self.step.activations is not None else 0

    @functools.cached_property
    def num_blocks(self) -> int:
        """Blocks that a pipeline can deal out."""
        return sum(block.count for block in self.step.blocks if block.name != "outside")


def probe_of(plan: Plan) -> Probe:
    """What a plan says of its rank's work."""
    return Probe(plan.step, plan.memory.activations or 0, _slack(plan))


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


def _slack(plan: Plan) -> float:
    if plan.taken_bytes is None:
        return 1.0
    on_host = memory(plan.step).host_total if plan.step.on_cpu else 0
    return plan.taken_bytes / max(peak(plan.step).reserved_bytes + on_host, 1)
