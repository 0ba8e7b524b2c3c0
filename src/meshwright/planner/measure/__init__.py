"""Measurements on the real machine: its kernels and links, and short runs of the best few plans."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.planner.measure.calibration import Calibrated as Calibrated, calibrate as calibrate
    from meshwright.planner.measure.dry_runs import (
        Measured as Measured,
        Outcome as Outcome,
        RunCandidate as RunCandidate,
        check_time_limit as check_time_limit,
        measure as measure,
        measured_best as measured_best,
        run_in_processes as run_in_processes,
        step_times as step_times,
    )
    from meshwright.planner.measure.learned_factors import note_runs as note_runs
    from meshwright.planner.measure.timing import Clock as Clock
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
