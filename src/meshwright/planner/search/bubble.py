"""How long the ranks of a pipeline wait for each other at least."""

from __future__ import annotations

import functools
import math

from meshwright.cost.pipeline import StageTimes, pipeline_s, settled_after


def bubble(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """Waiting, in units of what a rank computes for a micro-batch."""
    # More than these only go on as the last ones did.
    return _played_bubble(schedule, ranks, stages_per_rank, settled_after(schedule, ranks, micro_batches))


@functools.lru_cache(maxsize=4096)
def _played_bubble(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    times = [StageTimes(1 / 3, 2 / 3)] * ranks
    try:
        return max(pipeline_s(schedule, times, 0.0, stages_per_rank, micro_batches) - micro_batches, 0.0)
    except ValueError:  # numbers that the schedule does not run with
        return math.inf
