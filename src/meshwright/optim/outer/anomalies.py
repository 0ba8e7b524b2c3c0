"""Whether a replica's pseudo-gradient is one to average."""

from __future__ import annotations

import math
from typing import Any

from meshwright.runtime import print_rank

_EWMA = 0.02  # weight of the newest norm in mean and variance, as in EDiT (Cheng et al. 2024, appendix)


class AnomalyWatch:
    """Running mean and variance of the norms of one fragment's pseudo-gradients in this replica.

    Args:
        threshold: Standard deviations above the mean that make an anomaly; None lets every finite norm pass.
        warmup_syncs: Norms to see first.
    """

    def __init__(self, threshold: float | None, warmup_syncs: int) -> None:
        self._threshold, self._warmup_syncs = threshold, warmup_syncs
        self._seen, self._mean, self._variance = 0, 0.0, 0.0

    def passes(self, norm: float) -> bool:
        """Whether the pseudo-gradient takes part; an anomaly does not move the running mean."""
        if not math.isfinite(norm):
            return False
        deviation = norm - self._mean
        spread = self._threshold * math.sqrt(self._variance) if self._threshold is not None else math.inf
        if self._seen >= self._warmup_syncs and deviation > spread:
            return False
        weight = max(_EWMA, 1 / (self._seen + 1))  # a plain mean at first
        self._mean += weight * deviation
        self._variance = (1 - weight) * (self._variance + weight * deviation * deviation)
        self._seen += 1
        return True

    def state_dict(self) -> dict[str, Any]:
        """The running numbers."""
        return {"seen": self._seen, "mean": self._mean, "variance": self._variance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes them over."""
        self._seen, self._mean, self._variance = int(state["seen"]), float(state["mean"]), float(state["variance"])


def tell_left_out(num_replicas: int, size: int) -> None:
    """Says so once where only so many replicas of all have taken part in a synchronisation."""
    if num_replicas < size:
        left = "the global weights stay as they were" if num_replicas == 0 else "they go on from the others' mean"
        print_rank(
            f"meshwright: {size - num_replicas} of {size} replicas were left out, their weights had moved out of all "
            f"proportion; {left}",
            flush=True,
        )
