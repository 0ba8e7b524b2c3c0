"""Strategies and figures in few words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.cost import StepTime
    from meshwright.strategy import MethodConfig, Strategy

_TIME_PARTS = {
    "compute_s": "computing",
    "inline_s": "collectives that blocks wait for",
    "exposed_s": "gathers and reductions that do not hide or slow computing down",
    "copies_s": "copies between memories that do not hide",
    "bubble_s": "pipeline bubble",
    "update_s": "update",
    "overhead_s": "launch, batch and loss",
}
# The methods of axes go without saying where nothing else is said of them.
_SAID_BY_AXES = {"tensor_parallel", "pipeline_parallel", "sequence_parallel", "context_parallel", "expert_parallel"}


def short_strategy(strategy: Strategy, axes: Sequence[tuple[str, int]]) -> str:
    """A strategy in one line: ``"tensor 8 x zero 4: fsdp, amp_native bf16"``."""
    mesh = " x ".join(f"{name} {size}" for name, size in axes if size > 1)
    named = [_method(method) for method in strategy.methods if method.method_name != "parallel_mode"]
    own = [text for text in named if text not in _SAID_BY_AXES]
    return ": ".join(part for part in (mesh or "one rank", ", ".join(own)) if part)


def _method(method: MethodConfig) -> str:
    keys = method.model_dump(exclude_defaults=True, mode="json")
    return " ".join([method.method_name, *(_value(key, value) for key, value in keys.items())])


def _value(key: str, value: object) -> str:
    """Words speak for themselves, numbers need the name of their key."""
    if isinstance(value, str):
        return value.rsplit(".", 1)[-1]
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return "/".join(_value(key, each) for each in value)
    return f"{key}={value}"


def time_parts(time: StepTime) -> dict[str, float]:
    """Seconds by part; they add up to the step."""
    names = (field.name for field in dataclasses.fields(time) if field.name != "step_time_s")
    return {name: getattr(time, name) for name in names}


def part_name(part: str) -> str:
    """A part of the step in words."""
    return _TIME_PARTS.get(part, part.removesuffix("_s").replace("_", " "))


def percent(share: float, digits: int = 0) -> str:
    """A share as people read it."""
    return f"{100 * share:.{digits}f} %"


def seconds(value: float) -> str:
    """A duration as people read it."""
    if abs(value) >= 100:
        return f"{value:.0f} s"
    if abs(value) >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if abs(value) >= 1e-4 or value == 0 else f"{value * 1e6:.0f} us"


def number(value: float) -> str:
    """A rate as people read it: ``1.23 M``."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{value / limit:.2f} {unit}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
