"""BMTrain's learning-rate schedules and WSD: a warm-up and a decay, both pure functions of the iteration."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwright.errors import CheckpointError, ConfigError, did_you_mean, join_names
from meshwright.lr_scheduler.linear_warmup import check_optimizer

_NO_END = -1  # as end_iter
# BMTrain's schedulers save these; every state has at least them.
_SEED_STATE = frozenset({"start_lr", "warmup_iter", "end_iter", "num_iter"})


class WarmupLRScheduler(LRScheduler, ABC):
    """Base class of schedules by iteration alone: a warm-up below ``warmup_iter``, a decay from there on.

    It is a torch ``LRScheduler`` with BMTrain's constructor and ``step``. Subclasses define :meth:`get_lr_decay`, and
    :meth:`get_lr_warmup` unless the warm-up is linear. Attributes that they set *before* ``super().__init__``, which
    already applies a rate, become part of the state dict.

    Every ``step`` sets the rates anew. In torch's ``ChainedScheduler`` it therefore has to come first, and those after
    it multiply its rate; in a ``SequentialLR`` it counts from 0 when its turn comes.

    BMTrain's ``get_lr()`` returns one number. Here it returns a list with one rate per group, as in torch; the number
    is :attr:`current_lr`. BMTrain overwrites the rates of groups that have their own; here each group keeps its ratio
    to the optimizer's default rate. Groups that all have the same rate get the schedule's.

    Args:
        optimizer: A torch optimizer, or any object with ``param_groups``.
        start_lr: The rate at the end of the warm-up (for Noam: times the square root of ``warmup_iter``).
        warmup_iter: Iterations of warm-up; 0 for none.
        end_iter: Last iteration of the decay, counted from the start of the run; not below ``warmup_iter``. -1 for
            none, in schedules that do not decay towards an end.
        num_iter: Iterations already done. The rate of this iteration is applied at once: a new run with a warm-up does
            its first step with a rate of 0.

    Raises:
        ConfigError: Without an optimizer, or when the numbers do not make a schedule.
    """

    optimizer: Any
    base_lrs: list[float | Tensor]
    needs_end: ClassVar[bool] = False
    """Whether the decay depends on ``end_iter``."""

    def __init__(
        self,
        optimizer: Optimizer | Any,
        start_lr: float,
        warmup_iter: int,
        end_iter: int,
        num_iter: int = 0,
    ) -> None:
        # No super().__init__: it accepts only torch optimizers, and it wraps optimizer.step to warn when a schedule
        # moves first, as one does that is resumed or set to an iteration.
        check_optimizer(optimizer)
        self.optimizer = optimizer
        self.start_lr = start_lr
        self.warmup_iter = warmup_iter
        self.end_iter = end_iter
        _check_number("num_iter", num_iter)
        self._step_count = 1  # torch's count of step() calls; its own constructor makes the first
        self._check()
        self.base_lrs = [group.setdefault("initial_lr", _copied(group["lr"])) for group in optimizer.param_groups]
        self._reference_lr = _reference(optimizer, self.base_lrs)  # the rate that start_lr stands for
        self.group_ratios = [self._ratio(lr) for lr in self.base_lrs]
        """The ratio of each group's rate to :attr:`current_lr`."""
        self._update_lr(num_iter)

    @abstractmethod
    def get_lr_decay(self, num_iter: int) -> float:
        """Return the rate of iteration ``num_iter``, which is ``warmup_iter`` or more."""

    def get_lr_warmup(self, num_iter: int) -> float:
        """Return the rate of iteration ``num_iter``, which is below ``warmup_iter``: linear from 0 by default."""
        return self.start_lr * num_iter / self.warmup_iter

    @property
    def num_iter(self) -> int:
        """Number of iterations done, torch's ``last_epoch``."""
        return self.last_epoch

    @property
    def current_lr(self) -> float:
        """Return the schedule's current rate, which groups without a rate of their own have.

        Raises:
            ConfigError: When no float holds it, as for ``Exponential`` with a ``gamma`` above 1 in the long run.
        """
        num_iter = max(self.num_iter, 0)  # SequentialLR holds a schedule at -1 until its turn comes
        rate = self.get_lr_warmup if num_iter < self.warmup_iter else self.get_lr_decay
        try:
            return float(rate(num_iter))
        except OverflowError as error:
            raise ConfigError(
                f"{type(self).__name__} has no learning rate for iteration {num_iter}",
                expected="a rate that a float holds",
                got=str(error),
                fix="end the run earlier, or let the rate grow less",
            ) from None

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of every group at the current iteration."""
        current = self.current_lr
        return [current * ratio for ratio in self.group_ratios]

    def step(self, num_iter: int | None = None) -> None:  # type: ignore[override]
        """Move on by one iteration, or to iteration ``num_iter``, and apply its rates to the optimizer.

        Raises:
            ConfigError: When ``num_iter`` is negative.
        """
        if num_iter is not None:
            _check_number("num_iter", num_iter)
        self._step_count += 1
        self._update_lr(num_iter)

    def _update_lr(self, epoch: int | None = None) -> None:
        # torch's SequentialLR calls this method. torch's version does not know of groups that were added later.
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._add_new_groups()
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)  # a captured CUDA graph reads this very tensor
            else:
                group["lr"] = lr
        self._last_lr = [_copied(group["lr"]) for group in self.optimizer.param_groups]

    def _add_new_groups(self) -> None:
        for group in self.optimizer.param_groups[len(self.group_ratios) :]:
            lr = group.setdefault("initial_lr", _copied(group["lr"]))
            self.base_lrs.append(lr)
            self.group_ratios.append(self._ratio(lr))

    def _ratio(self, lr: float | Tensor) -> float:
        return float(lr) / self._reference_lr if self._reference_lr > 0 else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return the position and all hyperparameters, those of subclasses included, as plain values."""
        own = {key: value for key, value in vars(self).items() if not key.startswith("_") and key not in _NOT_SAVED}
        return {**own, "num_iter": self.num_iter, "group_ratios": list(self.group_ratios)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load position and hyperparameters, and apply the rates.

        BMTrain's own states fit; values that they lack (``gamma``, ratios of groups) stay as they are.

        Raises:
            CheckpointError: When the state belongs to another scheduler or optimizer; nothing is changed then.
            ConfigError: When its numbers do not make a schedule; nothing is changed then.
        """
        self._check_state(state_dict)
        before = dict(vars(self))
        vars(self).update({key: value for key, value in state_dict.items() if key != "num_iter"})
        self.group_ratios = list(self.group_ratios)  # a copy, as it grows with new groups
        try:
            _check_number("num_iter", state_dict["num_iter"], lowest=-1)
            for ratio in self.group_ratios:
                _check_number("group_ratios", ratio)
            self._check()
            self.last_epoch = state_dict["num_iter"]
            self.get_lr()
        except ConfigError:
            vars(self).update(before)
            raise
        # Below 0 its turn in a SequentialLR has not come, and the rates are another schedule's.
        if self.last_epoch >= 0:
            self._update_lr(self.last_epoch)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        missing, unknown = sorted(_SEED_STATE - set(state)), sorted(set(state) - set(self.state_dict()))
        if missing or unknown:
            raise CheckpointError(
                f"This is not the state of a {type(self).__name__} scheduler",
                expected=join_names(self.state_dict()),
                got=f"{join_names(state)} (missing: {join_names(missing)}; unknown: {join_names(unknown)})",
                fix="load it into the kind of scheduler that saved it",
            )
        saved, groups = state.get("group_ratios", self.group_ratios), len(self.optimizer.param_groups)
        if len(saved) != groups:
            raise CheckpointError(
                "The scheduler's state is of an optimizer with other parameter groups",
                expected=f"{groups} groups",
                got=f"{len(saved)}",
                fix="build the optimizer with the same groups as before",
            )

    def _check(self) -> None:
        """Refuse numbers that make no schedule; subclasses add theirs."""
        for name in ("start_lr", "warmup_iter"):
            _check_number(name, getattr(self, name))
        if self.end_iter == _NO_END and not self.needs_end:
            return
        _check_number("end_iter", self.end_iter)
        if self.end_iter < self.warmup_iter:
            raise ConfigError(
                "The schedule ends before its warm-up does",
                expected=f"end_iter at or above warmup_iter ({self.warmup_iter})",
                got=f"end_iter={self.end_iter}",
                fix="give the iterations of the whole run as end_iter, or a shorter warm-up",
            )


# torch keeps the iteration under last_epoch; base_lrs belong to the optimizer, which saves them with its groups.
_NOT_SAVED = frozenset({"optimizer", "base_lrs", "last_epoch"})


def _copied(lr: Any) -> Any:
    return lr.clone() if isinstance(lr, Tensor) else lr


def _reference(optimizer: Any, lrs: list[float | Tensor]) -> float:
    """Return the rate to which groups keep their ratio: the common one, or the optimizer's default, or the largest."""
    rates = [float(lr) for lr in lrs]
    if len(set(rates)) == 1:
        return rates[0]
    default = float(getattr(optimizer, "defaults", {}).get("lr", 0.0))
    return default if default > 0 else max(rates)


def _check_number(name: str, value: Any, lowest: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= sys.float_info.max:
        raise ConfigError(
            f"{name} is not what a schedule can use",
            expected=f"a number, {lowest} or more",
            got=repr(value),
            fix="give the highest learning rate" if name == "start_lr" else "count iterations from 0",
        )


# --- BMTrain's schedules, and WSD. Symbols: iteration n, warm-up w, end e, peak rate s (``start_lr``)

WSDDecay = Literal["linear", "exponential", "1-sqrt"]


class NoDecay(WarmupLRScheduler):
    """Warm-up s·n/w, then a constant s (BMTrain). ``end_iter`` has no effect."""

    def get_lr_decay(self, num_iter: int) -> float:
        """Return the peak rate."""
        return self.start_lr


class Noam(WarmupLRScheduler):
    """Warm-up s·n/w^1.5, then s/√n (BMTrain; Vaswani et al. 2017, §5.3). ``end_iter`` has no effect.

    The rate peaks at s/√w. Without a warm-up iteration 0 has the rate of iteration 1, which is s.
    """

    def get_lr_warmup(self, num_iter: int) -> float:
        """Return a rate that rises linearly from 0 to s/√w."""
        return self.start_lr / math.sqrt(self.warmup_iter) * num_iter / self.warmup_iter

    def get_lr_decay(self, num_iter: int) -> float:
        """Return a rate that falls with the square root of the iteration."""
        return self.start_lr / math.sqrt(max(num_iter, 1))


class Linear(WarmupLRScheduler):
    """Warm-up s·n/w, then s·(e − n)/(e − w) down to 0, where it stays (BMTrain).

    When the decay has no iterations (e = w), iteration e has the rate s and those after it 0.
    """

    needs_end = True

    def get_lr_decay(self, num_iter: int) -> float:
        """Return a rate that falls linearly to 0."""
        span = max(1, self.end_iter - self.warmup_iter)
        return max(0.0, self.start_lr * (self.warmup_iter + span - num_iter) / span)


class Cosine(WarmupLRScheduler):
    """Warm-up s·n/w, then s·(1 + cos(π·(n − w)/(e − w)))/2 down to 0 (BMTrain; Loshchilov and Hutter 2016).

    Beyond ``end_iter`` it stays at 0; BMTrain's went up again. When e = w, iteration e has the rate s.
    """

    needs_end = True

    def get_lr_decay(self, num_iter: int) -> float:
        """Return a rate that falls along half a cosine wave to 0."""
        progress = (num_iter - self.warmup_iter) / max(1, self.end_iter - self.warmup_iter)
        return max(0.0, self.start_lr * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0))))


class Exponential(WarmupLRScheduler):
    """Warm-up s·n/w, then s·γ^(n − w) (BMTrain). ``end_iter`` has no effect.

    Args:
        optimizer: See :class:`WarmupLRScheduler`, as for the next four.
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
        """Return a rate that changes by a constant factor per iteration."""
        return self.start_lr * self.gamma ** (num_iter - self.warmup_iter)

    def _check(self) -> None:
        super()._check()
        if not 0 < self.gamma < math.inf:
            raise ConfigError(
                "gamma is not a factor", expected="a number above 0", got=repr(self.gamma), fix="use 1 not to decay"
            )


class WSD(WarmupLRScheduler):
    """Warm-up, stable, decay: s·n/w, then s, then down to ``min_lr_ratio``·s, where it stays.

    Hu et al., "MiniCPM" (2024), §4: a run can go on from the end of its stable phase, and each decay from there yields
    a finished model. The defaults are theirs: exponential down to a tenth. With r the part of the decay that is done
    and m the lowest ratio, the rate divided by s is

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

    needs_end = True

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
        """Return the rate of the stable phase or of the decay."""
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
