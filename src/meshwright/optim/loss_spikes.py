"""Losses that jump above those before, judged by numbers that a jump itself hardly moves."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer

from meshwright.errors import ConfigError
from meshwright.optim.guarded_step import inner_optimizer

SpikeAction = Literal["skip", "warn", "stop", "rollback"]
_SIGMA_PER_MAD = 1.4826  # of a normal distribution (Rousseeuw & Croux 1993)
_LEAST_SPREAD = 0.01  # of the median: losses that hardly vary would make a spike of every other one


@dataclass(frozen=True)
class SpikePolicy:
    """What is a spike, and what happens then."""

    action: SpikeAction = "skip"
    window: int = 128
    """Losses to compare with, the latest that were no spikes."""
    threshold: float = 6.0
    """Standard deviations, as the median absolute deviation tells them, above the median."""
    patience: int = 16
    """Skipped steps in a row that end training: a loss that stays up is no spike."""


_ATTRIBUTE = "_spike_watch"


class SpikeWatch:
    """Median and spread of the latest losses. Plain numbers: ranks that give it equal losses get equal answers.

    Args:
        policy: What is a spike.

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
        """Spikes up to the last step, without another step in between."""
        self.num_spikes = 0
        """Since this watch was made."""

    @property
    def limit(self) -> float:
        """Return the highest loss that is no spike; infinite until half the window has been seen."""
        if 2 * len(self._losses) < self.policy.window:
            return math.inf
        median = statistics.median(self._losses)
        deviation = statistics.median(abs(loss - median) for loss in self._losses)
        return median + self.policy.threshold * max(_SIGMA_PER_MAD * deviation, _LEAST_SPREAD * abs(median))

    def is_spike(self, loss: float) -> bool:
        """Return whether the loss of a step is one, to be called once per step.

        Inf and nan are, from the first step on.

        A spike is not compared with later, unless the policy only warns: then a loss that stays up is soon usual.
        """
        found = not math.isfinite(loss) or loss > self.limit
        self.in_a_row = self.in_a_row + 1 if found else 0
        self.num_spikes += found
        if math.isfinite(loss) and (not found or self.policy.action == "warn"):
            self._losses.append(loss)
        return found

    @property
    def out_of_patience(self) -> bool:
        """Return whether so many steps were skipped that it is no spike."""
        return self.in_a_row >= self.policy.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the losses to compare with, and the count of spikes in a row."""
        return {"losses": list(self._losses), "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; of a longer window the latest losses."""
        self._losses = deque((float(loss) for loss in state["losses"]), maxlen=self.policy.window)
        self.in_a_row = int(state["in_a_row"])


def watch_spikes(optimizer: Optimizer, watch: SpikeWatch) -> None:
    """Make :func:`spike_watch_of` find a watch by the optimizer, so that checkpoints hold it."""
    setattr(inner_optimizer(optimizer), _ATTRIBUTE, watch)


def spike_watch_of(optimizer: Optimizer | None) -> SpikeWatch | None:
    """Return the watch over the losses that an optimizer lowers, through all its wrappers; None where there is none."""
    found: SpikeWatch | None = None if optimizer is None else getattr(inner_optimizer(optimizer), _ATTRIBUTE, None)
    return found
