"""How far predictions are off on one machine, by part of the step: found out by dry runs, kept in a file."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from meshwright.cost import StepTime
from meshwright.errors import ConfigError
from meshwright.planner.measure.dry_runs import Measured
from meshwright.planner.plan import Plan

FORMAT, VERSION = "meshwright.corrections", 1
PARTS = ("compute_s", "inline_s", "exposed_s", "copies_s", "bubble_s", "update_s", "overhead_s")
_TIE = 0.05  # how strongly a part's factor is held to the others' where runs do not tell them apart
_SMALLEST = 0.1


@dataclass(frozen=True)
class Corrections:
    """Measured over predicted seconds of every part of a step.

    Args:
        factors: By the names of the parts of ``StepTime``; parts that are not there are taken as predicted.
        num_runs: That they were found from.
    """

    factors: Mapping[str, float] = field(default_factory=dict)
    num_runs: int = 0

    def step_time_s(self, time: StepTime) -> float:
        """Of a step, corrected."""
        return sum(getattr(time, part) * self.factors.get(part, 1.0) for part in PARTS)

    def ranked(self, plans: Sequence[Plan]) -> list[Plan]:
        """Fastest first, by corrected predictions; those without a forecast last, in their order."""
        return sorted(
            plans, key=lambda plan: float("inf") if plan.forecast is None else self.step_time_s(plan.forecast.time)
        )

    def save(self, path: Path) -> None:
        """Writes them as JSON."""
        whole = {"format": FORMAT, "version": VERSION, "num_runs": self.num_runs, "factors": dict(self.factors)}
        path.write_text(json.dumps(whole, indent=2) + "\n")


def read_corrections(path: Path) -> Corrections:
    """Reads what :meth:`Corrections.save` has written; no corrections where there is no file.

    Raises:
        ConfigError: When it is another file.
    """
    if not path.exists():
        return Corrections()
    try:
        data = json.loads(path.read_text())
        if (data.get("format"), data.get("version")) != (FORMAT, VERSION) or set(data["factors"]) - set(PARTS):
            raise ValueError(f"format {data.get('format')!r}, version {data.get('version')!r}")
        factors = {name: float(value) for name, value in data["factors"].items()}
        if not all(0 < factor < math.inf for factor in factors.values()):
            raise ValueError(f"factors {factors}")
        return Corrections(factors, int(data["num_runs"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"The corrections in {path} cannot be used",
            expected=f'JSON with "format": "{FORMAT}", version {VERSION}, and factors of {", ".join(PARTS)}',
            got=f"{type(error).__name__}: {error}",
            fix="delete the file: it is written anew after dry runs",
        ) from None


def corrections_of(measured: Sequence[Measured]) -> Corrections:
    """The factors that bring predictions nearest to what was measured (ridge regression of relative errors).

    Runs that fewer parts than factors tell apart leave the others at the common factor: the median of measured over
    predicted. Plans without a forecast, and those that failed, say nothing.
    """
    ran = [
        (plan.forecast.time, seconds)
        for plan, seconds in ((each.plan, each.step_time_s) for each in measured)
        if plan.forecast is not None and seconds is not None
    ]
    if not ran:
        return Corrections()
    parts = np.array([[getattr(time, part) / seconds for part in PARTS] for time, seconds in ran])
    common = float(np.median([seconds / time.step_time_s for time, seconds in ran]))
    tied = parts.T @ parts + _TIE * np.eye(len(PARTS))
    off = np.linalg.solve(tied, parts.T @ (1 - parts.sum(axis=1) * common))
    factors = np.maximum(common + off, _SMALLEST * common)
    return Corrections(dict(zip(PARTS, map(float, factors), strict=True)), len(ran))


def corrected(time: StepTime, corrections: Corrections) -> StepTime:
    """The same step with every part as it is on this machine."""
    parts = {part: getattr(time, part) * corrections.factors.get(part, 1.0) for part in PARTS}
    return dataclasses.replace(time, **parts, step_time_s=corrections.step_time_s(time))
