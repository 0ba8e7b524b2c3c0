"""A linear warm-up and a decay over the rest of the run, as a `LambdaLR` with a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from meshwright.errors import ConfigError, did_you_mean


def check_optimizer(optimizer: Any) -> None:
    """Refuse objects without learning rates to set.

    Raises:
        ConfigError: When there is nothing to schedule.
    """
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list) or not all(isinstance(group, dict) and "lr" in group for group in groups):
        raise ConfigError(
            "A scheduler without its optimizer",
            expected="an optimizer: an object whose param_groups are dicts with an 'lr'",
            got=type(optimizer).__name__,
            fix="pass the optimizer whose learning rate is to follow the schedule as the first argument",
        )
    if not groups:
        raise ConfigError(
            "The optimizer has nothing to schedule",
            expected="one parameter group or more",
            got="none",
            fix="build the scheduler after the optimizer has its parameters",
        )
    if any(group["lr"] is None for group in groups):
        raise ConfigError(
            "The optimizer chooses its own steps, and has no learning rate to schedule",
            expected="an lr in every parameter group",
            got="lr=None",
            fix="leave the scheduler out; or give the optimizer an lr, which Adafactor takes with relative_step=False",
        )


Decay = Literal["cosine", "linear", "constant"]
DECAYS: tuple[str, ...] = get_args(Decay)


def warmup_decay(
    optimizer: Optimizer,
    *,
    num_steps: int,
    warmup_steps: int = 0,
    decay: Decay = "cosine",
    min_lr_ratio: float = 0.0,
) -> LambdaLR:
    """Raise the learning rate linearly over ``warmup_steps``, then lower it to ``min_lr_ratio`` of its peak.

    Weights already move in the first step: warm-up step k of w runs at k/w of the peak. The last step runs just above
    the lowest rate, which holds from then on. The cosine is that of Loshchilov and Hutter, "SGDR" (2016), without
    restarts.

    The state dict holds the position only. A run that is resumed with another ``num_steps`` follows the new curve: from
    its first step if ``meshwright.store`` loads it, from its second after ``load_state_dict`` alone.

    Args:
        optimizer: The ``lr`` of its groups are the peaks.
        num_steps: Optimizer steps of the whole run, warm-up included.
        warmup_steps: Steps of warm-up; a shorter run ends within it.
        decay: ``"cosine"``, ``"linear"``, or ``"constant"``, which stays at the peak.
        min_lr_ratio: Lowest rate as a fraction of the peak.

    Raises:
        ConfigError: When the numbers do not make a schedule, or the optimizer has no learning rate.
    """
    check_optimizer(optimizer)
    _check(num_steps, warmup_steps, decay, min_lr_ratio)
    return LambdaLR(optimizer, _factor(num_steps, warmup_steps, decay, min_lr_ratio))


def _factor(num_steps: int, warmup_steps: int, decay: Decay, min_lr_ratio: float) -> Callable[[int], float]:
    # A closure and not a callable object: LambdaLR stores an object's attributes in its state dict, and a resumed run
    # would then follow the old run's length.
    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if decay == "constant":
            return 1.0
        progress = min((step - warmup_steps) / max(num_steps - warmup_steps, 1), 1.0)
        height = 1.0 - progress if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return min_lr_ratio + (1.0 - min_lr_ratio) * height

    return factor


def _check(num_steps: int, warmup_steps: int, decay: str, min_lr_ratio: float) -> None:
    if decay not in DECAYS:
        raise ConfigError(
            f"Unknown decay {decay!r}{did_you_mean(decay, DECAYS)}",
            expected=f"one of {', '.join(DECAYS)}",
            got=repr(decay),
            fix="use one of these",
        )
    if num_steps < 1:
        raise ConfigError(
            "num_steps is not a number of steps",
            expected="1 or more",
            got=repr(num_steps),
            fix="give the steps of the whole run",
        )
    if warmup_steps < 0:
        raise ConfigError(
            "warmup_steps is not a number of steps",
            expected="0 or more",
            got=repr(warmup_steps),
            fix="use 0 for no warm-up",
        )
    if not 0.0 <= min_lr_ratio <= 1.0:
        raise ConfigError(
            "min_lr_ratio is not a fraction",
            expected="0 to 1",
            got=repr(min_lr_ratio),
            fix="use 0 to decay to nothing, 1 not to decay",
        )
