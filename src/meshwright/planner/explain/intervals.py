"""Say how far off a predicted step time may be, and what nobody has reached, from published runs of the same kind.

[Note: intervals] ``benchmarks/plan_intervals.py`` predicts every published run as a user would, and writes which ratios
of measured to predicted step times four of five runs lie between, by kind of device and of layout, into
``intervals.json``. A plan takes the interval of its kind; where too few runs are known, that of its device, and last
that of its layout on all devices, twice as wide, since how fast kernels and links of the device are is not known.
The same file has the highest MFU that any run of a kind has reached, by precision.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

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


def step_interval(plan: Plan) -> Interval | None:
    """Return the interval of a plan's step time; None without a cluster, and on a machine that was measured itself."""
    if plan.forecast is None or plan.forecast.cluster.calibration is not None:
        return None
    device, kind = plan.forecast.cluster.device, layout_kind(plan.step.axes)
    name = f"{device.efficiency} devices"
    for key, basis, wider in (
        (f"{device.efficiency}/{kind}", f"published runs of such layouts on {name}", 1),
        (f"{device.efficiency}/{ANY}", f"published runs on {name}", 1),
        (f"{ANY}/{kind}", f"published runs of such layouts; none is known on {device.name}, so it is twice as wide", 2),
        (f"{ANY}/{ANY}", f"published runs; none is known on {device.name}, so it is twice as wide", 2),
    ):
        known = _known()["step_time"].get(key)
        if known is not None and known["runs"] >= FEWEST:
            low, high = known["low"] ** wider, known["high"] ** wider
            time = plan.forecast.time.step_time_s
            return Interval(time * low, time * high, known["runs"], basis)
    return None


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
        if known is not None and known["runs"] >= FEWEST:
            return known["mfu"], f"{known['runs']:,} published runs {basis} {device} devices"
    return None


@functools.cache
def _known() -> dict[str, Any]:
    return json.loads((resources.files("meshwright.planner.explain") / "intervals.json").read_text())  # type: ignore[no-any-return]
