"""Run the best few plans on the real machine by successive halving within a time limit, and keep the fastest."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.errors import ConfigError, StrategyError
from meshwright.planner.plans import Plan
from meshwright.runtime import broadcast_object, largest, synchronize_device

NUM_CANDIDATES, FIRST_STEPS, WARMUP_STEPS = 6, 3, 1
LEAST_ROUNDS = 3  # rounds of the last two: a few steps alone do not show which is faster


@dataclass(frozen=True)
class Outcome:
    """One run of one candidate.

    Args:
        times_s: Seconds of every timed step on the slowest rank; none where it failed.
        seconds: Duration of the whole run.
        error: Why there are no times.
        timed_out: Whether its time was up before all of its steps.
    """

    times_s: tuple[float, ...]
    seconds: float
    error: str | None = None
    timed_out: bool = False


RunCandidate = Callable[[Plan, int, float], Outcome]
"""``run(plan, num_steps, time_limit_s)`` trains a few steps under the plan. It never raises for what the plan does, and
ends in time if it can, with the steps that it has timed until then."""


@dataclass(frozen=True)
class Measured:
    """A plan that has run.

    Args:
        plan: The plan with its prediction.
        times_s: Seconds of every step in all rounds; none if it failed, or its time was up before.
        num_rounds: Rounds that it took part in.
        error: Why there are no times.
    """

    plan: Plan
    times_s: tuple[float, ...]
    num_rounds: int
    error: str | None = None

    @property
    def step_time_s(self) -> float | None:
        """Return the median time of the steps; None if none ran."""
        return statistics.median(self.times_s) if self.times_s else None

    @property
    def num_steps(self) -> int:
        """Return the number of timed steps."""
        return len(self.times_s)


def measure(
    plans: Sequence[Plan],
    run_candidate: RunCandidate,
    time_limit: float,
    *,
    num_candidates: int = NUM_CANDIDATES,
    clock: Callable[[], float] = time.monotonic,
) -> list[Measured]:
    """Run the first few plans and return those that ran, the fastest first and failed ones last.

    In a world of several ranks it is collective, and rank 0's clock decides for all.

    Args:
        plans: Best first, by prediction.
        run_candidate: Runs one plan.
        time_limit: Seconds for all of them together.
        num_candidates: Maximum number of plans to run.
        clock: Seconds of a monotonic clock.

    Raises:
        ConfigError: When the limit is too short for one candidate, saying how long one takes.
    """
    check_time_limit(time_limit)
    halving = _Halving(run_candidate, clock() + time_limit, clock)
    alive, steps = list(plans[:num_candidates]), FIRST_STEPS
    for number in itertools.count(1):
        if not halving.round(alive, steps):
            break
        alive = halving.faster_half(alive, at_least=2 if number < LEAST_ROUNDS else 1)
        if len(alive) <= 1:
            break
        steps *= 2
    if halving.too_short_s is not None:
        raise ConfigError(
            "time_limit is too short to run one candidate",
            expected=f"about {max(2 * halving.too_short_s, 1):.0f} seconds or more",
            got=f"{time_limit:g}, and one takes {halving.too_short_s:.1f} seconds or more",
            fix="give more time, or leave time_limit out to choose by prediction",
        )
    return halving.results


def check_time_limit(time_limit: float | None) -> None:
    """Refuse a time limit that is no duration; None is no limit.

    Raises:
        ConfigError: Naming the value.
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


def step_times(
    step: Callable[[], Any], num_steps: int, device: torch.device, time_limit: float = math.inf
) -> tuple[float, ...]:
    """Time steps on the slowest rank, after one warm-up step; collective.

    Ranks begin every step together. They end early, all after the same step, when the first rank's time is up or would
    be up after another step. A running step is not interrupted.

    Args:
        step: Trains one step.
        num_steps: Steps to time.
        device: This rank's device.
        time_limit: Seconds from now.

    Returns:
        Seconds of each step.
    """
    times: list[float] = []
    end_s = time.perf_counter() + time_limit
    over = broadcast_object(time_limit <= 0)
    for index in range(WARMUP_STEPS + num_steps):
        if over:
            break
        took = _seconds_of(step, device)
        next_s = took if index >= WARMUP_STEPS else 0.0  # warm-up steps are slower
        over = broadcast_object(time.perf_counter() + next_s > end_s)
        if index >= WARMUP_STEPS:
            times += largest([took])
    return tuple(times)


def _seconds_of(step: Callable[[], Any], device: torch.device) -> float:
    synchronize_device(device)
    start_s = time.perf_counter()
    step()
    synchronize_device(device)
    return time.perf_counter() - start_s


class _Halving:
    """Rounds of successive halving within a time limit."""

    def __init__(self, run: RunCandidate, deadline_s: float, clock: Callable[[], float]) -> None:
        self._run, self._deadline_s, self._clock = run, deadline_s, clock
        self._known: dict[int, Measured] = {}  # by the identity of the plan: plans are large values
        self._last: dict[int, Outcome] = {}

    def round(self, plans: Sequence[Plan], num_steps: int) -> bool:
        """Run every plan; return False when time was up before all had run."""
        for place, plan in enumerate(plans, start=1):
            left_s = broadcast_object(self._deadline_s - self._clock())
            if self._known and (left_s <= 0 or self._estimate_s(plan, num_steps) > left_s):
                return False
            limit_s = left_s if place == len(plans) else left_s / 2
            outcome = self._run(plan, num_steps, limit_s)
            self._note(plan, outcome)
            if outcome.timed_out and limit_s == left_s:
                return False
        return True

    def faster_half(self, plans: Sequence[Plan], at_least: int = 1) -> list[Plan]:
        """Return the faster half of the plans that did not fail."""
        ran = [plan for plan in plans if self._known[id(plan)].step_time_s is not None]
        ran.sort(key=lambda plan: self._known[id(plan)].step_time_s or 0.0)
        return ran[: max((len(plans) + 1) // 2, at_least)] if len(plans) > 1 else []

    @property
    def results(self) -> list[Measured]:
        """Return all results, the fastest first: plans that survived more rounds count as faster."""
        return sorted(
            self._known.values(),
            key=lambda each: (each.step_time_s is None, -each.num_rounds, each.step_time_s or 0.0),
        )

    @property
    def too_short_s(self) -> float | None:
        """Return the shortest duration of a candidate, if time was up before any had run a step; else None."""
        if any(each.times_s for each in self._known.values()):
            return None
        return min((each.seconds for each in self._last.values() if each.timed_out), default=None)

    def _note(self, plan: Plan, outcome: Outcome) -> None:
        before = self._known.get(id(plan))
        self._last[id(plan)] = outcome
        if before is not None and outcome.timed_out and not outcome.times_s:
            return  # the times of its shorter run still hold
        failed = not outcome.times_s
        times, rounds = (before.times_s, before.num_rounds) if before is not None else ((), 0)
        every = () if failed else (*times, *outcome.times_s)
        self._known[id(plan)] = Measured(plan, every, rounds + 1, outcome.error if failed else None)

    def _estimate_s(self, plan: Plan, num_steps: int) -> float:
        """Estimate the next run's seconds from its own last run, or from those of others; equal on every rank."""
        last, known = self._last.get(id(plan)), self._known.get(id(plan))
        if last is None or known is None or known.step_time_s is None:
            took = [each.seconds for each in self._last.values()]
            return float(broadcast_object(statistics.median(took)))
        seconds = last.seconds + (num_steps - len(last.times_s)) * known.step_time_s
        return float(broadcast_object(seconds))


# --- The plan to train under


def measured_best(
    plans: Sequence[Plan], run_candidate: RunCandidate, time_limit: float
) -> tuple[Plan, str, list[Measured]]:
    """Return the fastest plan, one line about the choice, and all results; see :func:`measure`.

    Args:
        plans: Best first, by prediction.
        run_candidate: Runs one plan.
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
    # A plan that was dropped early may have the smaller figure by chance, hence the numbers of steps.
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


# --- Candidates in their own processes, whose failure does not affect this one

# Seconds between SIGTERM and SIGKILL. The launcher would give its ranks half a minute, but they have nothing to save,
# and each ends when its launcher is gone.
_STOP_S = 3.0
_OF_RANKS = 0.95  # fraction of the time for the ranks' work: the rest is for ending them before they are killed
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_in_processes(entry: str, *, nproc: int, folder: Path | None = None) -> RunCandidate:
    """Return a function that runs each candidate as ``nproc`` new ranks on this machine.

    A process that is a rank itself must not use it: its world exists already, and occupies the devices.

    Args:
        entry: ``"package.module:function"`` or ``"file.py:function"``. Every rank calls
            ``function(strategy, num_micro_batches)`` after ``init_distributed``; it returns a function that trains one
            step, such as ``lambda: accelerated.step(batch)``.
        nproc: Number of ranks.
        folder: Folder for the ranks' results; None: a temporary one.
    """

    def run(plan: Plan, num_steps: int, time_limit: float) -> Outcome:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            return _run(plan, num_steps, time_limit, entry, nproc, Path(place))

    return run


def _run(plan: Plan, num_steps: int, time_limit: float, entry: str, nproc: int, place: Path) -> Outcome:
    start_s = time.monotonic()
    plan.strategy.save(str(place / "strategy.json"))
    request = {"entry": entry, "num_steps": num_steps, "num_micro_batches": plan.step.num_micro_batches, "nproc": nproc}
    request["end_s"] = time.time() + time_limit * _OF_RANKS
    (place / "request.json").write_text(json.dumps(request))
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    with (place / "output").open("w") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "meshwright.planner.measure.dry_run_worker", str(place)],
            env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = child.wait(timeout=max(time_limit, 0.1))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(child)
    seconds = time.monotonic() - start_s
    if status is None:
        return Outcome((), seconds, f"it had not ended after {time_limit:.0f} s", timed_out=True)
    result = place / "result.json"
    if status != 0 or not result.exists():
        return Outcome((), seconds, _why(place, status))
    times_s = tuple(map(float, json.loads(result.read_text())["times_s"]))
    error = None if times_s else f"no step was timed in {seconds:.1f} s"
    return Outcome(times_s, seconds, error, timed_out=len(times_s) < num_steps)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the launcher's process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None and number is signal.SIGTERM:
            return
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return
        try:
            child.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            continue


def _why(place: Path, status: int) -> str:
    """Return the first rank's error; without one, the last line that the launcher printed."""
    for error in sorted(place.glob("error.*")):
        return error.read_text()
    printed = [line for line in (place / "output").read_text(errors="replace").splitlines() if line.strip()]
    return printed[-1].removeprefix("meshwright: ") if printed else f"it ended with status {status}"
