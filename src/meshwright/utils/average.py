"""A running average for logs."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.errors import ConfigError


class AverageRecorder:
    """Exponential moving average of what is recorded, right from the first record on.

    Each record ``x`` makes ``v = alpha * v + (1 - alpha) * x``, from ``v = 0`` on. ``value`` after ``n`` records is
    ``v / (1 - alpha^n)``: the bias correction of Adam (Kingma & Ba 2015), as in BMTrain.

    Args:
        alpha: How much of the past each record keeps, in [0, 1).
        start_value: What ``value`` is before the first record. It leaves no trace afterwards. (BMTrain starts ``v``
            with it and corrects as though it had not: with 1 and alpha 0.9, a first record of 2 would read 11.)

    Raises:
        ConfigError: When ``alpha`` is outside [0, 1).
    """

    def __init__(self, alpha: float = 0.9, start_value: float = 0.0) -> None:
        _check_alpha(alpha)
        self.alpha, self.start_value = alpha, start_value
        self._decayed_sum = 0.0
        # 1 - alpha^n, kept by the same recursion as the sum: a constant series reads exactly as itself.
        self._weight = 0.0

    def record(self, value: float) -> None:
        """Takes one value in; a tensor of one element is read from its device."""
        self._decayed_sum = self.alpha * self._decayed_sum + (1 - self.alpha) * float(value)
        self._weight = self.alpha * self._weight + (1 - self.alpha)

    @property
    def value(self) -> float:
        """The average so far."""
        return self._decayed_sum / self._weight if self._weight else self.start_value

    def state_dict(self) -> dict[str, float]:
        """Everything that the next value depends on."""
        return {
            "alpha": self.alpha,
            "start_value": self.start_value,
            "decayed_sum": self._decayed_sum,
            "weight": self._weight,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Goes on where another recorder was.

        Raises:
            ConfigError: When the state is not one of a recorder; nothing has changed then.
        """
        missing = [name for name in self.state_dict() if name not in state]
        if missing:
            raise ConfigError(
                "The state is not that of an AverageRecorder",
                expected=", ".join(self.state_dict()),
                got=f"no {', '.join(missing)}",
                fix="pass what state_dict() returned",
            )
        _check_alpha(state["alpha"])
        self.alpha, self.start_value = state["alpha"], state["start_value"]
        self._decayed_sum, self._weight = state["decayed_sum"], state["weight"]


def _check_alpha(alpha: float) -> None:
    if not 0 <= alpha < 1:
        raise ConfigError(
            "alpha is not a share of the past", expected="0 <= alpha < 1", got=repr(alpha), fix="use 0.9 if in doubt"
        )
