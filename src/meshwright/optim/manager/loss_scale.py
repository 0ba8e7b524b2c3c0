"""The loss scale as a small state machine on plain numbers: halve on overflow, grow after a calm stretch."""

from __future__ import annotations

from typing import Any

from meshwright.errors import ConfigError


class LossScale:
    """Multiplies the loss so that small fp16 gradients do not vanish (Micikevicius et al. 2018, §3.2).

    Args:
        value: Starting scale; None for no scaling, a scale of 1 that never changes.
        factor: Overflow divides the scale by it and growth multiplies; a factor below 1 is taken as its inverse.
        steps: Steps without overflow after which the scale grows; None for a fixed scale.
        lowest: The scale never falls below.
        highest: The scale never grows above.

    Raises:
        ConfigError: When the numbers do not make a scale.
    """

    def __init__(
        self, value: float | None, factor: float = 2.0, steps: int | None = 1024, lowest: float = 1.0,
        highest: float = float("inf"),
    ) -> None:  # fmt: skip
        self.enabled = value is not None
        self.value = 1.0 if value is None else float(value)
        self.factor = 1.0 / factor if 0 < factor < 1 else float(factor)
        self.steps = steps
        self.lowest = float(lowest)
        self.highest = float(highest)
        self.clean_steps = 0
        """Steps without overflow since the scale last changed."""
        self._check()

    @property
    def dynamic(self) -> bool:
        """Whether overflow and growth change it."""
        return self.enabled and self.steps is not None

    def overflow(self) -> bool:
        """Lowers the scale after an overflow; returns whether there was room to."""
        self.clean_steps = 0
        if not self.dynamic:
            return False
        before = self.value
        self.value = max(before / self.factor, self.lowest)
        return self.value < before

    def clean(self) -> None:
        """Counts a step without overflow, and grows when there were enough."""
        if not self.dynamic or self.steps is None:
            return
        self.clean_steps += 1
        if self.clean_steps >= self.steps:
            self.value = min(self.value * self.factor, self.highest)
            self.clean_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Everything, under BMTrain's names for the arguments."""
        return {
            "loss_scale": self.value,
            "loss_scale_enabled": self.enabled,
            "loss_scale_factor": self.factor,
            "loss_scale_steps": self.steps,
            "min_loss_scale": self.lowest,
            "max_loss_scale": self.highest,
            "clean_steps": self.clean_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over :meth:`state_dict`; BMTrain's own, which has the first two entries only, keeps the rest."""
        self.enabled = bool(state["loss_scale_enabled"])
        self.value = float(state["loss_scale"])
        self.factor = float(state.get("loss_scale_factor", self.factor))
        self.steps = state.get("loss_scale_steps", self.steps)
        self.lowest = float(state.get("min_loss_scale", self.lowest))
        self.highest = float(state.get("max_loss_scale", self.highest))
        self.clean_steps = int(state.get("clean_steps", 0))

    def _check(self) -> None:
        if not 1 < self.factor < float("inf"):
            raise _bad("loss_scale_factor", self.factor, "a number other than 1, above 0", "use 2")
        if self.steps is not None and self.steps < 1:
            raise _bad("loss_scale_steps", self.steps, "1 or more steps, or None", "use None for a fixed scale")
        if not 0 < self.lowest <= self.highest:
            limits = f"{self.lowest} and {self.highest}"
            raise _bad("min_loss_scale or max_loss_scale", limits, "0 < min_loss_scale <= max_loss_scale", "swap them")
        if self.enabled and not (self.lowest <= self.value <= self.highest and self.value < float("inf")):
            expected = f"a finite number from min_loss_scale {self.lowest} to max_loss_scale {self.highest}"
            raise _bad("loss_scale", self.value, expected, "begin with 2**16, or leave it out for no scaling")


def _bad(name: str, value: Any, expected: str, fix: str) -> ConfigError:
    return ConfigError(f"{name} does not make a loss scale", expected=expected, got=repr(value), fix=fix)
