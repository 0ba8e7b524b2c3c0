"""What a family cannot be trained with, and what of a strategy its simulation passes over."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.cost import Device
from meshwright.errors import ModelError, StrategyError
from meshwright.methods import Checkpoint, ContextParallel, Fp8, PipelineParallel, Resolved
from meshwright.planner.family_ops import FamilyRun
from meshwright.planner.family_shape import BLOCK, Shape

_PASSED_OVER = {
    "module_replace": "module_replace: which kernels it exchanges is not simulated for a family",
}


def check_family(shape: Shape, device: Device, resolved: Resolved, run: FamilyRun) -> None:
    """Refuses meshes that cannot divide the model, precisions that the device has not, and schedules that cannot run.

    Raises:
        ModelError, StrategyError: Saying what could be.
    """
    sizes = dict(resolved.axes)
    _check_device(device, resolved)
    _check_heads(shape, sizes)
    _check_tokens(shape, resolved, sizes)
    _check_experts(shape, sizes)
    method, ranks = resolved.strategy.get("pipeline_parallel"), sizes.get("pipeline", 1)
    if isinstance(method, PipelineParallel) and ranks > 1:
        method.check_numbers(shape.layers, ranks, run.num_micro_batches)
    _check_recomputed(resolved)


def gaps_of(resolved: Resolved) -> tuple[str, ...]:
    """What was not predicted, and why."""
    return tuple(said for name, said in _PASSED_OVER.items() if name in resolved.strategy)


def _check_device(device: Device, resolved: Resolved) -> None:
    strategy = resolved.strategy
    if isinstance(strategy.get("fp8"), Fp8) and device.fp8_flops_per_s is None:
        raise StrategyError(
            f"fp8: a {device.name} has no 8-bit products",
            expected="a device with fp8_flops_per_s, such as H100, H200, B200, MI300X or L4",
            got=device.name,
            fix="leave fp8 out, or take another device",
        )
    for name in ("amp_native", "half"):
        method = strategy.get(name)
        if method is not None and getattr(method, "dtype", "") == "bf16" and not device.bf16:
            raise StrategyError(
                f"{name}: a {device.name} cannot compute in bf16",
                expected="fp16, or a device with bf16",
                got=device.name,
                fix=f"use ('{name}', 'fp16')",
            )


def _check_heads(shape: Shape, sizes: Mapping[str, int]) -> None:
    tensor, sequence = sizes.get("tensor", 1), sizes.get("sequence", 1)
    kv_heads = shape.kv_heads or shape.heads
    if shape.heads % (tensor * sequence) or kv_heads % (tensor * sequence):
        raise ModelError(
            "The mesh cannot divide the model's heads",
            expected=f"tensor x sequence that divides {shape.heads} heads and {kv_heads} heads of keys and values",
            got=f"tensor={tensor}, sequence={sequence}",
            fix="choose smaller axes; a context axis divides tokens whatever the heads",
        )
    if shape.ffn_width % tensor:
        raise ModelError(
            "The tensor axis cannot divide the feed-forward layers",
            expected=f"a divisor of their width, {shape.ffn_width}",
            got=f"tensor={tensor}",
            fix="choose a smaller axis",
        )


def _check_tokens(shape: Shape, resolved: Resolved, sizes: Mapping[str, int]) -> None:
    context, sequence = sizes.get("context", 1), sizes.get("sequence", 1)
    method = resolved.strategy.get("context_parallel")
    balanced = isinstance(method, ContextParallel) and method.balance and context > 1
    chunks = sequence * context * (2 if balanced else 1)
    if shape.seq % chunks:
        raise ModelError(
            "The mesh cannot divide the tokens of a sample",
            expected=f"chunks of equal length: a number that divides {shape.seq}",
            got=f"{chunks} chunks for sequence={sequence}, context={context}",
            fix="choose smaller axes, or another length",
        )


def _check_experts(shape: Shape, sizes: Mapping[str, int]) -> None:
    ranks = sizes.get("expert", 1)
    if ranks > 1 and (shape.experts == 1 or shape.experts % ranks):
        raise ModelError(
            "The expert axis cannot divide the model's experts",
            expected=f"a divisor of {shape.experts} experts" if shape.experts > 1 else "a model with experts",
            got=f"expert={ranks}",
            fix="choose another axis",
        )


def _check_recomputed(resolved: Resolved) -> None:
    method = resolved.strategy.get("checkpoint")
    wanted = method.wrap_class if isinstance(method, Checkpoint) else None
    if wanted is not None and not any(name.rsplit(".", 1)[-1] == BLOCK for name in wanted):
        raise ModelError(
            "checkpoint names classes that a family does not have",
            expected=f"no wrap_class, or {BLOCK}",
            got=", ".join(wanted),
            fix="leave wrap_class out: blocks are recomputed",
        )
