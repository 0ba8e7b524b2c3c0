"""Figures of a plan that people compare: speed, use of the hardware, price, in words and numbers."""

from __future__ import annotations

import dataclasses

from meshwright.cost import Step
from meshwright.planner.plan import Plan
from meshwright.planner.words import short_strategy

MOMENTS = {
    "gather": "as weights or buffers arrive for forward",
    "loss": "as the loss runs backward",
    "recomputation": "as the last block runs backward",
    "reduction": "as the last gradients are reduced",
    "update": "at the update",
}
_BILLION = 1e9


def short(plan: Plan) -> str:
    """A strategy in one line: its axes, and the methods with what is not their default."""
    return short_strategy(plan.strategy, plan.step.axes)


def with_micro_batches(plan: Plan) -> str:
    """:func:`short`, and how a batch is cut."""
    return f"{short(plan)}; {plan.step.num_micro_batches} x {plan.micro_batch}"


def every_step(plan: Plan) -> tuple[Step, ...]:
    """The step of every rank of the pipeline, or the one step of all."""
    return plan.steps or (plan.step,)


def per_gpu(plan: Plan) -> float | None:
    """Tokens per second and device; None where a sample has no number of tokens, or nothing is known of time."""
    whole = plan.forecast.tokens_per_s if plan.forecast is not None else None
    return whole / plan.forecast.cluster.num_devices if whole is not None and plan.forecast is not None else None


def model_flops_per_s(plan: Plan) -> float | None:
    """FLOP/s per device that the model needs: forward and backward, recomputation not counted.

    Of attention's scores under a causal mask only the half that is needed counts. None where FLOPs or time are unknown.
    """
    steps = every_step(plan)
    if plan.forecast is None or any(step.flops is None for step in steps):
        return None
    flops = sum((step.flops or 0) * step.num_micro_batches for step in steps) / len(steps)
    return flops / plan.forecast.time.step_time_s


def mfu(plan: Plan) -> float | None:
    """Model FLOPs utilisation (Chowdhery et al. 2022): of the dense peak of the precision that products run in."""
    rate = model_flops_per_s(plan)
    if rate is None or plan.forecast is None:
        return None
    return rate / plan.forecast.cluster.device.peak_flops_per_s(_precision(plan))


def _precision(plan: Plan) -> str:
    ops = [op.dtype for step in every_step(plan) for block in step.blocks for op in block.ops if op.kind == "matmul"]
    if ops:
        return max(sorted(set(ops)), key=ops.count)
    halves = {"amp_native", "half"} & set(plan.strategy.names)
    return "half" if halves or plan.step.compute_itemsize == 2 else "fp32"


def price_per_billion_tokens(plan: Plan) -> float | None:
    """US dollars for 1e9 tokens; None where the device has no price, or a sample no number of tokens."""
    known = plan.forecast
    if known is None or known.price_per_step is None or known.tokens_per_sample is None:
        return None
    return known.price_per_step / (known.samples * known.tokens_per_sample) * _BILLION


def memory_classes(plan: Plan) -> dict[str, int]:
    """Bytes by class on the device at the peak of the rank that holds most, without what is empty."""
    held = plan.forecast.peak.memory if plan.forecast is not None else plan.memory
    every = ((field.name, getattr(held, field.name)) for field in dataclasses.fields(held))
    return {name: size for name, size in every if size and not name.startswith(("host_", "disk_"))}
