"""Detect loss spikes by the median of recent losses and its absolute deviation, which a spike hardly moves."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer

from meshwright.errors import ConfigError
from meshwright.optim.guarded_step import SPIKE_WATCH, inner_optimizer

SpikeAction = Literal["skip", "warn", "stop", "rollback"]
_SIGMA_PER_MAD = 1.4826  # for a normal distribution (Rousseeuw & Croux 1993)
# A share of the median. Where losses hardly vary, every other one would count as a spike without it.
_LEAST_SPREAD = 0.01


@dataclass(frozen=True)
class SpikePolicy:
    """Definition of a loss spike, and the action to take."""

    action: SpikeAction = "skip"
    window: int = 128
    """Number of recent losses, spikes left out, to compare with."""
    threshold: float = 6.0
    """Standard deviations above the median, estimated from the median absolute deviation."""
    patience: int = 16
    """Skipped steps in a row after which training stops: a loss that stays up is no spike."""


class SpikeWatch:
    """Running median and spread of recent losses. Ranks that pass it equal losses get equal answers.

    Args:
        policy: The definition of a spike.

    Raises:
        ConfigError: When the policy's numbers cannot be used.
    """

    def __init__(self, policy: SpikePolicy) -> None:
        if policy.window < 2 or policy.threshold <= 0 or policy.patience < 1:
            raise ConfigError(
                "These numbers find no spikes",
                expected="a window of 2 or more, a threshold above 0, and a patience of 1 or more",
                got=str(policy),
                fix="leave them out: the defaults are made for losses that vary by a few per cent",
            )
        self.policy = policy
        self._losses: deque[float] = deque(maxlen=policy.window)
        self.in_a_row = 0
        """Number of spikes in a row up to the last step."""
        self.num_spikes = 0
        """Number of spikes since this watch was made."""

    @property
    def limit(self) -> float:
        """Return the highest loss that is no spike; infinite until half the window has been seen."""
        if 2 * len(self._losses) < self.policy.window:
            return math.inf
        median = statistics.median(self._losses)
        deviation = statistics.median(abs(loss - median) for loss in self._losses)
        return median + self.policy.threshold * max(_SIGMA_PER_MAD * deviation, _LEAST_SPREAD * abs(median))

    def is_spike(self, loss: float) -> bool:
        """Return whether the loss of a step is a spike; call it once per step. Inf and nan always are.

        Later losses are not compared with a spike, unless the policy only warns: a loss that stays up is then soon
        normal.
        """
        found = not math.isfinite(loss) or loss > self.limit
        self.in_a_row = self.in_a_row + 1 if found else 0
        self.num_spikes += found
        if math.isfinite(loss) and (not found or self.policy.action == "warn"):
            self._losses.append(loss)
        return found

    @property
    def out_of_patience(self) -> bool:
        """Return whether ``patience`` steps in a row were spikes."""
        return self.in_a_row >= self.policy.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the losses to compare with, and the count of spikes in a row."""
        return {"losses": list(self._losses), "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; a shorter window keeps the latest losses."""
        self._losses = deque((float(loss) for loss in state["losses"]), maxlen=self.policy.window)
        self.in_a_row = int(state["in_a_row"])


def watch_spikes(optimizer: Optimizer, watch: SpikeWatch) -> None:
    """Attach a watch to the optimizer, so that checkpoints include it; see :func:`~meshwright.optim.spike_watch_of`."""
    setattr(inner_optimizer(optimizer), SPIKE_WATCH, watch)
