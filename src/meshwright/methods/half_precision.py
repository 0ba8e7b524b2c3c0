"""Compute in half precision: `amp_native` over fp32 parameters, `half` with fp32 master weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, model_validator
from torch.distributed.tensor import DTensor

from meshwright.cost import HALF, Placement, ProductDtype, Step
from meshwright.errors import StrategyError
from meshwright.methods.base import Conflict, HalfDType, Job, Method, Phase, half_dtype, itemsize, torch_dtype
from meshwright.methods.job import Precision
from meshwright.methods.planner_hooks import ComputeDtypes, Role, SearchScope
from meshwright.nn import widen, wrap_method
from meshwright.nn.batches import cast_floating
from meshwright.runtime.torch_internals.operators import cast_grouped_products
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
    short_forms: ClassVar[Mapping[type, str]] = {str: "dtype", torch.dtype: "dtype"}
    role: ClassVar[Role | None] = Role.PRECISION
    product_dtype: ClassVar[ProductDtype | None] = HALF

    dtype: HalfDType = "fp16"
    loss_scale: LossScaleConfig | None = None
    """Policy of the fp16 loss scale; None: the defaults of torch's GradScaler."""

    def on_half(self, half_dtype: str) -> Self:
        """See :class:`~meshwright.methods.planner_hooks.PlannerHooks`."""
        if "dtype" in self.model_fields_set:
            return self
        return self.parse({key: getattr(self, key) for key in self.model_fields_set} | {"dtype": half_dtype})

    def scale_loss(self, job: Job) -> None:
        """Ask for loss scaling where gradients would underflow without: in fp16."""
        job.optimizer.loss_scaling = self.dtype == "fp16"
        job.optimizer.loss_scale = self.loss_scale.model_dump() if self.loss_scale is not None else {}

    def scale_cost(self, step: Step) -> Step:
        """Mark that the host waits to read whether fp16 gradients overflowed: the twin of :meth:`scale_loss`."""
        return step.replace(waits_to_update=self.dtype == "fp16")

    def widen(self, job: Job) -> None:
        """Let products and attention run in fp32 on CPUs that are slow in bf16."""
        if self.widens(job.strategy):
            widen(job.model, job.device)

    def widens(self, strategy: Strategy) -> bool:
        """Return whether :meth:`widen` changes the model; compiled models are left as they are."""
        return self.dtype == "bf16" and "compile" not in strategy

    def check(self, job: Job) -> None:
        """Refuse bf16 on a CUDA device that cannot compute in it."""
        if self.dtype == "bf16" and half_dtype(job.device) != "bf16":
            raise StrategyError(
                f"{self.method_name}: this device cannot compute in bf16",
                expected="a CUDA device of compute capability 8.0 or above",
                got=torch.cuda.get_device_name(job.device),
                fix="use fp16",
            )


# --- ``amp_native``: parameters stay in fp32, products are computed in half precision


class AmpNative(HalfPrecisionMethod):
    """Runs the model and the loss under autocast; fp16 adds dynamic loss scaling and skips overflowing steps.

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
    def search_options(cls, scope: SearchScope) -> tuple[Self, ...]:
        """Try it in the devices' half precision: its gradients add up in fp32."""
        return (cls.parse(scope.half_dtype),) if scope.half_dtype is not None else ()

    def compute_dtypes(self, *, sharded: bool) -> ComputeDtypes:
        """Compute under autocast; parameters are gathered in the same precision."""
        return ComputeDtypes(self.dtype if sharded else None, self.dtype)

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Accept ATorch's ``enabled``, which can only be true: a disabled method is left out of the strategy."""
        if keys.pop("enabled", True) is not True:
            raise StrategyError(
                "amp_native is in the strategy and disabled",
                got="enabled=False",
                fix="leave the method out",
                expected="a method that is on",
            )
        return keys

    def apply(self, job: Job) -> None:
        """Wrap forward (and generate) and the loss in autocast."""
        dtype = torch_dtype(self.dtype)

        def in_autocast(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with torch.autocast(job.device.type, dtype=dtype):
                return forward(*args, **kwargs)

        self.widen(job)
        cast_grouped_products(job.device.type)
        wrap_method(job.model, "forward", in_autocast)
        if hasattr(type(job.model), "generate"):
            wrap_method(job.model, "generate", in_autocast)
        loss_func = job.loss_func
        job.loss_func = lambda inputs, outputs: in_autocast(loss_func, inputs, outputs)
        job.sharding.precision = Precision(compute=self.dtype, reduce="fp32")
        self.scale_loss(job)
        job.optimizer.skip_nonfinite = self.skip_if_nonfinite

    def cost(self, step: Step) -> Step:
        """Gather in half precision and reduce in fp32 where parameters are sharded; weights and gradients stay fp32."""
        step = self.scale_cost(step)
        if step.shard_axis is None:
            return step
        return step.replace(compute_itemsize=itemsize(self.dtype), reduce_itemsize=itemsize("fp32"))


def mixed_precision(dtype: str) -> AmpNative:
    """Return the method that computes in half precision beside fp32 parameters."""
    return AmpNative.parse(dtype)


# --- ``half``: the whole model in half precision, with fp32 master weights for the optimizer


class Half(HalfPrecisionMethod):
    """Casts parameters, buffers and floating inputs to ``dtype``; the loss is computed in fp32.

    Complex parameters and buffers stay as they are: there is no complex half precision to train in.

    The optimizer updates fp32 master weights, without which most updates round to nothing. Under zero1, zero2 and fsdp
    the fp32 shard is the master: parameters are gathered and gradients reduced in ``dtype``; parameters that they leave
    whole have masters. fp16 adds dynamic loss scaling.

    Config: ``"fp16"`` or ``"bf16"``, or keys. ``master_weights=False`` updates half-precision weights directly.
    """

    method_name: ClassVar[str] = "half"
    summary: ClassVar[str] = "half-precision parameters and arithmetic, fp32 master weights"
    effect: ClassVar[str] = (
        "memory: weights, activations / 2, and a master. Time: half-precision products. Communication: / 2"
    )
    seed_name: ClassVar[str | None] = "ATorch: half"

    master_weights: bool = True

    @classmethod
    def search_options(cls, scope: SearchScope) -> tuple[Self, ...]:
        """Try it only where a user includes it: it is faster than ``amp_native``, and less exact."""
        return ()

    def compute_dtypes(self, *, sharded: bool) -> ComputeDtypes:
        """Compute with parameters in half precision, and the loss in fp32."""
        return ComputeDtypes(self.dtype, output="fp32")

    def apply(self, job: Job) -> None:
        """Cast the model where it is replicated, or ask the sharding method to gather in half."""
        dtype = torch_dtype(self.dtype)
        prepare_input, loss_func = job.prepare_input, job.loss_func
        job.prepare_input = lambda data, device: cast_floating(prepare_input(data, device), dtype)
        # Callers of the loss hold what they pass to it: outputs in half precision would stay beside the wide ones.
        job.prepare_output = widened = lambda outputs: cast_floating(outputs, torch.float32)
        job.loss_func = lambda inputs, outputs: loss_func(inputs, widened(outputs))  # in loops written by hand, too
        self.widen(job)
        self.scale_loss(job)
        if job.shard_axis is not None and self.master_weights:
            job.sharding.precision = Precision(compute=self.dtype, reduce=self.dtype, casts_whole=True)
            _cast_buffers(job.model, dtype)
        else:
            _cast_parameters(job.model, dtype)
            _cast_buffers(job.model, dtype)
            job.optimizer.master_weights = self.master_weights

    def cost(self, step: Step) -> Step:
        """Halve the bytes of weights and gradients and add a master; or gather and reduce in half precision."""
        size = itemsize(self.dtype)
        step = self.scale_cost(step).replace(buffers_itemsize=size)
        if step.shard_axis is not None and self.master_weights:
            return step.replace(compute_itemsize=size, reduce_itemsize=size, whole_itemsize=size)
        halved = step.replace(
            parameters=Placement(itemsize=size),
            gradients=Placement(itemsize=size),
            compute_itemsize=size,
            reduce_itemsize=size,
        )
        if self.master_weights:
            # The half-precision gradient is freed when its fp32 copy is made: only the copy lives through the update.
            # So are the states in fp32, also those traced on a model that was in half precision already.
            return halved.replace(gradients=Placement(itemsize=4), optimizer=Placement(itemsize=4), master=Placement())
        return halved.replace(optimizer=Placement(itemsize=size))


def _cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    # Not by ``model.to``, which would drop the imaginary part of complex numbers.
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        cast = parameter.detach().to(dtype)
        if isinstance(parameter, DTensor):
            torch.utils.swap_tensors(parameter, torch.nn.Parameter(cast, requires_grad=parameter.requires_grad))
        else:
            parameter.data = cast


def _cast_buffers(model: torch.nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))
