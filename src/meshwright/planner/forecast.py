"""What a cluster makes of a plan: seconds of a step, the moment of its peak, samples and money."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from meshwright.cost import Calibration, Cluster, Peak, Step, StepTime, peak, simulate

_SECONDS_PER_HOUR = 3600


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A step on a cluster, before it has run.

    Args:
        cluster: What it runs on.
        time: Seconds of a step, and where they go.
        peaks: The most that each distinct rank holds, and when; one without a pipeline, else one for every rank of it.
        samples: Of a step, over all ranks.
        tokens_per_sample: None where a sample has no number of tokens.
        calibration: What kernels and links were taken to reach; None: those of the cluster.
    """

    cluster: Cluster
    time: StepTime
    peaks: tuple[Peak, ...]
    samples: int
    tokens_per_sample: int | None = None
    calibration: Calibration | None = None

    @functools.cached_property
    def peak(self) -> Peak:
        """Of the rank that holds most."""
        return max(self.peaks, key=lambda each: each.allocated_bytes)

    @property
    def samples_per_s(self) -> float:
        """Over all ranks."""
        return self.samples / self.time.step_time_s

    @property
    def tokens_per_s(self) -> float | None:
        """Over all ranks."""
        return None if self.tokens_per_sample is None else self.samples_per_s * self.tokens_per_sample

    @property
    def price_per_step(self) -> float | None:
        """In US dollars, for all devices; None where the device has no price."""
        per_hour = self.cluster.device.price_per_hour
        if per_hour is None:
            return None
        return per_hour * self.cluster.num_devices * self.time.step_time_s / _SECONDS_PER_HOUR


def forecast(
    steps: Sequence[Step],
    cluster: Cluster,
    *,
    samples: int,
    tokens_per_sample: int | None = None,
    calibration: Calibration | None = None,
) -> Forecast:
    """Plays the steps of a pipeline's ranks, or the one step of all, on a cluster.

    Args:
        steps: After all ``cost`` twins.
        cluster: What they run on.
        samples: Of a step, over all ranks.
        tokens_per_sample: None where a sample has no number of tokens.
        calibration: What kernels and links reach; None: those of the cluster.
    """
    peaks = {number: peak(step) for number, step in {id(step): step for step in steps}.items()}
    every = tuple(peaks[id(step)] for step in steps)
    return Forecast(cluster, simulate(steps, cluster, calibration), every, samples, tokens_per_sample, calibration)
