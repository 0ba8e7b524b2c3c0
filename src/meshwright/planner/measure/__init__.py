"""What a real machine does: its kernels and links, and short runs of the best few plans."""

from meshwright.planner.measure.calibrate import Measured, calibrate
from meshwright.planner.measure.timing import Clock

__all__ = ["Clock", "Measured", "calibrate"]
