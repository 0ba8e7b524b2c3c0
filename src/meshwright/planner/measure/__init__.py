"""What a real machine does: its kernels and links, and short runs of the best few plans."""

from meshwright.planner.measure.best import measured_best
from meshwright.planner.measure.calibrate import Calibrated, calibrate
from meshwright.planner.measure.dry_runs import (
    Measured,
    Outcome,
    RunCandidate,
    check_time_limit,
    measure,
    step_times,
)
from meshwright.planner.measure.learning import note_runs
from meshwright.planner.measure.processes import run_in_processes
from meshwright.planner.measure.timing import Clock

__all__ = [
    "Calibrated",
    "Clock",
    "Measured",
    "Outcome",
    "RunCandidate",
    "calibrate",
    "check_time_limit",
    "measure",
    "measured_best",
    "note_runs",
    "run_in_processes",
    "step_times",
]
