"""What ``amp_native`` and ``half`` share: a half-precision dtype, its short form, and what it asks of a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from meshwright.errors import StrategyError
from meshwright.methods.base import Method, Phase
from meshwright.methods.dtypes import HalfDType
from meshwright.methods.job import Job


class HalfPrecisionMethod(Method):
    """A method that computes in fp16 or bf16."""

    phase: ClassVar[Phase] = Phase.PRECISION

    dtype: HalfDType = "fp16"

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Reads a bare dtype."""
        return {"dtype": raw} if isinstance(raw, str | torch.dtype) else super().from_short(raw)

    def check(self, job: Job) -> None:
        """Refuses bf16 on a CUDA device that cannot compute in it."""
        if self.dtype == "bf16" and job.device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise StrategyError(
                f"{self.method_name}: this device cannot compute in bf16",
                expected="a CUDA device of compute capability 8.0 or above",
                got=torch.cuda.get_device_name(job.device),
                fix="use fp16",
            )
