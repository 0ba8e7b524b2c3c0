"""Trace what a search by formulas has found.

A formula predicts a strategy of a known family in a millisecond, a trace of the model in a second: formulas choose
among thousands of candidates, and the figures that a user sees are those of the model itself, as of any other.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from meshwright.errors import MeshwrightError
from meshwright.planner.plans import Plan, Subject
from meshwright.planner.search.search_state import Found, Objective, SearchState, rank_of_plan
from meshwright.planner.search.time_limit import OutOfTimeError, TimeLimit

_TRIES = 3
"""Searches by formulas: where nothing fits that was found, by their memory, the limit is lowered by as much."""


def search_and_trace(
    search: Callable[[int], Found],
    subject: Subject,
    limit_bytes: int,
    objective: Objective,
    top: int,
    limit_s: float | None,
) -> Found | None:
    """Search by formulas, trace what is found, and rank it by what the traces say.

    Args:
        search: Searches by formulas within so many bytes of a device.
        subject: The model that is traced.
        limit_bytes: Bytes that a device may hold.
        objective: What plans are ranked by.
        top: How many plans are kept.
        limit_s: Seconds of processor time for the traces, after which those that are left stay untraced and are left
            out; None: no limit.

    Returns:
        What was found; None where no plan that formulas find fits by its trace.

    Raises:
        StrategyError: When nothing fits by the formulas.
    """
    started, within = time.perf_counter(), limit_bytes
    for _ in range(_TRIES):
        found = search(within)
        state, refused = _traced(found.plans, subject, objective, top, TimeLimit(limit_s))
        if state.plans:
            return dataclasses.replace(
                found,
                plans=tuple(plan for _, plan in state.plans),
                too_large=(*state.too_large, *found.too_large),
                refused=(*found.refused, *refused),
                num_predicted=found.num_predicted + state.num_predicted,
                seconds=time.perf_counter() - started,
                is_complete=found.is_complete and not state.stopped,
                out_of_time=found.out_of_time or state.stopped,
            )
        if not state.too_large:
            return None
        least = state.too_large[0]
        within = int(within * min((least.limit_bytes or 0) / least.needed_bytes, 1.0))
    return None


def _traced(
    plans: Sequence[Plan], subject: Subject, objective: Objective, top: int, limit: TimeLimit
) -> tuple[SearchState, list[tuple[str, str]]]:
    """Return the state of a search that has traced these plans, and those that the model refuses."""
    state, refused = SearchState(top), list[tuple[str, str]]()
    with limit.watched():
        for plan in plans:
            try:
                traced = subject.plan(plan.strategy, plan.step.num_micro_batches)
            except OutOfTimeError:
                state.stopped = True
                break
            except MeshwrightError as error:
                refused.append((str(plan.strategy), error.what))
                continue
            state.num_predicted += 1
            if traced.fits:
                state.add(rank_of_plan(traced, objective), traced)
            else:
                state.add_too_large(traced)
    return state, refused
