"""ColossalAI's learning-rate schedules: torch's with ``total_steps``, and those with a warm-up, all by step."""

from __future__ import annotations

import bisect
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler as of_torch
from torch.optim.lr_scheduler import LRScheduler

from meshwright.errors import ConfigError
from meshwright.lr_scheduler.linear_warmup import check_optimizer

__all__ = [
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "ExponentialLR",
    "FlatAnnealingLR",
    "FlatAnnealingWarmupLR",
    "LambdaLR",
    "LinearWarmupLR",
    "MultiStepLR",
    "MultiStepWarmupLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "PolynomialWarmupLR",
    "StepLR",
]


# --- Schedules that are functions of the step: a linear warm-up, a rate that stays, and a decay.


class _Phases(LRScheduler):
    """Base of schedules of three phases, whose state is the number of the step."""

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int, flat_steps: int, last: int) -> None:
        check_optimizer(optimizer)
        self.warmup_steps, self.flat_steps = int(warmup_steps), flat_steps
        self.decay_steps = total_steps - self.warmup_steps - flat_steps
        if self.warmup_steps < 0 or self.decay_steps < 0:
            raise ConfigError(
                f"{type(self).__name__}: the steps before the decay are more than all steps",
                expected="warmup_steps from 0 to total_steps",
                got=f"total_steps={total_steps} and warmup_steps={warmup_steps}",
                fix="raise total_steps, which counts the warm-up, or lower warmup_steps",
            )
        self.decay_steps = max(self.decay_steps, 1)  # a run of warm-up alone never comes to the decay
        super().__init__(optimizer, last)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rate of each group in this step."""
        return [self._rate(float(base)) for base in self.base_lrs]

    def _rate(self, base: float) -> float:
        if self.last_epoch < self.warmup_steps:
            return base * self.warmed(self.last_epoch)
        step = self.last_epoch - self.warmup_steps - self.flat_steps
        return base if step < 0 else self.decayed(step, base)

    def warmed(self, step: int) -> float:
        """Return the part of the base rate in a step of the warm-up."""
        return (step + 1) / self.warmup_steps

    @abstractmethod
    def decayed(self, step: int, base: float) -> float:
        """Return the rate in a step of the decay, which begins at 0."""


class _Cosine(_Phases):
    eta_min: float = 0.0

    def decayed(self, step: int, base: float) -> float:
        """Return half a cosine from ``base`` to ``eta_min``."""
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * step / self.decay_steps)) / 2


class CosineAnnealingWarmupLR(_Cosine):
    """A linear warm-up, then half a cosine down to ``eta_min`` at ``total_steps``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.eta_min = eta_min
        super().__init__(optimizer, total_steps, warmup_steps, 0, last_epoch)


class FlatAnnealingLR(_Cosine):
    """The base rate for a part ``pct_start`` of all steps, then half a cosine down to 0."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, pct_start: float = 0.72, last_epoch: int = -1, **kwargs: Any
    ) -> None:
        super().__init__(optimizer, total_steps, 0, _flat_steps(self, total_steps, pct_start), last_epoch)


class FlatAnnealingWarmupLR(_Cosine):
    """A linear warm-up, the base rate for a part ``pct_start`` of the rest, then half a cosine down to ``eta_min``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0.0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        self.eta_min = eta_min
        flat = _flat_steps(self, total_steps - warmup_steps, pct_start)
        super().__init__(optimizer, total_steps, warmup_steps, flat, last_epoch)


def _flat_steps(schedule: LRScheduler, steps: int, part: float) -> int:
    if not 0.0 <= part <= 1.0:
        raise ConfigError(
            f"{type(schedule).__name__}: pct_start is not a part of the steps",
            expected="a number from 0 to 1",
            got=repr(part),
            fix="leave it out for 0.72",
        )
    return int(steps * part)


class LinearWarmupLR(_Phases):
    """A linear warm-up, then a linear decay to 0 at ``total_steps``."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1, **kwargs: Any
    ) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, 0, last_epoch)

    def warmed(self, step: int) -> float:
        """Return the part of the base rate, which the first step after the warm-up reaches."""
        return (step + 1) / (self.warmup_steps + 1)

    def decayed(self, step: int, base: float) -> float:
        """Return the rate on a line to 0."""
        return base * (self.decay_steps - step) / self.decay_steps


class PolynomialWarmupLR(_Phases):
    """A linear warm-up, then a polynomial down to ``end_lr`` at ``total_steps``, which holds from then on."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        self.end_lr, self.power = end_lr, power
        super().__init__(optimizer, total_steps, warmup_steps, 0, last_epoch)

    def decayed(self, step: int, base: float) -> float:
        """Return the rate on the polynomial."""
        left = 1 - min(step, self.decay_steps) / self.decay_steps
        return self.end_lr + (base - self.end_lr) * left**self.power


class PolynomialLR(PolynomialWarmupLR):
    """:class:`PolynomialWarmupLR` without a warm-up."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer, total_steps, 0, end_lr, power, last_epoch)


class MultiStepWarmupLR(_Phases):
    """A linear warm-up, then the base rate, times ``gamma`` from each of the milestones on."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] = (),
        gamma: float = 0.1,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        if not milestones:
            raise ConfigError(
                "MultiStepWarmupLR has no milestones",
                expected="the steps at which the rate falls",
                got=repr(milestones),
                fix="pass milestones=[…]",
            )
        self.milestones = sorted(each - warmup_steps for each in milestones if each >= warmup_steps)
        self.gamma = gamma
        super().__init__(optimizer, total_steps, warmup_steps, 0, last_epoch)

    def decayed(self, step: int, base: float) -> float:
        """Return the rate after the milestones that are past."""
        return float(base * self.gamma ** bisect.bisect_right(self.milestones, step))


# --- torch's schedules, with an argument ``total_steps`` that most of them do not need.


class CosineAnnealingLR(of_torch.CosineAnnealingLR):
    """torch's, which calls ``total_steps`` ``T_max``."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, eta_min: float = 0.0, last_epoch: int = -1, **kwargs: Any
    ) -> None:
        super().__init__(optimizer, total_steps, eta_min, last_epoch)


class MultiStepLR(of_torch.MultiStepLR):
    """torch's; ``total_steps`` has no effect."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        milestones: Sequence[int] = (),
        gamma: float = 0.1,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer, list(milestones), gamma, last_epoch)


class OneCycleLR(of_torch.OneCycleLR):
    """torch's, with the rates of the optimizer's groups as the highest ones."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 10000.0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        options: dict[str, Any] = {
            "total_steps": total_steps,
            "pct_start": pct_start,
            "anneal_strategy": anneal_strategy,
            "cycle_momentum": cycle_momentum,
            "base_momentum": base_momentum,
            "max_momentum": max_momentum,
            "div_factor": div_factor,
            "final_div_factor": final_div_factor,
            "last_epoch": last_epoch,
        }
        super().__init__(optimizer, [group["lr"] for group in optimizer.param_groups], **options)


_Factor = Callable[[int], float] | list[Callable[[int], float]]


class LambdaLR(of_torch.LambdaLR):
    """torch's; ``total_steps`` has no effect."""

    def __init__(self, optimizer: Optimizer, total_steps: int, lr_lambda: _Factor, last_epoch: int = -1) -> None:
        super().__init__(optimizer, lr_lambda, last_epoch)


class MultiplicativeLR(of_torch.MultiplicativeLR):
    """torch's; ``total_steps`` has no effect."""

    def __init__(self, optimizer: Optimizer, total_steps: int, lr_lambda: _Factor, last_epoch: int = -1) -> None:
        super().__init__(optimizer, lr_lambda, last_epoch)


class StepLR(of_torch.StepLR):
    """torch's; ``total_steps`` has no effect."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, step_size: int = 1, gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, step_size, gamma, last_epoch)


class ExponentialLR(of_torch.ExponentialLR):
    """torch's; ``total_steps`` has no effect."""

    def __init__(self, optimizer: Optimizer, total_steps: int, gamma: float = 1.0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, gamma, last_epoch)
