"""``gradient_accumulation``: how many micro-batches make a step, as the strategy says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import PositiveInt

from meshwright.cost import Step
from meshwright.methods.base import Method, Phase
from meshwright.methods.job import Job
from meshwright.methods.law import Conflict


class GradientAccumulation(Method):
    """``Accelerated.step`` cuts each rank's batch into so many micro-batches and updates once.

    It is ``accelerate(num_micro_batches=)`` inside the strategy, so that a strategy file says what its plan was made
    for. When gradients travel is the sharding method's to decide: plain data parallelism and zero1 reduce them once,
    zero2 and fsdp for every micro-batch.

    Config: the number, or ``{"num_micro_batches": 4}``.
    """

    method_name: ClassVar[str] = "gradient_accumulation"
    phase: ClassVar[Phase] = Phase.OPTIMIZER
    summary: ClassVar[str] = "a step's batch runs in several micro-batches"
    effect: ClassVar[str] = (
        "memory: activations / n, gradients kept between micro-batches. Time: smaller products. "
        "Communication: zero2 and fsdp n times, others as before"
    )
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            other="pipeline_parallel",
            reason="a step has one number of micro-batches",
            fix="leave gradient_accumulation out: a pipeline accumulates",
            when=lambda own, other: other.num_micro_batches not in (None, own.num_micro_batches),
            other_keys="another num_micro_batches",
        ),
    )

    num_micro_batches: PositiveInt

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Reads the number."""
        is_count = isinstance(raw, int) and not isinstance(raw, bool)
        return {"num_micro_batches": raw} if is_count else super().from_short(raw)

    def notices(self) -> list[str]:
        """Says when it changes nothing."""
        one = self.num_micro_batches == 1
        return ["gradient_accumulation changes nothing: one micro-batch is the whole batch"] if one else []

    def apply(self, job: Job) -> None:
        """The plan's number is this one already."""
        job.num_micro_batches = self.num_micro_batches

    def cost(self, step: Step) -> Step:
        """The same for the simulated step, whose micro-batch was traced with this number."""
        return step.replace(num_micro_batches=self.num_micro_batches)
