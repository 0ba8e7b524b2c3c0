"""The plan to train under, found by running the best few; what was learned about the machine is kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import ConfigError, StrategyError
from meshwright.planner.measure.corrections import Corrections, corrections_of, read_corrections
from meshwright.planner.measure.dry_runs import Measured, RunCandidate, measure
from meshwright.planner.plan import Plan
from meshwright.runtime import gather_from, rank, same_on_every_rank


def measured_best(
    plans: Sequence[Plan], run_candidate: RunCandidate, time_limit: float, *, corrections: Path | None = None
) -> tuple[Plan, str, list[Measured]]:
    """The plan that was fastest, and one line that says so; see :func:`measure`.

    Args:
        plans: Best first, by prediction.
        run_candidate: Runs one.
        time_limit: Seconds for all of them together.
        corrections: A file that keeps how far predictions are off on this machine, part by part of the step: where it
            exists, plans run in the order of their corrected predictions; rank 0 writes it anew. None keeps nothing.

    Raises:
        ConfigError: When the limit is too short.
        StrategyError: When every candidate failed.
    """
    if corrections is not None:
        known = gather_from(lambda: read_corrections(corrections) if rank() == 0 else None)[0]
        plans = known.ranked(plans)
    results = measure(plans, run_candidate, time_limit)
    if corrections is not None:
        _keep(corrections_of(results), corrections)
    best = results[0]
    if best.step_time_s is None:
        raise StrategyError(
            "Every candidate failed when it was run",
            expected="one that trains a few steps",
            got="; ".join(f"{each.plan.strategy}: {each.error}" for each in results),
            fix="make the model train under one of them, or name a strategy yourself",
        )
    return best.plan, _reason(results, len(plans)), results


def _keep(found: Corrections, file: Path) -> None:
    with same_on_every_rank():
        if rank() == 0 and found.num_runs:
            try:
                found.save(file)
            except OSError as error:
                raise ConfigError(
                    f"The corrections cannot be written to {file}",
                    expected="a file in a directory that this user may write",
                    got=str(error),
                    fix="name another file, or leave it out",
                ) from None


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
        f"chose {best.plan.strategy}: the fastest of {len(results)} that were run (of {num_plans} that fit), "
        f"{best.step_time_s:.3g} s a step over {best.num_steps} steps" + (f"; {ran}" if ran else "")
    )
