"""Stop a search when its time is up, also while a model is traced."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from meshwright.errors import StrategyError
from meshwright.planner.trace.op_recording import interrupts

USUAL_LIMIT_S = 20.0
"""Seconds of processor time after which a search that a user starts ends with the best so far."""


class OutOfTimeError(BaseException):
    """The time is up. No plain exception: what traces a model takes every such for a failure of the model."""


class TimeLimit:
    """A span of this process's processor time, which other programs on the machine do not shorten.

    Args:
        seconds: How long; None: for ever.
        enough_s: Seconds after which who has found anything stops; None: not before the time is up.
    """

    def __init__(self, seconds: float | None = None, enough_s: float | None = None) -> None:
        self.seconds = seconds
        self._enough = math.inf if enough_s is None else time.process_time() + enough_s
        self._end = math.inf if seconds is None else time.process_time() + seconds
        self.place = ""  # the module that was called last

    @property
    def is_over(self) -> bool:
        """Return whether the time is up."""
        return time.process_time() > self._end

    @property
    def is_enough(self) -> bool:
        """Return whether who has found anything stops."""
        return self.is_over or time.process_time() > self._enough

    @property
    def left_s(self) -> float | None:
        """Return the seconds that are left, at least 0; None: for ever."""
        return None if self._end == math.inf else max(self._end - time.process_time(), 0.0)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise :class:`OutOfTimeError` after the time is up: as a module is called, or while it computes."""
        if self._end == math.inf:
            yield
            return
        hook = register_module_forward_pre_hook(self._enter)
        interrupts.append(self._check)
        try:
            yield
        finally:
            interrupts.remove(self._check)
            hook.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self.place = type(module).__name__
        self._check()

    def _check(self) -> None:
        if self.is_over:
            raise OutOfTimeError


def out_of_time(limit: TimeLimit) -> StrategyError:
    """Return the error for a search whose time was up before it found anything."""
    where = f"; it was running {limit.place}" if limit.place else ""
    return StrategyError(
        "The time was up before a strategy was found that fits",
        expected=f"a strategy within {limit.seconds:g} s of processor time",
        got=f"none{where}",
        fix="give it more time (limit_s, --limit-s), or name a strategy to predict that alone. A module that computes "
        "its tokens one after the other in Python takes minutes to trace: shorten seq, or install its kernels",
    )
