"""What a calibration measures: one kernel or collective, in the words of the cost model, with its seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from meshwright.cost import Op
from meshwright.cost.kernels import Machine, backward_s, forward_s
from meshwright.planner.measure.timing import Timing


@dataclass(frozen=True)
class Sample:
    """One kernel, forward or forward and backward.

    Args:
        part: Which constant of the model it is there for.
        label: For people.
        op: As the cost model knows it.
        backward: Whether its backward ran, too.
        timing: Seconds of one call; None before it was measured.
        run: Calls it.
    """

    part: str
    label: str
    op: Op
    backward: bool = False
    timing: Timing | None = None
    run: Callable[[], object] | None = dataclasses.field(default=None, compare=False)

    def predicted_s(self, machine: Machine) -> float:
        """What the cost model says."""
        return forward_s(self.op, machine) + (backward_s(self.op, machine) if self.backward else 0.0)


@dataclass(frozen=True)
class LinkSample:
    """One collective of one size over a tier of links; ``kind`` and ``num_bytes`` as in ``Traffic``."""

    tier: str  # "intra" or "inter"
    kind: str
    num_bytes: int
    timing: Timing


@dataclass(frozen=True)
class Residual:
    """How far the model with its fitted constants is off what was measured, as fractions."""

    part: str
    num_samples: int
    median: float
    worst: float


def residual(part: str, pairs: Iterable[tuple[float, float]]) -> Residual:
    """Of ``(predicted, measured)`` seconds."""
    off = sorted(abs(predicted / measured - 1) for predicted, measured in pairs)
    return Residual(part, len(off), off[len(off) // 2] if off else 0.0, off[-1] if off else 0.0)


def fitted_factor(terms: Iterable[tuple[float, float, float]]) -> float:
    """The x for which ``fixed + varying * x`` is nearest to what was measured, in relative error (least squares).

    Args:
        terms: ``(fixed, varying, measured)`` seconds.

    Returns:
        Never less than 0.
    """
    above, below = 0.0, 0.0
    for fixed, varying, measured in terms:
        above += varying / measured * (1 - fixed / measured)
        below += (varying / measured) ** 2
    return max(above / below, 0.0) if below else 0.0
