"""Candidates in processes of their own: whatever becomes of them, this process lives on and knows it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from meshwright.planner.measure.dry_runs import Outcome, RunCandidate
from meshwright.planner.plan import Plan

# From being asked to being killed. The launcher would give its ranks half a minute; there is nothing that they could
# save, and each one ends when its launcher is gone.
_STOP_S = 3.0
_OF_RANKS = 0.95  # of the time, for their own: the rest is for ending them, before they are killed
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_in_processes(entry: str, *, nproc: int, folder: Path | None = None) -> RunCandidate:
    """Runs candidates as ``nproc`` ranks on this machine, started anew for each.

    Not for a process that is a rank itself: its ranks live already, and hold the devices.

    Args:
        entry: ``"package.module:function"`` or ``"file.py:function"``. Every rank calls
            ``function(strategy, num_micro_batches)`` after ``init_distributed``; it returns a function that trains one
            step, such as ``lambda: accelerated.step(batch)``.
        nproc: Ranks.
        folder: Where ranks write what they find out; None: a temporary one.
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
            [sys.executable, "-m", "meshwright.planner.measure.candidate", str(place)],
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
    told = None if times_s else f"no step was timed in {seconds:.1f} s"
    return Outcome(times_s, seconds, told, timed_out=len(times_s) < num_steps)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the launcher with its ranks: they are one process group."""
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
    """The first rank's error; where nobody has said anything, what the launcher has printed last."""
    for error in sorted(place.glob("error.*")):
        return error.read_text()
    printed = [line for line in (place / "output").read_text(errors="replace").splitlines() if line.strip()]
    return printed[-1].removeprefix("meshwright: ") if printed else f"it ended with status {status}"
