"""The plan to train under, found by running the best few."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.errors import StrategyError
from meshwright.planner.measure.dry_runs import Measured, RunCandidate, measure
from meshwright.planner.plan import Plan


def measured_best(
    plans: Sequence[Plan], run_candidate: RunCandidate, time_limit: float
) -> tuple[Plan, str, list[Measured]]:
    """The plan that was fastest, and one line that says so; see :func:`measure`.

    Args:
        plans: Best first, by prediction.
        run_candidate: Runs one.
        time_limit: Seconds for all of them together.

    Raises:
        ConfigError: When the limit is too short.
        StrategyError: When every candidate failed.
    """
    results = measure(plans, run_candidate, time_limit)
    best = results[0]
    if best.step_time_s is None:
        raise StrategyError(
            "Every candidate failed when it was run",
            expected="one that trains a few steps",
            got="; ".join(f"{each.plan.strategy}: {each.error}" for each in results),
            fix="make the model train under one of them, or name a strategy yourself",
        )
    return best.plan, _reason(results, len(plans)), results


def _reason(results: Sequence[Measured], num_plans: int) -> str:
    """Says over how many steps each was timed: what fell out early may have a smaller figure, by chance."""
    best = results[0]
    ran = "; ".join(
        f"{each.plan.strategy} "
        + (f"{each.step_time_s:.3g} s over {each.num_steps}" if each.step_time_s is not None else f"{each.error}")
        for each in results[1:]
    )
    assert best.step_time_s is not None
    return (
        f"chose {best.plan.strategy}: the fastest of {len(results)} that were run "
        f"(of the {num_plans} predicted to be best), "
        f"{best.step_time_s:.3g} s a step over {best.num_steps} steps" + (f"; {ran}" if ran else "")
    )
