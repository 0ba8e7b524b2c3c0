"""What ``amp_native`` and ``half`` share: a half-precision dtype, its short form, and what it asks of a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, model_validator

from meshwright.cost import Step
from meshwright.errors import StrategyError
from meshwright.methods.base import Method, Phase
from meshwright.methods.dtypes import HalfDType, half_dtype
from meshwright.methods.job import Job
from meshwright.nn import widen
from meshwright.strategy import Strategy


class LossScaleConfig(BaseModel):
    """The dynamic loss scale of fp16; see :class:`~meshwright.optim.LossScaler`. Names and meaning are ColossalAI's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    initial_scale: PositiveFloat = 2.0**16
    min_scale: PositiveFloat = 1.0
    growth_factor: PositiveFloat = 2.0
    backoff_factor: PositiveFloat = 0.5
    growth_interval: PositiveInt = 1000
    hysteresis: PositiveInt = 2
    max_scale: PositiveFloat = 2.0**32

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(f"initial_scale from min_scale {self.min_scale} to max_scale {self.max_scale}")
        if not self.backoff_factor < 1 < self.growth_factor:
            raise ValueError("backoff_factor below 1 and growth_factor above 1")
        return self


class HalfPrecisionMethod(Method):
    """A method that computes in fp16 or bf16."""

    phase: ClassVar[Phase] = Phase.PRECISION

    dtype: HalfDType = "fp16"
    loss_scale: LossScaleConfig | None = None
    """How the loss scale of fp16 moves; None: as torch's GradScaler does by default."""

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Reads a bare dtype."""
        return {"dtype": raw} if isinstance(raw, str | torch.dtype) else super().from_short(raw)

    def scale_loss(self, job: Job) -> None:
        """Asks for loss scaling where gradients would underflow without: in fp16."""
        job.loss_scaling = self.dtype == "fp16"
        job.loss_scale = self.loss_scale.model_dump() if self.loss_scale is not None else {}

    def scale_cost(self, step: Step) -> Step:
        """Twin of :meth:`scale_loss`: the host reads from the device whether gradients have overflowed."""
        return step.replace(waits_to_update=self.dtype == "fp16")

    def widen(self, job: Job) -> None:
        """Multiplies and attends in fp32 on CPUs that are slow in bf16."""
        if self.widens(job.strategy):
            widen(job.model, job.device)

    def widens(self, strategy: Strategy) -> bool:
        """Whether it does; what is compiled is left as it is."""
        return self.dtype == "bf16" and "compile" not in strategy

    def check(self, job: Job) -> None:
        """Refuses bf16 on a CUDA device that cannot compute in it."""
        if self.dtype == "bf16" and half_dtype(job.device) != "bf16":
            raise StrategyError(
                f"{self.method_name}: this device cannot compute in bf16",
                expected="a CUDA device of compute capability 8.0 or above",
                got=torch.cuda.get_device_name(job.device),
                fix="use fp16",
            )
