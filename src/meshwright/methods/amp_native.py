"""``amp_native``: automatic mixed precision; parameters stay fp32, products are computed in half. Seed: ATorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from meshwright.cost import Step
from meshwright.errors import StrategyError
from meshwright.methods.dtypes import itemsize, torch_dtype
from meshwright.methods.half_precision import HalfPrecisionMethod
from meshwright.methods.job import Job, Precision
from meshwright.methods.law import Conflict
from meshwright.nn import wrap_method


class AmpNative(HalfPrecisionMethod):
    """Autocast around the model and the loss; fp16 adds dynamic loss scaling and skips overflowing steps.

    Under zero1, zero2 and fsdp parameters are gathered in ``dtype`` and gradients reduced in fp32. CPUs without bf16
    instructions multiply bf16 numbers in fp32, which gives the same sums several times as fast; on x86 attention, too,
    runs in fp32 where torch's kernel is slower in bf16.

    Config: ``"bf16"``, or keys. ``skip_if_nonfinite`` skips steps whose gradients hold inf or nan under bf16 too.
    """

    method_name: ClassVar[str] = "amp_native"
    summary: ClassVar[str] = "mixed precision: fp32 weights, half-precision arithmetic"
    effect: ClassVar[str] = "memory: activations / 2. Time: half-precision products. Communication: gathers / 2"
    seed_name: ClassVar[str | None] = "ATorch: amp_native"
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            other="half",
            reason="they ask for different precisions",
            fix="give both the same dtype, or leave one out",
            when=lambda own, other: own.dtype != other.dtype,
            other_keys="another dtype",
        ),
    )

    skip_if_nonfinite: bool = False

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Takes ATorch's ``enabled``, which can only be true: a method that is off is left out."""
        if keys.pop("enabled", True) is not True:
            raise StrategyError(
                "amp_native is in the strategy and disabled",
                got="enabled=False",
                fix="leave the method out",
                expected="a method that is on",
            )
        return keys

    def apply(self, job: Job) -> None:
        """Wraps forward (and generate) and the loss in autocast."""
        dtype = torch_dtype(self.dtype)

        def in_autocast(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with torch.autocast(job.device.type, dtype=dtype):
                return forward(*args, **kwargs)

        self.widen(job)
        wrap_method(job.model, "forward", in_autocast)
        if hasattr(type(job.model), "generate"):
            wrap_method(job.model, "generate", in_autocast)
        loss_func = job.loss_func
        job.loss_func = lambda inputs, outputs: in_autocast(loss_func, inputs, outputs)
        job.precision = Precision(compute=self.dtype, reduce="fp32")
        self.scale_loss(job)
        job.skip_nonfinite = self.skip_if_nonfinite

    def cost(self, step: Step) -> Step:
        """Gathers in half and reduces in fp32 where parameters are sharded; weights and gradients stay as they are."""
        step = self.scale_cost(step)
        if step.shard_axis is None:
            return step
        return step.replace(compute_itemsize=itemsize(self.dtype), reduce_itemsize=itemsize("fp32"))
