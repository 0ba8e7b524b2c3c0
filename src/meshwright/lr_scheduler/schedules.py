"""BMTrain's schedules, and WSD. Iteration n · warm-up w · end e · rate at the top s (``start_lr``)."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from meshwright.errors import ConfigError, did_you_mean
from meshwright.lr_scheduler.base import WarmupLRScheduler

WSDDecay = Literal["linear", "exponential", "1-sqrt"]


class NoDecay(WarmupLRScheduler):
    """Warm-up s·n/w, then s for good (BMTrain). ``end_iter`` has no effect."""

    def get_lr_decay(self, num_iter: int) -> float:
        """The rate at the top."""
        return self.start_lr


class Noam(WarmupLRScheduler):
    """Warm-up s·n/w^1.5, then s/√n (BMTrain; Vaswani et al. 2017, §5.3). ``end_iter`` has no effect.

    The rate peaks at s/√w. Without a warm-up iteration 0 has the rate of iteration 1, which is s.
    """

    def get_lr_warmup(self, num_iter: int) -> float:
        """Linear from 0 to s/√w."""
        return self.start_lr / math.sqrt(self.warmup_iter) * num_iter / self.warmup_iter

    def get_lr_decay(self, num_iter: int) -> float:
        """The inverse square root of the iteration."""
        return self.start_lr / math.sqrt(max(num_iter, 1))


class Linear(WarmupLRScheduler):
    """Warm-up s·n/w, then s·(e − n)/(e − w) down to 0, where it stays (BMTrain).

    When the decay has no iterations (e = w), iteration e has the rate s and those after it 0.
    """

    def get_lr_decay(self, num_iter: int) -> float:
        """A straight line to 0."""
        span = max(1, self.end_iter - self.warmup_iter)
        return max(0.0, self.start_lr * (self.warmup_iter + span - num_iter) / span)


class Cosine(WarmupLRScheduler):
    """Warm-up s·n/w, then s·(1 + cos(π·(n − w)/(e − w)))/2 down to 0 (BMTrain; Loshchilov and Hutter 2016).

    Beyond ``end_iter`` it stays at 0; BMTrain's went up again. When e = w, iteration e has the rate s.
    """

    def get_lr_decay(self, num_iter: int) -> float:
        """Half a cosine wave to 0."""
        progress = (num_iter - self.warmup_iter) / max(1, self.end_iter - self.warmup_iter)
        return max(0.0, self.start_lr * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0))))


class Exponential(WarmupLRScheduler):
    """Warm-up s·n/w, then s·γ^(n − w) (BMTrain). ``end_iter`` has no effect.

    Args:
        optimizer: See :class:`WarmupLRScheduler`, as are the next four.
        start_lr: s.
        warmup_iter: w.
        end_iter: e.
        num_iter: n.
        gamma: Factor per iteration, above 0; above 1 the rate rises, as in a search for the best one.
    """

    def __init__(
        self,
        optimizer: Any,
        start_lr: float,
        warmup_iter: int,
        end_iter: int,
        num_iter: int = 0,
        gamma: float = 0.95,
    ) -> None:
        self.gamma = gamma
        super().__init__(optimizer, start_lr, warmup_iter, end_iter, num_iter)

    def get_lr_decay(self, num_iter: int) -> float:
        """A constant factor per iteration."""
        return self.start_lr * self.gamma ** (num_iter - self.warmup_iter)

    def _check(self) -> None:
        super()._check()
        if not 0 < self.gamma < math.inf:
            raise ConfigError(
                "gamma is not a factor", expected="a number above 0", got=repr(self.gamma), fix="use 1 not to decay"
            )


class WSD(WarmupLRScheduler):
    """Warm-up, stable, decay: s·n/w, then s, then down to ``min_lr_ratio``·s, where it stays.

    Hu et al., "MiniCPM" (2024), §4: a run can go on from the end of its stable phase, and each decay from there is a
    finished model. The defaults are theirs: exponential down to a tenth. With r the part of the decay that is done and
    m the lowest ratio, the rate over s is

    - ``"exponential"``: m^r
    - ``"linear"``: 1 − (1 − m)·r
    - ``"1-sqrt"``: 1 − (1 − m)·√r (Hägele et al., "Scaling laws … beyond fixed training durations", 2024)

    Args:
        optimizer: See :class:`WarmupLRScheduler`.
        start_lr: s, the rate of the stable phase.
        warmup_iter: w, the iteration at which the stable phase begins.
        decay_iter: Iteration at which the decay begins; at least ``warmup_iter``.
        end_iter: Iteration at which the decay is over; at least ``decay_iter``.
        num_iter: Iterations already done.
        min_lr_ratio: m, lowest rate as a fraction of ``start_lr``; above 0 when the decay is exponential.
        decay: Form of the decay.
    """

    def __init__(
        self,
        optimizer: Any,
        start_lr: float,
        warmup_iter: int,
        decay_iter: int,
        end_iter: int,
        num_iter: int = 0,
        min_lr_ratio: float = 0.1,
        decay: WSDDecay = "exponential",
    ) -> None:
        self.decay_iter = decay_iter
        self.min_lr_ratio = min_lr_ratio
        self.decay = decay
        super().__init__(optimizer, start_lr, warmup_iter, end_iter, num_iter)

    def get_lr_decay(self, num_iter: int) -> float:
        """The stable phase and the decay."""
        done = (num_iter - self.decay_iter) / max(1, self.end_iter - self.decay_iter)
        done = min(max(done, 0.0), 1.0)
        if self.decay == "exponential":
            return self.start_lr * self.min_lr_ratio**done
        height = done if self.decay == "linear" else math.sqrt(done)
        return self.start_lr * (1.0 - (1.0 - self.min_lr_ratio) * height)

    def _check(self) -> None:
        super()._check()
        if not self.warmup_iter <= self.decay_iter <= self.end_iter:
            raise ConfigError(
                "The decay does not lie between warm-up and end",
                expected=f"decay_iter between {self.warmup_iter} and {self.end_iter}",
                got=repr(self.decay_iter),
                fix="give the iteration at which the decay begins",
            )
        if self.decay not in get_args(WSDDecay):
            raise ConfigError(
                f"Unknown decay {self.decay!r}{did_you_mean(str(self.decay), get_args(WSDDecay))}",
                expected=f"one of {', '.join(get_args(WSDDecay))}",
                got=repr(self.decay),
                fix="use one of these",
            )
        reachable = self.min_lr_ratio > 0.0 or (self.min_lr_ratio == 0.0 and self.decay != "exponential")
        if not (reachable and self.min_lr_ratio <= 1.0):
            raise ConfigError(
                "min_lr_ratio is not a fraction that this decay can reach",
                expected="above 0, up to 1" if self.decay == "exponential" else "0 to 1",
                got=repr(self.min_lr_ratio),
                fix="use decay='linear' to decay to nothing",
            )
