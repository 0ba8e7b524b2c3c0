"""Detect loss spikes by the median of recent losses and its absolute deviation, which a spike hardly moves."""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from meshwright.errors import ConfigError, LossSpikeError
from meshwright.optim.guarded_step import SPIKE_WATCH, GuardedOptimizer, inner_optimizer
from meshwright.runtime import HostCopy, agreed, print_rank

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


# --- The verdict on a step: before its update, or behind it where the device decides


def judge_loss(
    loss: torch.Tensor, guard: GuardedOptimizer, spikes: SpikeWatch, *, may_be_late: bool
) -> Callable[[], SpikeAction | None]:
    """Judge the loss of a step, and make the guard skip its update where that is the policy.

    Args:
        loss: The mean over all ranks that decide together; 0-dim, equal on all of them.
        guard: The optimizer's guard.
        spikes: The earlier losses.
        may_be_late: Leave the verdict to the device where the guard can: the limit follows from earlier losses.

    Returns:
        A function to call after the update, which returns the action for a spike, or None where the loss is none.

    Raises:
        LossSpikeError: On every rank that decides, by this function or the one it returns; nothing was changed.
    """
    if not (may_be_late and guard.skips_on_device()):
        action = _told_spike(float(loss), guard, spikes)
        if action is not None and action != "warn":
            guard.leave_out()
        return lambda: action
    known = HostCopy(loss.detach())
    if spikes.policy.action != "warn":
        exact = loss.detach().double()
        # Where a scaler finds inf in the gradients, too, the loss is none of the spikes.
        guard.leave_out(exact > spikes.limit if guard.scaler is not None else ~(exact <= spikes.limit))
    return lambda: _told_spike(known.tolist(), guard, spikes)


def _told_spike(value: float, guard: GuardedOptimizer, spikes: SpikeWatch) -> SpikeAction | None:
    limit, policy = spikes.limit, spikes.policy
    if guard.scaler is not None and not math.isfinite(value):
        return None  # the gradients are not finite either, and the loss scale skips the step
    if not spikes.is_spike(value):
        return None
    if policy.action == "stop" or (policy.action == "skip" and spikes.out_of_patience):
        raise agreed(_spike_error(value, limit, spikes))
    done = {"skip": "its step is skipped", "warn": "its step is taken", "rollback": "its step is skipped"}
    text = f"the loss of {value:.4g} is a spike, above {limit:.4g}: {done[policy.action]}"
    print_rank(f"meshwright: {text}", file=sys.stderr, flush=True)
    return policy.action


def _spike_error(value: float, limit: float, spikes: SpikeWatch) -> LossSpikeError:
    if spikes.policy.action == "skip":
        return LossSpikeError(
            f"The loss has been up for {spikes.in_a_row} steps in a row, which is no spike",
            expected=f"at most {limit:.4g} within patience={spikes.policy.patience} steps",
            got=f"{value:.4g}; the weights are as they were before these steps",
            fix="look for what has changed in the data, or resume from an earlier checkpoint",
        )
    return LossSpikeError(
        "The loss of a step is a spike",
        expected=f"at most {limit:.4g}, by the {spikes.policy.window} losses before",
        got=f"{value:.4g}; the weights are as they were",
        fix='look for the cause in this batch, or skip such steps: ("loss_spike", "skip")',
    )
