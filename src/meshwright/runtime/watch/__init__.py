"""Ranks that watch each other: a hang, and a rank that slows the others down, get a name."""

from meshwright.runtime.watch.verdict import Report, Verdict, slow_ranks, verdict
from meshwright.runtime.watch.watch import Watch

__all__ = ["Report", "Verdict", "Watch", "slow_ranks", "verdict"]
