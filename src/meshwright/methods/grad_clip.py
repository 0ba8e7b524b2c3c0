"""``grad_clip``: gradients are scaled down to a largest norm, as the strategy says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from meshwright.cost import Step
from meshwright.errors import StrategyError
from meshwright.methods.base import Method, Phase
from meshwright.methods.job import Job

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class GradClip(Method):
    """Scales all gradients so that their common norm, over all ranks' shards, is at most ``max_norm`` (Pascanu 2013).

    It is ``accelerate(max_grad_norm=)`` inside the strategy, with other norms than the Euclidean one; under ``outer``
    every replica clips by its own norm.

    Config: the largest norm, or keys; 1.0 is the default.
    """

    method_name: ClassVar[str] = "grad_clip"
    phase: ClassVar[Phase] = Phase.OPTIMIZER
    summary: ClassVar[str] = "gradients are scaled down to a largest norm"
    effect: ClassVar[str] = "time: gradients are read, and written where they are clipped. Communication: one number"

    max_norm: _Positive = 1.0
    """In the gradients' units; the loss scale of fp16 is taken off before."""
    norm_type: Literal["inf"] | _Positive = 2.0
    """p of the p-norm; ``inf``: the largest magnitude."""

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Reads the largest norm."""
        is_number = isinstance(raw, int | float) and not isinstance(raw, bool)
        return {"max_norm": raw} if is_number else super().from_short(raw)

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Takes torch's ``float("inf")``, which JSON has no word for."""
        return {**keys, "norm_type": "inf"} if keys.get("norm_type") == float("inf") else keys

    def check(self, job: Job) -> None:
        """Refuses two largest norms."""
        if job.max_grad_norm not in (None, self.max_norm):
            raise StrategyError(
                "grad_clip and max_grad_norm name different norms",
                expected="one of the two, or the same number",
                got=f"{self} and max_grad_norm={job.max_grad_norm}",
                fix="leave max_grad_norm out: the strategy clips",
            )

    def apply(self, job: Job) -> None:
        """``Accelerated`` clips in every step."""
        job.max_grad_norm, job.grad_norm_type = self.max_norm, float(self.norm_type)

    def cost(self, step: Step) -> Step:
        """Nothing more: every step measures the norm."""
        return step
