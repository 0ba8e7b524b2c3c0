"""Delayed scaling as data: which formats, and how a scale follows from the history of largest values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

INPUT, WEIGHT, GRADIENT = 0, 1, 2
"""The three tensors of a layer that are cast to 8 bits: places in its scales and histories."""

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class DelayedScaling:
    """How tensors are scaled before they are cast: by the largest absolute values (amax) of earlier steps.

    Names, defaults and the formula ``scale = fp8_max / amax / 2**margin`` are those of TransformerEngine's
    ``recipe.DelayedScaling``, which ATorch's ``fp8`` takes its keys from.

    Args:
        margin: Powers of two left free above the largest value known.
        interval: Optimizer steps between two updates of the scales; histories grow in every step.
        fp8_format: ``HYBRID`` casts inputs and weights to E4M3 (largest value 448) and gradients to E5M2 (57344);
            ``E4M3`` casts all three to E4M3.
        amax_history_len: Steps that a history remembers.
        amax_compute_algo: ``max`` scales by the largest value in the history, ``most_recent`` by the last step's.
    """

    margin: int = 0
    interval: int = 1
    fp8_format: Literal["HYBRID", "E4M3"] = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"

    def dtype(self, role: int) -> torch.dtype:
        """The 8-bit type of inputs, weights or gradients."""
        return E5M2 if role == GRADIENT and self.fp8_format == "HYBRID" else E4M3

    def scale(self, amax: torch.Tensor, role: int) -> torch.Tensor:
        """The factor that brings ``amax`` (fp32) to the largest value of the format; infinite where ``amax`` is 0."""
        limit = torch.full_like(amax, torch.finfo(self.dtype(role)).max)  # a number over a tensor would round twice
        return limit / amax / 2.0**self.margin
