"""A model's run on a sample, for what has to be seen running."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class SampleRun:
    """How to run the model once.

    Args:
        inputs_of: ``inputs_of(samples)`` returns a model input of that many samples; None when there is none to be had.
        forward: ``forward(model, inputs)``.
    """

    inputs_of: Callable[[int], Any]
    forward: Callable[[nn.Module, Any], Any]
