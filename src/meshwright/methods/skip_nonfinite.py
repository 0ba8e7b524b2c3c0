"""``skip_nonfinite``: a step whose gradients hold inf or nan leaves the weights as they are, or ends training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from meshwright.cost import Step
from meshwright.methods.base import Method, Phase
from meshwright.methods.half_precision import HalfPrecisionMethod
from meshwright.methods.job import Job
from meshwright.methods.law import Conflict

_FP16 = "fp16 finds its loss scale by gradients that overflow"


def _in_fp16(own: Any, other: Any) -> bool:
    return bool(own.action == "stop" and other.dtype == "fp16")


class SkipNonfinite(Method):
    """Looks at the norm of all gradients before every update; all ranks decide alike, by one number.

    ``skip`` goes on with the next step: weights, states and learning rate stay as they are, and
    ``Accelerated.num_skipped_steps`` counts. ``stop`` raises a :class:`~meshwright.errors.NonFiniteError` on every
    rank, with the weights as they were, for a debugger or a restart from the last checkpoint.

    Config: None, ``"skip"`` or ``"stop"``.
    """

    method_name: ClassVar[str] = "skip_nonfinite"
    phase: ClassVar[Phase] = Phase.OPTIMIZER  # behind the precision, which may ask for the same
    summary: ClassVar[str] = "steps whose gradients hold inf or nan are skipped, or end training"
    effect: ClassVar[str] = "time: the host waits for the norm in every step"
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        *(
            Conflict(
                other=name,
                reason=_FP16,
                fix="use skip, or bf16",
                when=_in_fp16,
                own_keys="action='stop'",
                other_keys="dtype='fp16'",
            )
            for name in ("amp_native", "half")
        ),
        Conflict(
            other="outer",
            reason="a replica that stops alone leaves the others waiting",
            fix="use skip: each replica skips steps of its own",
            when=lambda own, _: own.action == "stop",
            own_keys="action='stop'",
        ),
    )

    action: Literal["skip", "stop"] = "skip"

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Reads the action."""
        return {"action": raw} if isinstance(raw, str) else super().from_short(raw)

    def apply(self, job: Job) -> None:
        """The optimizer is built with a guard that does it."""
        job.skip_nonfinite, job.stop_nonfinite = True, self.action == "stop"
        others = [method for method in job.strategy.methods if isinstance(method, HalfPrecisionMethod)]
        if any(method.dtype == "fp16" for method in others):
            job.notices.append("skip_nonfinite changes nothing beside fp16, whose loss scale skips such steps already")

    def cost(self, step: Step) -> Step:
        """Nothing more: every step measures the norm."""
        return step
