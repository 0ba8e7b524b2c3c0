"""Say how far off a predicted step time may be, and what nobody has reached, from published runs of the same kind.

[Note: intervals] ``benchmarks/plan_intervals.py`` predicts every published run by what is known of its engine, and
writes which ratios of measured to predicted step times four of five runs lie between, by kind of device and of layout,
into ``intervals.json``: widened, so that this holds for runs of a project that the others say nothing of. A plan takes
the interval of its kind. Where too few runs are known of its very device, or of such layouts on it, the interval of
others is taken and is twice as wide. The same file has the highest MFU that any run of a kind has reached, by
precision.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from meshwright.cost import Device
from meshwright.planner.plans import Plan, seconds

FEWEST = 8  # runs from which on a kind has an interval of its own
ANY = "any"


@dataclass(frozen=True)
class Interval:
    """Step times between which four of five runs are expected.

    Args:
        low_s: The shorter one.
        high_s: The longer one.
        num_runs: Published runs that it is taken from.
        basis: Which runs these are.
    """

    low_s: float
    high_s: float
    num_runs: int
    basis: str

    def __str__(self) -> str:
        return f"{seconds(self.low_s)} to {seconds(self.high_s)} in four of five cases, by {self.num_runs} {self.basis}"


def layout_kind(axes: Sequence[tuple[str, int]]) -> str:
    """Return the kind of layout by which errors are told apart: what is hardest to predict names it."""
    sizes = dict(axes)
    divided = [axis for axis in ("expert", "pipeline", "tensor") if sizes.get(axis, 1) > 1]
    return divided[0] if divided else "data"


def kinds_of(device: Device, axes: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Return the kinds of runs whose errors may be a plan's: of its device and layout, then of fewer of both."""
    return tuple(f"{each}/{kind}" for each in (device.efficiency, ANY) for kind in (layout_kind(axes), ANY))


def step_interval(plan: Plan) -> Interval | None:
    """Return the interval of a plan's step time; None without a cluster, and on a machine that was measured itself."""
    if plan.forecast is None or plan.forecast.cluster.calibration is not None:
        return None
    device, ratios = plan.forecast.cluster.device, _known()["step_time"]
    axes = (("expert", 2),) if _is_sparse(plan) else plan.step.axes
    kind = next(kind for kind in kinds_of(device, axes) if kind in ratios)
    (where, layout), known = kind.split("/"), ratios[kind]
    basis = ("published runs" if layout == ANY else "published runs of such layouts") + f" on {where} devices"
    basis = basis.removesuffix(f" on {ANY} devices")
    lacks = [f"on {device.name}"] if where == ANY or device.name not in _known()["devices"] else []
    lacks += ["of such layouts"] if layout == ANY else []
    basis += f"; too few are known {' and '.join(lacks)}, so it is twice as wide" if lacks else ""
    wider, time = 2 if lacks else 1, plan.forecast.time.step_time_s
    return Interval(time * known["low"] ** wider, time * known["high"] ** wider, known["runs"], basis)


def _is_sparse(plan: Plan) -> bool:
    """Return whether tokens use few of a model's parameters, as with experts: what these take is hardest to predict."""
    known = plan.forecast
    if known is None or known.tokens_per_sample is None or plan.model_flops is None:
        return False
    dense = 6 * plan.building.num_drawn * known.samples * known.tokens_per_sample
    return plan.model_flops * known.cluster.num_devices < dense / 2


def highest_mfu(plan: Plan, precision: str) -> tuple[float, str] | None:
    """Return the highest MFU of published runs on a plan's kind of device, and of which runs it is.

    Args:
        plan: The plan.
        precision: Of its products: ``"half"``, ``"fp8"``, ``"fp4"`` or ``"fp32"``.

    Returns:
        Of such layouts where enough runs of them are known, and of any otherwise; None where too few are known.
    """
    if plan.forecast is None:
        return None
    device = plan.forecast.cluster.device.efficiency
    for kind, basis in ((layout_kind(plan.step.axes), "of such layouts on"), (ANY, "on")):
        known = _known()["highest_mfu"].get(f"{device}/{kind}/{precision}")
        if known is not None:
            return known["mfu"], f"{known['runs']:,} published runs {basis} {device} devices"
    return None


@functools.cache
def _known() -> dict[str, Any]:
    return json.loads((resources.files("meshwright.planner.explain") / "intervals.json").read_text())  # type: ignore[no-any-return]
