"""Short runs of the best few plans on the real machine: successive halving within a time limit.

Every plan of a round runs equally many steps. The faster half goes on to the next round, which runs twice as many
(Jamieson and Talwalkar 2016), until one is left or the time is up. How a candidate runs is the caller's:

- in processes of its own (``run_in_processes``), where running out of memory, a crash or a hang is a result and not the
  end: for a program that is no rank itself;
- in the ranks that live already, which is all that a program can do that is one of them (``accelerate`` with
  ``time_limit``). There an error that every rank raises is a result; a rank that dies alone ends the program.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.errors import ConfigError
from meshwright.planner.plan import Plan
from meshwright.runtime import gather_objects, synchronize_device

NUM_CANDIDATES, FIRST_STEPS, WARMUP_STEPS = 6, 3, 1


@dataclass(frozen=True)
class Outcome:
    """One run of one candidate.

    Args:
        step_time_s: Seconds of a step, the median, each as long as on the slowest rank; None: it failed.
        seconds: From its start to its end.
        error: Why it failed.
        timed_out: Whether its time was up before it ended, or before it would have.
    """

    step_time_s: float | None
    seconds: float
    error: str | None = None
    timed_out: bool = False


RunCandidate = Callable[[Plan, int, float], Outcome]
"""``run(plan, num_steps, time_limit_s)``: trains a few steps under the plan. It never raises for what the plan does."""


@dataclass(frozen=True)
class Measured:
    """A plan that has run.

    Args:
        plan: As predicted.
        step_time_s: Of its longest run; None: it failed.
        num_steps: Of that run.
        num_rounds: It was in.
        error: Why it failed.
    """

    plan: Plan
    step_time_s: float | None
    num_steps: int
    num_rounds: int
    error: str | None = None


def measure(
    plans: Sequence[Plan],
    run_candidate: RunCandidate,
    time_limit: float,
    *,
    num_candidates: int = NUM_CANDIDATES,
    clock: Callable[[], float] = time.monotonic,
) -> list[Measured]:
    """Runs the first few plans and returns those that ran, the fastest first and failed ones last.

    In a world of several ranks all call it alike, and rank 0's clock decides for all.

    Args:
        plans: Best first, by prediction.
        run_candidate: Runs one.
        time_limit: Seconds for all of them together.
        num_candidates: So many plans of the list at most.

    Raises:
        ConfigError: When the limit is too short for one candidate, saying how long one takes.
    """
    check_time_limit(time_limit)
    halving = _Halving(run_candidate, clock() + time_limit, clock)
    alive, steps = list(plans[:num_candidates]), FIRST_STEPS
    while alive and halving.round(alive, steps):
        alive = halving.faster_half(alive)
        if len(alive) <= 1:
            break
        steps *= 2
    results = halving.results
    if halving.cut_short_s is not None:
        raise ConfigError(
            "time_limit is too short to run one candidate",
            expected=f"about {max(2 * halving.cut_short_s, 1):.0f} seconds or more",
            got=f"{time_limit:g}, and one takes {halving.cut_short_s:.1f} seconds or more",
            fix="give more time, or leave time_limit out to choose by prediction",
        )
    return results


def check_time_limit(time_limit: float | None) -> None:
    """Refuses what is not a duration; None is no limit and nothing to measure.

    Raises:
        ConfigError: Saying what it is.
    """
    if time_limit is None:
        return
    if not isinstance(time_limit, int | float) or isinstance(time_limit, bool) or not time_limit > 0:
        raise ConfigError(
            "time_limit is not a duration",
            expected="seconds above 0",
            got=repr(time_limit),
            fix="give seconds, or leave time_limit out",
        )


def step_times(step: Callable[[], Any], num_steps: int, device: torch.device) -> float:
    """Seconds of a step: the median of so many, after one that warms up; each as long as on the slowest rank."""
    times = []
    for index in range(WARMUP_STEPS + num_steps):
        synchronize_device(device)
        start_s = time.perf_counter()
        step()
        synchronize_device(device)
        if index >= WARMUP_STEPS:
            times.append(time.perf_counter() - start_s)
    return statistics.median(max(of_one) for of_one in zip(*gather_objects(times), strict=True))


class _Halving:
    """The rounds: what ran, what it took, and whether there is time for more."""

    def __init__(self, run: RunCandidate, deadline_s: float, clock: Callable[[], float]) -> None:
        self._run, self._deadline_s, self._clock = run, deadline_s, clock
        self._known: dict[int, Measured] = {}  # by the identity of the plan: plans are large values
        self._took: dict[int, float] = {}
        self.cut_short_s: float | None = None  # what the first candidate took, where that was too long

    def round(self, plans: Sequence[Plan], num_steps: int) -> bool:
        """Runs each; False when time was up before all had run."""
        for plan in plans:
            left_s = gather_objects(self._deadline_s - self._clock())[0]
            if self._known and self._estimate_s(plan, num_steps) > left_s:
                return False
            outcome = self._run(plan, num_steps, left_s)
            self._note(plan, num_steps, outcome)
            if outcome.timed_out:
                return False
        return True

    def faster_half(self, plans: Sequence[Plan]) -> list[Plan]:
        """Of those that did not fail."""
        ran = [plan for plan in plans if self._known[id(plan)].step_time_s is not None]
        ran.sort(key=lambda plan: self._known[id(plan)].step_time_s or 0.0)
        return ran[: max((len(plans) + 1) // 2, 1)] if len(plans) > 1 else []

    @property
    def results(self) -> list[Measured]:
        """Those that went through more rounds are faster."""
        return sorted(
            self._known.values(),
            key=lambda each: (each.step_time_s is None, -each.num_rounds, each.step_time_s or 0.0),
        )

    def _note(self, plan: Plan, num_steps: int, outcome: Outcome) -> None:
        before = self._known.get(id(plan))
        if outcome.timed_out and not self._known:
            self.cut_short_s = outcome.seconds
        if outcome.step_time_s is None and outcome.timed_out and before is not None:
            return  # what its shorter run has shown still holds
        rounds = 1 if before is None else before.num_rounds + 1
        self._known[id(plan)] = Measured(plan, outcome.step_time_s, num_steps, rounds, outcome.error)
        self._took[id(plan)] = outcome.seconds

    def _estimate_s(self, plan: Plan, num_steps: int) -> float:
        """What the next run takes, from its own last one or from those of others; equal on every rank."""
        before = self._known.get(id(plan))
        took = gather_objects(self._took)[0]
        if before is None or before.step_time_s is None:
            return statistics.median(took.values())
        return float(self._took[id(plan)] + (num_steps - before.num_steps) * before.step_time_s)
